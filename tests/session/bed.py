"""A whole replica in memory: real rules, shells, pool and sessions over doubles of store, plane and sandboxes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.assembly import Replica, build
from runner.config import Settings
from runner.errors import RunnerError
from runner.ids import Ids, Key
from runner.leases.live import LiveBus
from runner.leases.port import ReplicaInfo
from runner.metrics import Metrics
from runner.sandbox.memory_files import ByNames, MemoryFiles
from runner.sandbox.port import Condition, Copied, Disk, Gone, Paths, Ran, Reaped, SandboxSpec
from runner.session.keys import KeyBook
from runner.session.port import Caller, PromptHandle, ReaderEnded
from runner.wire.models import AnswerRequest, CancelRequest, DispatchRequest, ShellRequest
from tests.session.fake_agent import FakeAgent
from tests.session.gates import SlowPlane, SlowStore
from tests.virtual_time import LoopClock

CALLER = Caller("p", frozenset({"dispatch", "read", "operate"}))


class FakeMark:
    def __init__(self, gate: asyncio.Event | None) -> None:
        self._gate = gate

    async def set(self, seconds: float) -> None:
        if self._gate is not None:
            await self._gate.wait()


class FakeCommand:
    """A command that is running: ``heard`` is its output, ``ended`` its end."""

    def __init__(self, heard: Callable[[bytes], None]) -> None:
        self.heard = heard
        self.ended: asyncio.Future[Ran] = asyncio.get_running_loop().create_future()


class FakeSandbox:
    """A sandbox around a ``FakeAgent``; what it was asked to do is in ``story``."""

    isolation = "none"
    limits: Mapping[str, object] = {}

    woken = False
    memory_kills = 0

    def __init__(self, provider: FakeProvider, spec: SandboxSpec, agent: FakeAgent) -> None:
        self.spec = spec
        self.agent = agent
        self.provider = provider
        self.story: list[str] = []
        self.marks: set[str] = set()
        self.gone = asyncio.Event()
        self.command: FakeCommand | None = None

    @property
    def transport(self) -> Any:
        return self.agent.transport

    @property
    def workspace(self) -> str:
        return f"/w/{self.spec.session_id}"

    @property
    def agent_pid(self) -> int | None:
        return self.agent.pid

    def mark(self, turn_id: str) -> FakeMark:
        self.story.append(f"mark {turn_id}")
        self.marks.add(turn_id)
        return FakeMark(self.provider.mark_gate)

    async def kill_turn(self, turn_id: str, seconds: float) -> Reaped:
        self.story.append(f"kill {turn_id}")
        if turn_id not in self.marks:
            raise RunnerError("sandbox_lost", "the turn has no mark")
        if self.provider.kill_gate is not None:
            await self.provider.kill_gate.wait()
        if self.command is not None and not self.command.ended.done():
            self.command.ended.set_result(Ran(None, 9))
        survivors = self.provider.survivors
        return Reaped(1, (4242,) if survivors else ())

    async def run(self, name: str, argv: Sequence[str], heard: Callable[[bytes], None]) -> Ran:
        """A command that runs until the test, or a kill, ends it."""
        self.story.append(f"run {argv[-1]}")
        self.command = FakeCommand(heard)
        try:
            return await self.command.ended
        finally:
            self.command = None

    async def destroy(self, grace_seconds: float = 0.5, seconds: float = 5.0) -> Gone:
        self.story.append("destroy")
        if self.provider.destroy_gate is not None:
            await self.provider.destroy_gate.wait()
        self.agent.exit(0)
        self.gone.set()
        if self.provider.unproven > 0:
            self.provider.unproven -= 1
            return Gone(False, "none", (4242,))
        self.provider.alive.discard(self.spec.seat_id)
        return Gone(True, "echild")


@dataclass
class FakeProvider:
    """Starts ``FakeSandbox`` objects; faults are switches."""

    name: str = "local"
    isolation: str = "none"
    capacity: int | None = None
    manners: dict[str, Any] = field(default_factory=dict)
    start_gate: asyncio.Event | None = None
    start_error: RunnerError | None = None
    destroy_gate: asyncio.Event | None = None
    mark_gate: asyncio.Event | None = None
    kill_gate: asyncio.Event | None = None
    survivors: bool = False
    unproven: int = 0
    sandboxes: list[FakeSandbox] = field(default_factory=list)
    alive: set[str] = field(default_factory=set)
    started: asyncio.Condition = field(default_factory=asyncio.Condition)
    removed: list[tuple[str, str]] = field(default_factory=list)
    copied: list[tuple[str, str]] = field(default_factory=list)
    adopted: list[str] = field(default_factory=list)
    adopt_error: OSError | None = None
    touched: set[Key] = field(default_factory=set)
    home: str | None = "home-1"
    written: dict[str, ByNames] = field(default_factory=dict)

    def paths(self, project: str, session_id: str, workspace_path: Path | None) -> Paths:
        return Paths(Path("/w"), Path("/h"), Path("/t"))

    async def start(self, spec: SandboxSpec) -> FakeSandbox:
        if self.start_gate is not None:
            await self.start_gate.wait()
        if self.start_error is not None:
            raise self.start_error
        agent = FakeAgent(1000 + len(self.sandboxes), self.manners)
        sandbox = FakeSandbox(self, spec, agent)
        self.alive.add(spec.seat_id)
        async with self.started:
            self.sandboxes.append(sandbox)
            self.started.notify_all()
        return sandbox

    def disks(self) -> tuple[Disk, ...]:
        return ()

    def condition(self) -> Condition:
        return Condition(True, running=len(self.alive))

    async def home_identity(self, project: str, session_id: str) -> str | None:
        return self.home

    def files(self, project: str, session_id: str, workspace_path: Path | None, recipe: str = "default") -> MemoryFiles:
        return MemoryFiles(self.written.setdefault(session_id, {}))

    async def copy_workspace(self, source: Key, to: Key) -> Copied:
        self.copied.append((source[1], to[1]))
        return "copied"

    def adopt(self, spare_id: str) -> None:
        if self.adopt_error is not None:
            raise self.adopt_error
        self.adopted.append(spare_id)

    def untouched(self, project: str, session_id: str) -> bool:
        return (project, session_id) not in self.touched

    async def sweep_spares(self) -> int:
        return 0

    async def remove(self, project: str, session_id: str, used: bool = True) -> None:
        self.removed.append((project, session_id))
        self.written.pop(session_id, None)

    async def close(self) -> None:
        return None


class CountingIds(Ids):
    """Readable ids in order; ``replica`` tells those of a second one apart."""

    def __init__(self, replica: str = "") -> None:
        super().__init__()
        self._replica = replica
        self._count = 0

    def mint(self, kind: str) -> str:
        self._count += 1
        return f"{kind}_{self._replica}{self._count}"


class Bed:
    """One replica and what a test does to it."""

    def __init__(self, replica: Replica, provider: FakeProvider, store: Any) -> None:
        self.replica = replica
        self.provider = provider
        self.store = store
        self.sessions = replica.coordinator
        self.pool = replica.services.pool

    @classmethod
    async def make(
        cls,
        *,
        settings: dict[str, Any] | None = None,
        store: Any = None,
        plane: Any = None,
        replica_id: str = "rep_1",
        proven_dead: Callable[[ReplicaInfo], bool] | None = None,
        live_dir: Path | None = None,
        live: LiveBus | None = None,
        metrics: Metrics | None = None,
        keys: KeyBook | None = None,
    ) -> Bed:
        """A replica over doubles that suspend like real ones; what an earlier one left in ``store`` is reconciled."""
        provider = FakeProvider()
        store = SlowStore() if store is None else store
        replica = await build(
            Settings.model_validate(settings or {}),
            state_dir=Path("/nowhere") if live_dir is None else live_dir.parent,
            replica_id=replica_id,
            store=store,
            plane=SlowPlane() if plane is None else plane,
            providers={"local": provider},
            clock=LoopClock(),
            ids=CountingIds("" if replica_id == "rep_1" else f"{replica_id}_"),
            proven_dead=proven_dead,
            live_dir=live_dir,
            live=live,
            metrics=metrics,
            keys=keys,
        )
        return cls(replica, provider, store)

    async def dispatch(self, session_id: str = "s", prompt: str = "hello", **fields: Any) -> PromptHandle:
        request = DispatchRequest.model_validate({"prompt": prompt, **fields})
        return await self.sessions.dispatch(CALLER, session_id, request)

    async def agent(self, count: int = 1) -> FakeAgent:
        """The ``count``-th agent that was started."""
        async with self.provider.started:
            await self.provider.started.wait_for(lambda: len(self.provider.sandboxes) >= count)
        return self.provider.sandboxes[count - 1].agent

    def sandbox(self, count: int = 1) -> FakeSandbox:
        return self.provider.sandboxes[count - 1]

    async def turn(self, session_id: str = "s", prompt: str = "hello", *, agents: int = 1, nth: int = 1) -> Any:
        """A whole turn in which the agent says ``ok``; its result."""
        handle = await self.dispatch(session_id, prompt, keep_on_disconnect=True)
        agent = await self.agent(agents)
        frame = await agent.prompt(nth)
        agent.say("ok")
        agent.answer(frame)
        return await handle.result()

    async def cancel(self, session_id: str = "s", **fields: Any) -> Any:
        return await self.sessions.cancel(CALLER, session_id, CancelRequest.model_validate(fields))

    async def shell(self, command: str, session_id: str = "s", **fields: Any) -> dict[str, Any]:
        """Run a command to its end; ``command`` of the sandbox is what a test ends it by."""
        request = ShellRequest.model_validate({"command": command, **fields})
        return await self.sessions.shell(CALLER, session_id, request)

    async def answer(self, interaction_id: str, session_id: str = "s", **fields: Any) -> Any:
        request = AnswerRequest.model_validate(fields)
        return await self.sessions.answer(CALLER, session_id, interaction_id, request)

    async def events(self, handle: PromptHandle) -> list[dict[str, Any]]:
        """Every event of a handle's stream until its end."""
        return await drained(handle.reader())

    async def history(self, session_id: str = "s", after: str | None = None) -> list[dict[str, Any]]:
        """What a late reader sees."""
        return await drained(await self.sessions.follow(CALLER, session_id, after, False))

    async def state(self, session_id: str = "s") -> str:
        return str((await self.sessions.view(CALLER, session_id))["state"])

    async def die(self) -> None:
        """End every task of the replica at once, as kill -9 does; its agents go with it."""
        services = self.replica.services
        mirrors = [self.replica.mirrors._tasks] if self.replica.mirrors is not None else []
        for tasks in (services.tasks, services.beats._tasks, services.pool._tasks, *mirrors):
            for task in list(tasks._live):
                task.cancel()
        await services.beats.close()
        await asyncio.sleep(0)
        for session in self.sessions._registry.all():
            if session.outbox._timer is not None:
                session.outbox._timer.cancel()
        if services.pool._timer is not None:
            services.pool._timer.cancel()
        for sandbox in self.provider.sandboxes:
            sandbox.agent.exit(137)
        for _ in range(5):
            # Who is dead notices nothing of its agents' end.
            await asyncio.sleep(0)
            for task in list(services.tasks._live):
                task.cancel()

    async def close(self) -> None:
        await self.replica.close()


async def drained(reader: Any) -> list[dict[str, Any]]:
    """All events of a reader that ends."""
    lines: list[dict[str, Any]] = []
    try:
        while True:
            chunk = await reader.next(3600)
            assert chunk is not None, "the reader is silent"
            lines += [json.loads(line) for line in chunk.splitlines()]
    except ReaderEnded:
        return lines
    finally:
        reader.close()


def types(events: list[dict[str, Any]]) -> list[str]:
    """Their types."""
    return [event["type"] for event in events]
