"""kill -9 of worker and runner at named points: what was streamed equals what is stored (DESIGN 3.9)."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process

import pytest

from runner.store.postgres.store import PostgresStore
from runner.store.stream.codec import encode
from runner.store.stream.pipelined import PipelinedStore
from runner.store.stream.redis import RedisRecordStream
from tests.redis_server import RedisServer
from tests.stream.bed import PROJECT, SESSION, admission, ending, row, rows, stored, until
from tests.stream.child import PER_ROUND, RUNNER_POINTS, WORKER_POINTS

SECONDS = 30.0


async def child(role: str, point: str, redis: str, postgres: str) -> Process:
    words = ("-m", "tests.stream.child", role, point, redis, postgres)
    return await asyncio.create_subprocess_exec(sys.executable, *words, stdout=PIPE)


async def killed(process: Process) -> bytes:
    async with asyncio.timeout(SECONDS):
        output, _ = await process.communicate()
    assert process.returncode == -signal.SIGKILL
    return output


async def work_until_empty(stream: RedisRecordStream, redis: str, postgres: str) -> None:
    async def empty() -> bool:
        seen = await stream.look()
        return (seen.length, seen.pending) == (0, 0)

    worker = await child("worker", "-", redis, postgres)
    try:
        await until(empty, SECONDS)
        worker.send_signal(signal.SIGTERM)
        async with asyncio.timeout(SECONDS):
            assert await worker.wait() == 0
    finally:
        if worker.returncode is None:
            worker.kill()
            await worker.wait()


@pytest.mark.parametrize("point", WORKER_POINTS)
async def test_a_worker_is_killed(point: str, redis_server: RedisServer, postgres_url: str) -> None:
    """Cases G1, G10: between insert and commit, between commit and acknowledgement; its next start goes on."""
    stream = RedisRecordStream(redis_server.url, timeout_seconds=3.0)
    store = await PostgresStore.open(postgres_url)
    assert await store.admit(admission())
    await stream.publish([encode(one) for one in rows(200)])
    await killed(await child("worker", point, redis_server.url, postgres_url))
    assert (await stream.look()).pending >= PER_ROUND
    written = len(await stored(store))
    assert written == (2 if point == "insert_commit" else 3) * PER_ROUND
    await work_until_empty(stream, redis_server.url, postgres_url)
    assert await stored(store) == rows(200)
    assert await store.quarantined(PROJECT, 10) == []
    await stream.close()
    await store.close()


@pytest.mark.parametrize("point", RUNNER_POINTS)
async def test_a_runner_is_killed(point: str, redis_server: RedisServer, postgres_url: str) -> None:
    """Cases G1, M3: what it was told is taken is stored before another replica ends its turn, and once."""
    stream = RedisRecordStream(redis_server.url, timeout_seconds=3.0)
    database = await PostgresStore.open(postgres_url)
    output = await killed(await child("runner", point, redis_server.url, postgres_url))
    taken = int(output.split()[-1])
    heir = PipelinedStore(database, stream)
    await heir.caught_up(PROJECT, SESSION)
    kept = await stored(database)
    assert kept == rows(len(kept))
    assert len(kept) == {"before_publish": 20, "after_publish": 30, "noted": 30}[point] >= taken
    assert await heir.end(ending([row(99)]))
    await work_until_empty(stream, redis_server.url, postgres_url)
    assert await stored(database) == [*kept, row(99)]
    assert await database.quarantined(PROJECT, 10) == []
    await heir.close()
