"""Runs whose records travel by a stream that may fail as well, and whose sessions are followed all the time."""

from __future__ import annotations

import asyncio
from contextvars import copy_context
from typing import Any

from runner.leases.live import MemoryLiveBus
from runner.store.stream.memory import MemoryRecordStream
from runner.store.stream.pipelined import PipelinedStore
from runner.store.stream.worker import Worker
from tests.simulation.checks import Violation
from tests.simulation.doubles import Far
from tests.simulation.following import Follower
from tests.simulation.replicas import PROJECT, Node
from tests.simulation.world import World
from tests.virtual_time import LoopClock

FAULTS = ("flush", "drop", "take out", "away", "back", "worker")
QUIET_SECONDS = 15.0


class StreamingNode(Node):
    """Its records take the stream, and what it shows the live bus, where the run has one."""

    world: StreamingWorld

    def given(self, store: Any) -> dict[str, Any]:
        world = self.world
        # A replica that is alone ends what an earlier one left before it serves: it needs the stream for that.
        world.stream.unavailable = world.stream.unavailable and world.shared
        stream: Any = Far(world.stream, self.store_road, "store_unavailable", returns=True)
        bus: Any = Far(world.bus, self.plane_road, "plane_unavailable", returns=False)
        piped = PipelinedStore(store, stream, held_bytes=world.chance.pick((2000, 1 << 25)))
        return {**super().given(piped), "live": bus if world.by_bus else None}


class StreamingWorld(World):
    """One run; every record of the end must have come to every follower."""

    node = StreamingNode

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.by_bus = self.chance.often(0.5)
        self.bus = MemoryLiveBus()
        self.stream = MemoryRecordStream(LoopClock(), 10_000)
        self.followers: list[Follower] = []

    async def begin(self) -> None:
        self._start_worker()
        await super().begin()
        self.followers = [Follower(self, session_id) for session_id in self.session_ids for _ in range(2)]

    def _start_worker(self) -> None:
        self._worker = Worker(self.stream, self.store, LoopClock(), "w1", reclaim_idle_seconds=20)
        self._working = asyncio.get_running_loop().create_task(self._worker.run(), context=copy_context())

    async def step(self) -> None:
        if self.troubled and self.chance.often(0.25):
            await self._fault(self.chance.pick(FAULTS))
        await super().step()

    async def _fault(self, kind: str) -> None:
        stream = self.stream
        if kind == "flush":
            stream.flush()
        elif kind == "drop":
            stream.drop_group()
        elif kind == "take out":
            stream.delete_bodies([one for one in list(stream._entries or ()) if self.chance.often(0.5)])
        elif kind == "worker":
            self._working.cancel()
            await asyncio.sleep(0)
            self._start_worker()
        else:
            stream.unavailable = kind == "away"

    async def calm(self) -> None:
        self.stream.unavailable = False
        await super().calm()
        await asyncio.sleep(QUIET_SECONDS)
        seen = await self.stream.look()
        if seen.length or seen.pending:
            raise Violation(f"the stream is not empty: {seen}")
        for follower in self.followers:
            if follower.session_id not in self.ledger.deleted:
                await self._check(follower)

    async def _check(self, follower: Follower) -> None:
        if follower.task.done():
            follower.task.result()
        records = await self.store.records(PROJECT, follower.session_id, None, 10_000)
        missed = [(row.epoch, row.n, row.type) for row in records if (row.epoch, row.n) not in follower.seen]
        if missed:
            raise Violation(f"a follower of {follower.session_id} has not seen {missed[:5]} of {len(records)} records")

    async def end(self) -> None:
        for follower in self.followers:
            follower.over = True
        await asyncio.wait([follower.task for follower in self.followers], timeout=30)
        await super().end()
        self._worker.stop()
        await self._working
