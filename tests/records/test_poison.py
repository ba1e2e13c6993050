"""A row that PostgreSQL refuses, among a thousand, on the way of real processes (case G8, DESIGN 3.9)."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import ClientSession

from runner.client import Client
from runner.store.port import Admission
from runner.store.postgres.store import PostgresStore
from runner.store.stream.codec import encode
from runner.store.stream.redis import RedisRecordStream
from tests.e2e.server import until
from tests.postgres_server import PostgresServer
from tests.records.bed import Fleet
from tests.redis_server import RedisServer
from tests.replicas.bed import TOKEN, until_async
from tests.server.scraped import scrape
from tests.stream.bed import admission, row

PROJECT = "default"
ROWS = 1_000
AT = 500


@pytest.fixture
async def fleet(
    tmp_path: Path, redis_server: RedisServer, postgres_server: PostgresServer, postgres_url: str
) -> AsyncIterator[Fleet]:
    made = Fleet(tmp_path, redis_server, postgres_server, max_deliveries=3)
    try:
        await made.start()
        yield made
    finally:
        await made.over()


def begun() -> Admission:
    """A turn that runs on some other machine."""
    made = admission()
    session, turn = replace(made.session, project=PROJECT), replace(made.turn, project=PROJECT)
    return replace(made, session=session, turn=turn)


async def publish(redis: str, payloads: list[bytes]) -> None:
    stream = RedisRecordStream(redis, timeout_seconds=5.0)
    try:
        assert len((await stream.publish(payloads)).entry_ids) == len(payloads)
    finally:
        await stream.close()


async def all_records(client: Client, session: str) -> list[dict[str, Any]]:
    found, after = [], None
    while True:
        page = await client.records(session, after=after)
        found += page["items"]
        after = page["next_cursor"]
        if after is None:
            return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["NUL in a text", "the cursor of another record", "no record at all"])
async def test_one_poisoned_row_among_a_thousand(fleet: Fleet, how: str) -> None:
    """999 are stored and told by both replicas; one is in quarantine with its payload, and the worker says so."""
    records = [row(n, project=PROJECT) for n in range(1, ROWS + 1)]
    poisoned = records.pop(AT)
    payload = encode(poisoned)
    if how == "NUL in a text":
        payload = encode(poisoned._replace(prompt_id="p\x00"))
    elif how == "the cursor of another record":
        payload = encode(poisoned._replace(record_id="rec_other", n=AT - 100))
    else:
        payload = b'["default","sess","and nothing else"]\n{}'
    store = await PostgresStore.open(fleet.postgres.url())
    assert await store.admit(begun())
    await store.close()
    payloads = [encode(one) for one in records]
    await publish(fleet.redis.url, [*payloads[:AT], payload, *payloads[AT:]])
    await until_async(lambda: quarantined(fleet), "it is in quarantine")
    (item,) = await quarantined(fleet)
    assert item["reason"] == "undeliverable"
    if how == "the cursor of another record":
        assert (item["record_id"], item["data"]) == ("rec_other", orjson.loads(poisoned.data))
    else:
        assert base64.b64decode(item["data"]["base64"]) == payload
    for client in fleet.clients:
        found = await all_records(client, poisoned.session_id)
        assert [(one["record_id"], one["data"]) for one in found] == [
            (one.record_id, orjson.loads(one.data)) for one in records
        ]
    await until(lambda: fleet.pending() == fleet.in_stream() == 0, "nothing is in the stream")
    async with ClientSession(fleet.worker.url, headers={"Authorization": f"Bearer {TOKEN}"}) as http:
        now = await scrape(http)
    told = {result: now.of("worker_entries_total", result=result) for result in ("written", "undeliverable", "lost")}
    assert told == {"written": ROWS - 1, "undeliverable": 1, "lost": 0}
    await asyncio.to_thread(fleet.worker.stop)
    said = fleet.worker.said().splitlines()
    assert any("ERROR" in line and "given up after 3 deliveries; it is in quarantine" in line for line in said), said
    assert "written=999" in said[-1], said
    assert "undeliverable=1" in said[-1], said


async def quarantined(fleet: Fleet) -> list[dict[str, Any]]:
    """As an operator sees it, the same at both replicas."""
    first, second = [(await client._call("GET", "/v1/quarantine"))["items"] for client in fleet.clients]
    return list(first) if first == second else []
