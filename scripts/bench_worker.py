"""The worker in figures: records a second from a Redis stream into PostgreSQL, beside COPY of the same rows."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import asyncpg

from runner.ids import record_id
from runner.store.port import Admission, RecordRow, SessionRow, TurnRow
from runner.store.postgres.store import PostgresStore
from runner.store.stream.codec import encode
from runner.store.stream.redis import RedisRecordStream
from tests.postgres_server import PostgresServer
from tests.redis_server import RedisServer

RECORDS = 30_000
SESSIONS = 50
TEXT_BYTES = 300
PAGE = 500
ROUNDS = 3
SECONDS = 120.0
GATES: dict[str, tuple[str, float]] = {"worker_records_per_s": (">=", 5_000), "worker_over_copy": (">=", 0.25)}


def rows() -> list[RecordRow]:
    """What fifty sessions wrote, as it comes: one record of each in turns."""
    data = json.dumps({"message_id": "m", "text": "x" * TEXT_BYTES}).encode()
    made = []
    for at in range(RECORDS):
        session, n = f"s{at % SESSIONS}", at // SESSIONS + 1
        turn = f"t{at % SESSIONS}"
        made.append(RecordRow("p", session, record_id(session, turn, n), turn, "p1", 1, n, "message", data, at))
    return made


async def copied(url: str, records: list[RecordRow]) -> float:
    """Rows a second by COPY into a table like the store's."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("CREATE TABLE copied (LIKE records INCLUDING ALL)")
        began = time.perf_counter()
        await connection.copy_records_to_table("copied", records=records, columns=RecordRow._fields)
        seconds = time.perf_counter() - began
        await connection.execute("DROP TABLE copied")
    finally:
        await connection.close()
    return len(records) / seconds


async def worked(url: str, redis: RedisServer, folder: Path, records: list[RecordRow]) -> float:
    """Records a second by an ``acp-runner worker`` that is let go once all of them are in the stream."""
    redis.flush()
    config = folder / "worker.toml"
    config.write_text(f'[store]\nurl = "{url}"\n[records]\nstream = "{redis.url}"\n')
    words = ("-m", "runner.cli.main", "worker", "--state-dir", str(folder), "--config", str(config))
    stream = RedisRecordStream(redis.url, timeout_seconds=10.0)
    worker = await asyncio.create_subprocess_exec(
        sys.executable, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert worker.stdout is not None
    try:
        async with asyncio.timeout(SECONDS):
            await worker.stdout.readline()
            os.kill(worker.pid, signal.SIGSTOP)
            for start in range(0, len(records), PAGE):
                await stream.publish([encode(one) for one in records[start : start + PAGE]])
            began = time.perf_counter()
            os.kill(worker.pid, signal.SIGCONT)
            while (await stream.look()).length:  # noqa: ASYNC110 -- another process empties it
                await asyncio.sleep(0.01)
            seconds = time.perf_counter() - began
            worker.send_signal(signal.SIGTERM)
            await worker.wait()
    finally:
        if worker.returncode is None:
            worker.kill()
        await stream.close()
    return len(records) / seconds


async def rounds(postgres: PostgresServer, redis: RedisServer, folder: Path) -> dict[str, float]:
    """Both in turns on the same machine, each round in a fresh database."""
    records = rows()
    copies, works = [], []
    for _ in range(ROUNDS):
        url = postgres.fresh()
        store = await PostgresStore.open(url)
        for n in range(SESSIONS):
            session, turn = f"s{n}", f"t{n}"
            row = SessionRow("p", session, 1, 1, head_epoch=1)
            assert await store.admit(Admission(row, TurnRow("p", session, turn, 1, "rep", None, 1)))
        copies.append(await copied(url, records))
        works.append(await worked(url, redis, folder, records))
        found = [len(await store.records("p", f"s{n}", None, 10_000)) for n in range(SESSIONS)]
        assert sum(found) == RECORDS
        await store.close()
    ratios = [work / copy for work, copy in zip(works, copies, strict=True)]
    return {
        "copy_records_per_s": round(statistics.median(copies)),
        "worker_records_per_s": round(statistics.median(works)),
        "worker_over_copy": round(statistics.median(ratios), 2),
    }


def measure() -> dict[str, float]:
    """All figures; it starts a PostgreSQL and a Redis of its own."""
    postgres, redis = PostgresServer(), RedisServer()
    try:
        postgres.start()
        redis.start()
        with tempfile.TemporaryDirectory() as folder:
            return asyncio.run(rounds(postgres, redis, Path(folder)))
    finally:
        redis.close()
        postgres.close()
