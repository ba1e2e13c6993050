"""A provider without processes: the agent is a coroutine. For tests of everything above the port."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.acp.memory import MemoryAgent, MemoryTransport
from runner.acp.transport import ExitInfo
from runner.clock import Clock
from runner.errors import RunnerError
from runner.ids import SPARES, Key
from runner.rules.files import file_names
from runner.sandbox.init_calls import GONE, lost
from runner.sandbox.memory_files import ByNames, MemoryFiles
from runner.sandbox.port import OUTPUT_BYTES, Condition, Copied, Disk, Gone, Paths, Ran, Reaped, SandboxSpec
from runner.sandbox.teardown import Teardown
from runner.sandbox.workspace import check_files
from runner.tasks import Tasks

AgentBody = Callable[[MemoryAgent], Awaitable[None]]
_FIRST_PID = 1_000_000


@dataclass(slots=True)
class Faults:
    """What goes wrong, read at the moment it would happen; all off at first.

    Attributes:
        start_gate: starts wait for it.
        start_error: starts fail with it, after the gate.
        mark_gate: marks are not taken before it.
        kill_gate: kills of a turn wait for it.
        survivors: pids that no kill of a turn gets rid of.
        destroy_gate: teardowns wait for it.
        unproven: so many teardowns end without a proof.
    """

    start_gate: asyncio.Event | None = None
    start_error: RunnerError | None = None
    mark_gate: asyncio.Event | None = None
    kill_gate: asyncio.Event | None = None
    survivors: tuple[int, ...] = ()
    destroy_gate: asyncio.Event | None = None
    unproven: int = 0


class MemoryMark:
    """A mark that is taken when its gate opens."""

    def __init__(self, sandbox: MemorySandbox, turn_id: str) -> None:
        self._sandbox = sandbox
        self._turn_id = turn_id

    async def set(self, seconds: float) -> None:
        """See ``port.Mark.set``."""
        await self._sandbox.answered(self._sandbox.faults.mark_gate, seconds)
        self._sandbox.take_mark(self._turn_id)


class MemorySandbox:
    """A transport pair and the task that plays the agent.

    Attributes:
        spec: what it was started with.
        faults: shared with its provider.
        marks, taken, kills: turn ids in the order they were asked to be marked, were marked, were killed.
        processes: turn id to the number of processes that the turn has running; a kill takes them.
        commands: every command that was run, oldest first.
        on_kill: called by each kill of a turn with its id: where a blocked tool of the agent gives way.
    """

    def __init__(
        self, spec: SandboxSpec, paths: Paths, pid: int, body: AgentBody, faults: Faults, forget: Callable[[str], None]
    ) -> None:
        self.spec = spec
        self.faults = faults
        self.marks: list[str] = []
        self.taken: list[str] = []
        self.kills: list[str] = []
        self.processes: dict[str, int] = {}
        self.commands: list[tuple[str, ...]] = []
        self.memory_kills = 0
        self._killed = asyncio.Event()
        self.on_kill: Callable[[str], None] = lambda turn_id: None
        self._paths = paths
        self._forget = forget
        self._lost = asyncio.Event()
        self._transport = MemoryTransport(pid)
        self._tasks = Tasks(f"sandbox {spec.seat_id}")
        self._teardown = Teardown(self._tasks, self._tear_down)
        self._agent = self._tasks.spawn("agent", self._play(body))
        self._agent.add_done_callback(self._ended)

    async def _play(self, body: AgentBody) -> None:
        await body(self._transport.agent)

    def _ended(self, agent: asyncio.Task[None]) -> None:
        if not agent.cancelled():
            info = ExitInfo(code=0 if agent.exception() is None else 1)
        elif self._lost.is_set():
            info = ExitInfo(reason="the sandbox is gone", lost=True)
        else:
            info = ExitInfo(signal=9)
        self._transport.agent.exit(info)

    @property
    def transport(self) -> MemoryTransport:
        """The agent's stdio."""
        return self._transport

    @property
    def agent(self) -> MemoryAgent:
        """The agent's end."""
        return self._transport.agent

    @property
    def workspace(self) -> str:
        """A path that nobody made."""
        return str(self._paths.workspace)

    @property
    def agent_pid(self) -> int | None:
        """A number above every real pid of a default system."""
        return self._transport.pid

    @property
    def isolation(self) -> str:
        """``none``."""
        return "none"

    @property
    def woken(self) -> bool:
        """Nothing sleeps here."""
        return False

    @property
    def limits(self) -> Mapping[str, object]:
        """No bounds."""
        return {}

    def mark(self, turn_id: str) -> MemoryMark:
        """See ``port.Sandbox.mark``."""
        self.marks.append(turn_id)
        if self.faults.mark_gate is None and not self._lost.is_set():
            self.take_mark(turn_id)
        return MemoryMark(self, turn_id)

    def take_mark(self, turn_id: str) -> None:
        """The mark is taken; again is as well."""
        if turn_id not in self.taken:
            self.taken.append(turn_id)

    async def kill_turn(self, turn_id: str, seconds: float) -> Reaped:
        """See ``port.Sandbox.kill_turn``."""
        await self.answered(self.faults.kill_gate, seconds)
        if turn_id not in self.taken:
            raise lost("the turn has no mark")
        self.kills.append(turn_id)
        self._killed.set()
        self.on_kill(turn_id)
        return Reaped(self.processes.pop(turn_id, 0), self.faults.survivors)

    async def run(self, name: str, argv: Sequence[str], heard: Callable[[bytes], None]) -> Ran:
        """See ``port.Sandbox.run``: plays ``sh -c`` with ``echo``, ``exit``, ``sleep`` and ``;``, nothing else."""
        self._check_here()
        self.commands.append(tuple(argv))
        self._killed.clear()
        left, truncated = OUTPUT_BYTES, False
        for step in argv[-1].split(";"):
            match shlex.split(step):
                case ["echo", *words]:
                    said = " ".join(words).encode() + b"\n"
                    heard(said[:left])
                    left, truncated = max(0, left - len(said)), truncated or len(said) > left
                case ["exit", code]:
                    return Ran(int(code), truncated=truncated)
                case ["sleep", seconds]:
                    if await self._killed_within(float(seconds)):
                        return Ran(None, 9, truncated)
        return Ran(0, truncated=truncated)

    async def _killed_within(self, seconds: float) -> bool:
        """Whether a kill came first. Raises ``RunnerError`` (``sandbox_lost``)."""
        await self._set_or_lost(self._killed, seconds)
        return self._killed.is_set()

    async def answered(self, gate: asyncio.Event | None, seconds: float) -> None:
        """Wait for the gate as for a reply of the cell's init.

        Raises:
            RunnerError: ``sandbox_lost`` when the sandbox is lost or the gate stays shut for ``seconds``.
        """
        if gate is not None and not gate.is_set() and not self._lost.is_set():
            await self._set_or_lost(gate, seconds)
            if not gate.is_set():
                raise lost(f"it did not answer within {seconds:g} s")
        self._check_here()

    async def _set_or_lost(self, event: asyncio.Event, seconds: float) -> None:
        """Until ``event`` is set, at most ``seconds``. Raises ``RunnerError`` (``sandbox_lost``)."""
        waits = [self._tasks.spawn("event", event.wait()), self._tasks.spawn("loss", self._lost.wait())]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._check_here()

    def _check_here(self) -> None:
        if self._lost.is_set():
            raise lost(GONE)

    def lose(self) -> None:
        """The whole cell goes away without a report (case A1)."""
        self._lost.set()
        self._agent.cancel()

    async def destroy(self, grace_seconds: float = 0.5, seconds: float = 5.0) -> Gone:
        """See ``port.Sandbox.destroy``."""
        return await self._teardown.done(grace_seconds, seconds)

    async def _tear_down(self, grace: float, seconds: float) -> Gone:
        self._transport.close_stdin()
        await asyncio.wait({self._agent}, timeout=grace)
        self._agent.cancel()
        await asyncio.wait({self._agent})
        if self.faults.destroy_gate is not None:
            await self.faults.destroy_gate.wait()
        if self.faults.unproven > 0:
            self.faults.unproven -= 1
            return Gone(False, "", (self._transport.pid or 0,))
        self._lost.set()
        self._forget(self.spec.seat_id)
        return Gone(True, "echild")


