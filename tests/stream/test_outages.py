"""PostgreSQL and Redis go away under running turns: afterwards what was streamed is what is stored (DESIGN 3.9)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from runner.clock import SystemClock
from runner.errors import RunnerError
from runner.store.postgres.store import PostgresStore
from runner.store.spool import SpooledStore
from runner.store.stream.pipelined import PipelinedStore
from runner.store.stream.redis import RedisRecordStream
from runner.store.stream.worker import Worker
from tests.postgres_server import PostgresServer
from tests.redis_server import RedisServer
from tests.stream.bed import PROJECT, admission, ending, row, stored, until

TURNS = 50
BATCHES = 12
PER_BATCH = 5
PAUSE = 0.1


class Fleet:
    """One runner's store over real servers, one worker, fifty turns that write all the time."""

    def __init__(self, spooled: SpooledStore, piped: PipelinedStore, worker: Worker, look: RedisRecordStream) -> None:
        self.store, self.piped, self.worker, self.look = spooled, piped, worker, look
        self.half = asyncio.Event()
        self.slowest = 0.0

    async def turn(self, number: int) -> None:
        """Admit, append, end, as the outbox does it: what is refused as unavailable is tried again."""
        session, turn = f"sess_{number}", f"turn_{number}"
        assert await self.store.admit(admission(session, turn))
        for batch in range(BATCHES):
            first = batch * PER_BATCH
            await self.insist([row(first + n, session=session, turn=turn) for n in range(1, PER_BATCH + 1)])
            if batch == BATCHES // 2:
                self.half.set()
            await asyncio.sleep(PAUSE)
        last = row(BATCHES * PER_BATCH + 1, session=session, turn=turn)
        while True:
            try:
                assert await self.store.end(ending([last], session, turn))
                return
            except RunnerError as error:
                if error.code != "store_unavailable":
                    raise
                await asyncio.sleep(PAUSE)

    async def insist(self, records) -> None:
        while True:
            began = time.monotonic()
            try:
                await self.store.append(records)
                self.slowest = max(self.slowest, time.monotonic() - began)
                return
            except RunnerError as error:
                if error.code != "store_unavailable":
                    raise
                await asyncio.sleep(PAUSE)

    async def settled(self) -> bool:
        seen = await self.look.look()
        return not (seen.length or seen.pending or self.store.waiting or self.piped.unconfirmed)


@pytest.fixture
async def fleet(redis_server: RedisServer, postgres_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    clock = SystemClock()
    database = await PostgresStore.open(postgres_url, seconds=1.0)
    sink = await PostgresStore.open(postgres_url, seconds=1.0)
    # The third is the test's own look, which is no part of what has deadlines.
    streams = [RedisRecordStream(redis_server.url, timeout_seconds=seconds) for seconds in (0.5, 0.5, 20.0)]
    piped = PipelinedStore(database, streams[0])
    spooled = await SpooledStore.open(piped, tmp_path / "spool", clock, may_spool=lambda *of: True)
    worker = Worker(streams[1], sink, clock, "w1")
    working = asyncio.create_task(worker.run())
    yield Fleet(spooled, piped, worker, streams[2])
    worker.stop()
    await working
    await spooled.close()
    await sink.close()
    for stream in streams[1:]:
        await stream.close()


async def expect_everything(fleet: Fleet, turns: asyncio.Future) -> None:
    await turns
    await until(fleet.settled, 40)
    for number in range(TURNS):
        session, turn = f"sess_{number}", f"turn_{number}"
        wanted = [row(n, session=session, turn=turn) for n in range(1, BATCHES * PER_BATCH + 2)]
        assert await stored(fleet.store, session) == wanted
    assert await fleet.store.quarantined(PROJECT, 10) == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["frozen", "killed"])
async def test_postgres_goes_away(how: str, fleet: Fleet, postgres_server: PostgresServer) -> None:
    """Case G1: the outage is longer than any deadline in the way; fifty turns run through it."""
    turns = asyncio.gather(*(fleet.turn(number) for number in range(TURNS)))
    await fleet.half.wait()
    if how == "frozen":
        await asyncio.to_thread(postgres_server.stop)
    else:
        await asyncio.to_thread(postgres_server.kill)
    await asyncio.sleep(3)
    if how == "frozen":
        await asyncio.to_thread(postgres_server.cont)
    else:
        await asyncio.to_thread(postgres_server.start)
    await expect_everything(fleet, turns)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["frozen", "killed", "flushed"])
async def test_redis_goes_away(how: str, fleet: Fleet, redis_server: RedisServer) -> None:
    """Cases G1, G5: frozen, killed and restarted empty, or flushed, while records are on their way."""
    turns = asyncio.gather(*(fleet.turn(number) for number in range(TURNS)))
    await fleet.half.wait()
    if how == "frozen":
        redis_server.stop()
    elif how == "killed":
        redis_server.kill()
    else:
        redis_server.flush()
    await asyncio.sleep(3)
    if how == "frozen":
        redis_server.cont()
    elif how == "killed":
        redis_server.start()
    await expect_everything(fleet, turns)
