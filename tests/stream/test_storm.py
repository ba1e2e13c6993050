"""Everything at once on the virtual clock: whatever happens, what was taken is stored once, in order, and in time."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from runner.errors import RunnerError
from runner.store.memory import MemoryStore
from runner.store.port import RecordRow
from runner.store.stream.memory import MemoryRecordStream
from runner.store.stream.pipelined import PipelinedStore
from runner.store.stream.worker import Worker
from tests.stream.bed import PROJECT, admission, ending, row, stored, until
from tests.virtual_time import LoopClock

pytestmark = pytest.mark.virtual_time

SECONDS = 60.0
SESSIONS = 4
FAULTS = (
    "stream",
    "frozen",
    "database",
    "flush",
    "group",
    "trim",
    "workers",
    "runner",
    "stream database",
    "workers flush runner",
    "workers group",
    "workers trim runner",
    "database group workers",
)


class Replica:
    """A runner's store that can die: what is in its memory is gone, and no call of it returns any more."""

    def __init__(self, storm: Storm) -> None:
        self.store = PipelinedStore(storm.database, storm.stream, held_bytes=20_000 if storm.seed % 2 else 500_000)
        self.turns: set[asyncio.Task] = set()

    async def die(self) -> None:
        for task in self.turns:
            task.cancel()
        await asyncio.gather(*self.turns, return_exceptions=True)
        await self.store._tasks.close()


class Storm:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.clock = LoopClock()
        self.stream = MemoryRecordStream(self.clock, max_entries=60 if seed % 2 else 2_000)
        self.database = MemoryStore(clock=self.clock)
        self.taken: dict[str, list[RecordRow]] = {f"s{n}": [] for n in range(SESSIONS)}
        self.heads: dict[str, int] = dict.fromkeys(self.taken, 0)
        self.epochs: dict[str, int] = dict.fromkeys(self.taken, 0)
        self.replica = Replica(self)
        self.workers: dict[str, tuple[Worker, asyncio.Task]] = {}
        self.over = False

    def start_worker(self, name: str) -> None:
        worker = Worker(self.stream, self.database, self.clock, name, batch=7, reclaim_idle_seconds=5.0)
        self.workers[name] = worker, asyncio.create_task(worker.run())

    async def session(self, replica: Replica, session: str) -> None:
        """Turn after turn, as long as the storm lasts."""
        while not self.over:
            await self.turn(replica, session)
            await asyncio.sleep(self.chance.random())

    async def turn(self, replica: Replica, session: str) -> None:
        self.epochs[session] += 1
        epoch = self.epochs[session]
        turn = f"{session}_t{epoch}"
        begun = admission(session, turn, epoch)
        await self.insist(lambda: replica.store.admit(begun))
        for _ in range(self.chance.randint(1, 40)):
            rows = [self.record(session, turn, epoch) for _ in range(self.chance.randint(1, 5))]
            await self.insist(lambda rows=rows: replica.store.append(rows))
            self.taken[session] += rows
            await asyncio.sleep(self.chance.random() * 0.5)
        last = self.record(session, turn, epoch)
        await self.insist(lambda: replica.store.end(ending([last], session, turn, epoch)))
        self.taken[session].append(last)

    def record(self, session: str, turn: str, epoch: int) -> RecordRow:
        self.heads[session] += 1
        return row(self.heads[session], session=session, turn=turn, epoch=epoch)

    async def insist(self, work) -> None:
        while True:
            try:
                await work()
                return
            except RunnerError as error:
                if error.code != "store_unavailable":
                    raise
                await asyncio.sleep(0.3)

    async def take_over(self) -> None:
        """The runner dies; another one ends its turns, as ``Owners`` does it, and goes on with its sessions."""
        await self.replica.die()
        self.replica = Replica(self)
        for turn in await self.certainly(self.database.open_turns):
            session = turn.session_id
            if self.chance.random() < 0.5:
                await self.certainly(lambda session=session: self.replica.store.caught_up(PROJECT, session))
            lost = ending([], session, turn.turn_id, turn.epoch)
            lost = replace(lost, turn=replace(lost.turn, outcome="lost"))
            await self.certainly(lambda lost=lost: self.replica.store.end(lost))
        self.go_on()

    async def certainly(self, work):
        while True:
            try:
                return await work()
            except RunnerError as error:
                if error.code != "store_unavailable":
                    raise
                await asyncio.sleep(0.3)

    def go_on(self) -> None:
        for session in self.taken:
            self.replica.turns.add(asyncio.create_task(self.session(self.replica, session)))

    async def fault(self) -> None:
        """Some of what may happen, for a while; never Redis's memory and the runner's at once."""
        kinds = self.chance.choice(FAULTS)
        pause = self.chance.random() * 4
        for kind in kinds.split():
            if kind == "stream":
                self.stream.unavailable = True
            if kind == "database":
                self.database.unavailable = True
            if kind == "frozen":
                self.stream.held.clear()
            if kind == "flush":
                await asyncio.sleep(pause)
                self.stream.flush()
            if kind == "trim":
                await asyncio.sleep(pause)
                bodies = list(self.stream._entries or ())
                self.stream.delete_bodies(self.chance.sample(bodies, self.chance.randint(0, len(bodies))))
            if kind == "group":
                await asyncio.sleep(pause)
                self.stream.drop_group()
            if kind == "workers":
                for _, task in self.workers.values():
                    task.cancel()
            if kind == "runner":
                await self.settled_after_flush()
                await self.take_over()
        await asyncio.sleep(pause)
        self.stream.unavailable = self.database.unavailable = False
        self.stream.held.set()
        if "workers" in kinds:
            for name in self.workers:
                self.start_worker(name)

    async def settled_after_flush(self) -> None:
        """A stream that forgot has again what runners keep: two losses at once are no promise."""
        await asyncio.sleep(6)

    async def quiet(self) -> bool:
        seen = await self.stream.look()
        return not (seen.length or seen.pending or self.replica.store.unconfirmed)


@pytest.mark.parametrize("seed", range(6))
async def test_a_storm(seed: int) -> None:
    """Cases G1, G5, G9, G10: outages, flushes, deaths of workers and runners in any order."""
    storm = Storm(seed)
    for name in ("w1", "w2"):
        storm.start_worker(name)
    storm.go_on()
    end = storm.clock.monotonic() + SECONDS
    while storm.clock.monotonic() < end:
        await asyncio.sleep(storm.chance.random() * 3)
        await storm.fault()
    storm.over = True
    await asyncio.gather(*storm.replica.turns)
    await until(storm.quiet, 120)
    for session, taken in storm.taken.items():
        kept = await stored(storm.database, session)
        assert [one.n for one in kept] == sorted({one.n for one in kept})
        assert set(taken) <= set(kept), f"lost in {session}"
    assert await storm.database.quarantined(PROJECT, 10) == []
    assert sum(map(len, storm.taken.values())) > 50
    for worker, task in storm.workers.values():
        worker.stop()
        await task
    await storm.replica.store.close()