class MemoryProvider:
    """Twin of the local provider.

    Args:
        body: plays the agent of every sandbox; when it returns the agent exits 0, when it raises 1. May be replaced.
        clock: on the scale of ``SandboxSpec.deadline``.

    Attributes:
        faults: switches, effective at once for all its sandboxes.
        started: every sandbox that was ever started, oldest first.
        removed: ``(project, session_id)`` of every ``remove``.
    """

    def __init__(self, body: AgentBody, *, clock: Clock) -> None:
        self.body = body
        self.faults = Faults()
        self.started: list[MemorySandbox] = []
        self.removed: list[tuple[str, str]] = []
        self._clock = clock
        self._live: dict[str, MemorySandbox] = {}
        self._homes: dict[Key, str] = {}
        self._unclaimed: set[str] = set()
        self._disks: dict[object, ByNames] = {}
        self._closed = False

    @property
    def name(self) -> str:
        """``memory``."""
        return "memory"

    @property
    def capacity(self) -> int | None:
        """No bound of its own."""
        return None

    @property
    def isolation(self) -> str:
        """``none``."""
        return "none"

    @property
    def live(self) -> tuple[str, ...]:
        """Seats of the sandboxes whose end is not proven."""
        return tuple(self._live)

    def paths(self, project: str, session_id: str, workspace_path: Path | None) -> Paths:
        """Paths that nobody made."""
        home = Path("/memory/homes") / project / session_id
        return Paths(workspace_path or Path("/memory/workspaces") / project / session_id, home / "home", home / "tmp")

    async def start(self, spec: SandboxSpec) -> MemorySandbox:
        """See ``port.Provider.start``."""
        check_files(spec.workspace_files)
        seconds = spec.deadline - self._clock.monotonic() if spec.deadline else None
        try:
            if seconds is not None and seconds <= 0:
                raise TimeoutError
            async with asyncio.timeout(seconds):
                if self.faults.start_gate is not None:
                    await self.faults.start_gate.wait()
        except TimeoutError:
            raise RunnerError("sandbox_start_failed", "The sandbox did not start in time.") from None
        if self.faults.start_error is not None:
            raise self.faults.start_error
        if self._closed or spec.seat_id in self._live:
            raise RunnerError("sandbox_start_failed", "The runner is shutting down, or the seat has a sandbox already.")
        paths = self.paths(spec.project, spec.session_id, spec.workspace_path)
        if spec.spare:
            self._unclaimed.add(spec.session_id)
        pid = _FIRST_PID + len(self.started)
        sandbox = MemorySandbox(spec, paths, pid, self.body, self.faults, self._forget)
        self.started.append(sandbox)
        self._homes.setdefault((spec.project, spec.session_id), f"home-{pid}")
        disk = self._disk(spec.project, spec.session_id, spec.workspace_path)
        disk.update((file_names(path), data) for path, data in spec.workspace_files.items())
        self._live[spec.seat_id] = sandbox
        return sandbox

    def _forget(self, seat_id: str) -> None:
        self._live.pop(seat_id, None)

    def disks(self) -> tuple[Disk, ...]:
        """See ``port.Provider.disks``: what sleeps here is a folder."""
        return ()

    def condition(self) -> Condition:
        """See ``port.Provider.condition``."""
        return Condition(True, running=len(self._live))

    async def home_identity(self, project: str, session_id: str) -> str | None:
        """See ``port.Provider.home_identity``."""
        return self._homes.get((project, session_id))

    async def copy_workspace(self, source: Key, to: Key) -> Copied:
        """See ``port.Provider.copy_workspace``."""
        if source not in self._homes and not self._disk(*source, None):
            return "none"
        target = self._disk(*to, None)
        if not target:
            target.update(self._disk(*source, None))
        return "copied"

    def files(self, project: str, session_id: str, workspace_path: Path | None, recipe: str = "default") -> MemoryFiles:
        """See ``port.Provider.files``."""
        return MemoryFiles(self._disk(project, session_id, workspace_path))

    def _disk(self, project: str, session_id: str, workspace_path: Path | None) -> ByNames:
        return self._disks.setdefault(workspace_path or (project, session_id), {})

    def adopt(self, spare_id: str) -> None:
        """See ``port.SpareProvider.adopt``."""
        self._unclaimed.discard(spare_id)

    def untouched(self, project: str, session_id: str) -> bool:
        """See ``port.SpareProvider.untouched``."""
        return (project, session_id) not in self._homes and not self._disk(project, session_id, None)

    async def sweep_spares(self) -> int:
        """See ``port.SpareProvider.sweep_spares``."""
        left = list(self._unclaimed)
        for spare_id in left:
            await self.remove(SPARES, spare_id)
        return len(left)

    async def remove(self, project: str, session_id: str, used: bool = True) -> None:
        """See ``port.Provider.remove``."""
        self._homes.pop((project, session_id), None)
        self._disk(project, session_id, None).clear()
        if project == SPARES:
            self._unclaimed.discard(session_id)
        self.removed.append((project, session_id))

    async def close(self) -> None:
        """Destroy what is left."""
        self._closed = True
        await asyncio.gather(*(sandbox.destroy(0.0) for sandbox in list(self._live.values())))
