"""PostgreSQL goes away while replicas write: behind the spool nothing that was accepted is lost, or there twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from runner.clock import SystemClock
from runner.store.port import Admission, Appended
from runner.store.postgres.store import PostgresStore
from runner.store.spool import SpooledStore
from tests.postgres_server import PostgresServer
from tests.store.rows import PROJECT, ended, ending, record, session, turn

SECONDS = 0.5
PATIENCE = 30.0
SESSIONS = 8
RECORDS = 4

Trouble = Callable[[PostgresServer], None]
TROUBLES: dict[str, tuple[Trouble, Trouble]] = {
    "killed": (PostgresServer.kill, PostgresServer.start),
    "frozen": (PostgresServer.stop, PostgresServer.cont),
    "restarted": (PostgresServer.restart, lambda server: None),
    "disconnected": (PostgresServer.disconnect, PostgresServer.disconnect),
}


@pytest.fixture
async def store(postgres_url: str, tmp_path: Path) -> AsyncIterator[SpooledStore]:
    remote = await PostgresStore.open(postgres_url, seconds=SECONDS)
    made = await SpooledStore.open(remote, tmp_path / "spool", SystemClock(), may_spool=lambda *_: True)
    yield made
    await made.close()


class Writer:
    """One session's turns, one behind the other; ``turns`` counts those that were accepted to the end."""

    def __init__(self, store: SpooledStore, name: str) -> None:
        self.store = store
        self.name = name
        self.turns = 0

    async def until(self, told: asyncio.Event) -> None:
        while not told.is_set():
            await self.one()

    async def one(self) -> None:
        epoch = self.turns + 1
        own = turn(f"{self.name}-{epoch}", epoch, self.name)
        row = session(self.name, head_epoch=epoch, head_n=RECORDS)
        assert await self.store.admit(Admission(row, own))
        for n in range(1, RECORDS):
            assert await self.store.append([self.record(n, epoch)]) == Appended(1)
        assert await self.store.end(replace(ending(own), session=row, records=[self.record(RECORDS, epoch)]))
        self.turns = epoch

    def record(self, n: int, epoch: int):
        return record(n, epoch, self.name, turn_id=f"{self.name}-{epoch}", record_id=f"{self.name}-{epoch}-{n}")


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_what_was_accepted_is_there_once_case_g1(
    store: SpooledStore, postgres_server: PostgresServer, trouble: str
):
    begins, ends = TROUBLES[trouble]
    writers = [Writer(store, f"s{n}") for n in range(SESSIONS)]
    told = asyncio.Event()
    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
        for writer in writers:
            group.create_task(writer.until(told))
        await progress(writers, 2)
        await asyncio.to_thread(begins, postgres_server)
        await progress(writers, 3)
        await asyncio.to_thread(ends, postgres_server)
        await progress(writers, 2)
        told.set()
    async with asyncio.timeout(PATIENCE):
        while store.waiting:
            await asyncio.sleep(0.02)
    for writer in writers:
        found = await store.records(PROJECT, writer.name, None, 10_000)
        assert found == [writer.record(n, epoch) for epoch in range(1, writer.turns + 1) for n in range(1, RECORDS + 1)]
        last = await store.last_turn(PROJECT, writer.name)
        assert last == ended(turn(f"{writer.name}-{writer.turns}", writer.turns, writer.name))
    assert await store.open_turns() == []
    assert await store.quarantined(PROJECT, 10) == []


async def progress(writers: list[Writer], turns: int) -> None:
    """Until each has had so many more turns."""
    goals = {writer: writer.turns + turns for writer in writers}
    while any(writer.turns < goal for writer, goal in goals.items()):
        await asyncio.sleep(0.01)
