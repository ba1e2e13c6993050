"""Several replicas in memory over one store and one lease plane, and what happens to them."""

from __future__ import annotations

import asyncio
from typing import Any

from runner.errors import RunnerError
from runner.leases.live import LiveBus
from runner.leases.memory import MemoryLeasePlane
from runner.leases.port import ReplicaInfo
from tests.session.bed import Bed
from tests.session.gates import SlowStore
from tests.virtual_time import LoopClock

LEASE_SECONDS = 20


class PlaneSide:
    """One replica's way to the plane: it can be cut, and a frozen replica stands still in it."""

    shared = True

    def __init__(self, plane: MemoryLeasePlane) -> None:
        self._plane = plane
        self.open = asyncio.Event()
        self.open.set()
        self.away = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plane, name)

    async def beat(self, beat: Any) -> Any:
        await self.open.wait()
        return await self._plane.beat(beat)

    async def look(self, project: str, session_id: str) -> Any:
        if self.away:
            raise RunnerError("plane_unavailable", "scripted")
        return await self._plane.look(project, session_id)

    async def close(self) -> None:
        return None


class Several:
    """Replicas that serve one store; ``dead`` are those whose death can be proven; ``live``: the bus between them."""

    def __init__(self, live: LiveBus | None = None) -> None:
        self.live = live
        self.store = SlowStore()
        self.plane = MemoryLeasePlane(LoopClock(), LEASE_SECONDS, shared=True)
        self.sides: dict[str, PlaneSide] = {}
        self.beds: dict[str, Bed] = {}
        self.dead: set[str] = set()

    async def replica(self, replica_id: str, **settings: Any) -> Bed:
        """Another replica."""
        side = self.sides[replica_id] = PlaneSide(self.plane)
        bed = await Bed.make(
            settings=settings,
            store=self.store,
            plane=side,
            replica_id=replica_id,
            proven_dead=self._proven_dead,
            live=self.live,
        )
        bed.replica.reachable_at(f"http://{replica_id}")
        self.beds[replica_id] = bed
        await asyncio.sleep(0.01)
        return bed

    def _proven_dead(self, info: ReplicaInfo) -> bool:
        return info.replica_id in self.dead

    async def kill(self, replica_id: str, *, proven: bool = True) -> None:
        """End every task of a replica at once, as kill -9 does."""
        bed = self.beds.pop(replica_id)
        await bed.die()
        if proven:
            self.dead.add(replica_id)

    async def close(self) -> None:
        for bed in self.beds.values():
            self.sides[bed.replica.replica_id].open.set()
            bed.replica.services.store.close = _nothing  # type: ignore[method-assign]
            await bed.close()


async def _nothing() -> None:
    return None
