"""The replicas of one run: each is what ``runner.assembly`` builds, over doubles of its agents and of the outside."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from runner.assembly import Replica, build
from runner.config import Settings
from runner.errors import RunnerError
from runner.ids import Key
from runner.sandbox.memory_files import MemoryFiles
from runner.sandbox.port import Condition, Copied, Disk, Gone, Paths, Ran, Reaped, SandboxSpec
from tests.session.bed import CountingIds
from tests.simulation.agents import SimAgent
from tests.simulation.chance import Chance
from tests.simulation.doubles import LEASE_SECONDS, Far, FarPlane, Road
from tests.simulation.loop import SimulationLoop, replica_context
from tests.virtual_time import LoopClock

if TYPE_CHECKING:
    from tests.simulation.world import World

PROJECT: Final = "p"


class Fallen(Exception):
    """The replica died under the request."""


@cache
def settings_of(name: str, seats: int) -> Settings:
    """Short limits; the numbers of leases are those of production."""
    return Settings.model_validate(
        {
            "server": {"advertise_url": f"http://{name}.test"},
            "pool": {"max_seats": seats, "idle_seconds": 20, "approval_seconds": 60, "stopped_seconds": 30},
            "acp": {"start_seconds": 5},
            "turn": {"settle_seconds": 3, "idle_seconds": 20, "drain_seconds": 5},
            "leases": {"lease_seconds": LEASE_SECONDS},
            "records": {"lost_after_seconds": 30},
        }
    )


class SimMark:
    def __init__(self, sandbox: SimSandbox, turn_id: str) -> None:
        self._sandbox = sandbox
        self._turn_id = turn_id

    async def set(self, seconds: float) -> None:
        await self._sandbox.chance.wait(0.0)
        self._sandbox.marks.add(self._turn_id)


class SimSandbox:
    """A sandbox around one agent."""

    isolation = "none"
    limits: Mapping[str, object] = {}

    woken = False
    memory_kills = 0

    def __init__(self, provider: SimProvider, spec: SandboxSpec, agent: SimAgent, chance: Chance) -> None:
        self.spec = spec
        self.agent = agent
        self.chance = chance
        self.marks: set[str] = set()
        self._provider = provider
        self._killed = asyncio.Event()

    @property
    def transport(self) -> Any:
        return self.agent.transport

    @property
    def workspace(self) -> str:
        return f"/w/{self.spec.session_id}"

    @property
    def agent_pid(self) -> int | None:
        return self.agent.pid

    def mark(self, turn_id: str) -> SimMark:
        self.marks.add(turn_id)
        return SimMark(self, turn_id)

    async def kill_turn(self, turn_id: str, seconds: float) -> Reaped:
        await asyncio.sleep(self.chance.pick((0.0, 0.0, 0.01, 0.1, 0.5)))
        if turn_id not in self.marks:
            raise RunnerError("sandbox_lost", "The turn has no mark.")
        self.agent.killed()
        self._killed.set()
        survivors = (4242,) if self._provider.mischief(0.08) else ()
        return Reaped(1, survivors)

    async def run(self, name: str, argv: Sequence[str], heard: Callable[[bytes], None]) -> Ran:
        self._killed.clear()
        heard(b"out")
        with suppress(TimeoutError):
            async with asyncio.timeout(self.chance.pick((0.01, 1.0, 60.0))):
                await self._killed.wait()
        return Ran(None, 9) if self._killed.is_set() else Ran(0)

    async def destroy(self, grace_seconds: float = 0.5, seconds: float = 5.0) -> Gone:
        await self.chance.wait(0.1 * self._provider.hazard)
        self.agent.exit(0)
        if self._provider.mischief(0.05):
            return Gone(False, "", (4242,))
        self._provider.alive.pop(self.spec.seat_id, None)
        return Gone(True, "echild")


class SimProvider:
    """Starts sandboxes; slow, or failing, as often as the hazard of the run says."""

    name = "local"
    isolation = "none"
    capacity: int | None = None

    def __init__(self, node: Node, chance: Chance) -> None:
        self.alive: dict[str, SimSandbox] = {}
        self._node = node
        self._chance = chance

    @property
    def hazard(self) -> float:
        """How often something goes wrong."""
        return self._node.world.hazard

    def mischief(self, probability: float) -> bool:
        """Whether something goes wrong now."""
        return self._chance.often(probability * self.hazard)

    def paths(self, project: str, session_id: str, workspace_path: Path | None) -> Paths:
        return Paths(Path("/w"), Path("/h"), Path("/t"))

    async def start(self, spec: SandboxSpec) -> SimSandbox:
        await self._chance.wait(0.1 * self.hazard)
        if self.mischief(0.03):
            raise RunnerError("sandbox_start_failed", "No.")
        agent = SimAgent(self._node, self._chance, self._node.world.next_pid())
        sandbox = self.alive[spec.seat_id] = SimSandbox(self, spec, agent, self._chance)
        return sandbox

    def disks(self) -> tuple[Disk, ...]:
        return ()

    def condition(self) -> Condition:
        return Condition(True, running=len(self.alive))

    async def home_identity(self, project: str, session_id: str) -> str | None:
        """Homes lie on a disk: all replicas share it where they share a machine."""
        await self._chance.wait(0.0)
        return "home" if self._node.world.same_host else f"home-{self._node.name}"

    def files(self, project: str, session_id: str, workspace_path: Path | None, recipe: str = "default") -> MemoryFiles:
        return MemoryFiles({})

    async def copy_workspace(self, source: Key, to: Key) -> Copied:
        await self._chance.wait(0.0)
        return "none"

    async def remove(self, project: str, session_id: str, used: bool = True) -> None:
        await self._chance.wait(0.0)

    async def close(self) -> None:
        return None


class Node:
    """A place where one replica runs after the other."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.replica_id = ""
        self.up = False
        self.frozen = self.leaving = False
        self.boots = 0
        self.replica: Replica

    async def start(self) -> None:
        """Boot a replica."""
        self.boots += 1
        self.replica_id = f"{self.name}{self.boots}"
        self.context = replica_context(self.replica_id)
        loop, world = asyncio.get_running_loop(), self.world
        self.fallen: asyncio.Future[None] = loop.create_future()
        self.store_road, self.plane_road = Road(world.chance, self.context), Road(world.chance, self.context)
        self.plane_road.forgetful = 0.4 * world.hazard
        self.provider = SimProvider(self, world.chance)
        store: Any = Far(world.store, self.store_road, "store_unavailable", returns=False)
        plane: Any = FarPlane(world.plane_for_boot(), self.plane_road, "plane_unavailable", returns=True)
        work = build(
            settings_of(self.name, world.seats),
            replica_id=self.replica_id,
            plane=plane,
            providers={"local": self.provider},
            clock=LoopClock(),
            ids=CountingIds(f"{self.replica_id}_"),
            proven_dead=lambda info: world.proven_dead(info.replica_id),
            **self.given(store),
        )
        self.replica = await loop.create_task(work, name=f"boot {self.replica_id}", context=self.context.copy())
        self.up, self.frozen, self.leaving = True, False, False
        world.nodes_by_id[self.replica_id] = self
        world.replicas.append(self.replica)

    def given(self, store: Any) -> dict[str, Any]:
        """What else ``build`` gets: the store that its road leads to, and what stands before it."""
        return {"store": store, "state_dir": Path("/nowhere")}

    @property
    def sessions(self) -> Any:
        """The replica's ``Coordinator``."""
        return self.replica.coordinator

    async def serve(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """What a request does inside the replica; cancelling it is a disconnect.

        Raises:
            Fallen: the replica died meanwhile.
        """
        if not self.up:
            raise Fallen

        async def handle() -> Any:
            return await work()

        task = asyncio.get_running_loop().create_task(handle(), name="request", context=self.context.copy())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.wait({task, self.fallen}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not task.done():
            raise Fallen
        return task.result()

    def _loop(self) -> SimulationLoop:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulationLoop)
        return loop

    def freeze(self) -> None:
        """SIGSTOP; its agents and the outside go on."""
        self.frozen = True
        self.world.frozen.append([asyncio.get_running_loop().time(), float("inf")])
        self._freeze = self.world.frozen[-1]
        self._loop().freeze(self.replica_id)

    def thaw(self) -> None:
        """SIGCONT."""
        self.frozen = False
        self._freeze[1] = asyncio.get_running_loop().time()
        self._loop().thaw(self.replica_id)

    def crash(self) -> None:
        """SIGKILL: nothing of it runs any more, and its agents die with their cells."""
        self.up = self.frozen = False
        self._loop().kill(self.replica_id)
        self.world.dead.add(self.replica_id)
        for sandbox in self.provider.alive.values():
            sandbox.agent.exit(9)
        self.fallen.set_result(None)

    async def drain(self) -> None:
        """SIGTERM: the orderly end."""
        self.leaving = True
        await self.serve(self.replica.close)
        self.up = False
        self.world.dead.add(self.replica_id)
        self.fallen.set_result(None)
