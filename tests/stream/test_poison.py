"""What a real PostgreSQL refuses, among a thousand records that it takes (case G8)."""

from __future__ import annotations

import asyncio
import logging

import orjson
import pytest

from runner.clock import SystemClock
from runner.store.postgres.store import PostgresStore
from runner.store.stream.codec import encode
from runner.store.stream.redis import RedisRecordStream
from runner.store.stream.worker import Worker
from tests.redis_server import RedisServer
from tests.stream.bed import PROJECT, SESSION, admission, row, rows, stored, until


@pytest.mark.parametrize("how", ["a text with NUL", "a cursor of another record"])
async def test_one_among_a_thousand(
    how: str, redis_server: RedisServer, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """999 are stored, one is in quarantine with its payload, loudly; the stream is empty."""
    stream = RedisRecordStream(redis_server.url, timeout_seconds=3.0)
    store = await PostgresStore.open(postgres_url)
    assert await store.admit(admission())
    records = rows(1_000)
    if how == "a text with NUL":
        bad = records[499] = records[499]._replace(prompt_id="p\x00")
        good = [one for one in records if one is not bad]
    else:
        bad = records[499]._replace(record_id="rec_other", n=300)
        records[499], good = bad, [one for one in records if one.n != 500]
    await stream.publish([encode(one) for one in records])
    worker = Worker(stream, store, SystemClock(), "w1", max_deliveries=3, retry_seconds=0.2)
    working = asyncio.create_task(worker.run())

    async def empty() -> bool:
        return (await stream.look())[2:] == (0, 0)

    await until(empty, 40)
    worker.stop()
    await working
    assert await stored(store) == [one for one in good if one is not bad]
    ((_, aside),) = await store.quarantined(PROJECT, 10)
    assert (aside.reason, aside.record.session_id) == ("undeliverable", SESSION)
    if how == "a text with NUL":
        assert orjson.loads(aside.record.data)["version"] == "1"
    else:
        assert aside.record == bad
    assert (worker.counts.undeliverable, worker.counts.written) == (1, 999)
    assert any(
        "given up after 3 deliveries" in one.getMessage() for one in caplog.records if one.levelno == logging.ERROR
    )
    await stream.close()
    await store.close()


async def test_a_row_of_nobody_keeps_its_bytes(redis_server: RedisServer, postgres_url: str) -> None:
    """An entry that is not ours ends in quarantine too: nothing in the stream blocks it for ever."""
    stream = RedisRecordStream(redis_server.url, timeout_seconds=3.0)
    store = await PostgresStore.open(postgres_url)
    assert await store.admit(admission())
    redis_server.command("XADD", "acp:records", "*", "odd name", "v", "more", "w")
    await stream.publish([encode(row(1))])
    worker = Worker(stream, store, SystemClock(), "w1", max_deliveries=2, retry_seconds=0.1)
    working = asyncio.create_task(worker.run())
    await until(lambda: worker.counts.undeliverable == 1, 40)
    worker.stop()
    await working
    assert await stored(store) == [row(1)]
    ((_, aside),) = await store.quarantined("unknown", 10)
    assert orjson.loads(aside.record.data)["base64"] == "dg=="
    await stream.close()
    await store.close()
