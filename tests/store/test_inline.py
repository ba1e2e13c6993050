"""Who commits: the loop's own thread while it is quick, else the writer's thread; in order either way."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path

import pytest

from runner.store import inline
from runner.store.sqlite import SqliteStore
from tests.store.rows import PROJECT, admission, record, session


@pytest.fixture
async def store(tmp_path: Path):
    made = await SqliteStore.open(tmp_path / "store.sqlite3")
    yield made
    await made.close()


@pytest.fixture
def by_thread(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many transactions each hand-over gave to the thread."""
    given: list[int] = []
    put = store._writer.put

    def count(tick):
        if tick is not None:
            given.append(len(tick))
        put(tick)

    monkeypatch.setattr(store._writer, "put", count)
    return given


async def test_a_small_commit_wakes_no_thread(store: SqliteStore, by_thread: list[int]):
    assert await store.admit(admission(records=[record(1)]))
    assert by_thread == []
    assert len(await store.records(PROJECT, "s", None, 10)) == 1


async def test_a_large_one_is_the_threads_and_what_follows_keeps_the_order(
    store: SqliteStore, by_thread: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    await store.admit(admission())
    many = [record(n) for n in range(1, inline.ROWS_MAX + 2)]
    other = sqlite3.connect(tmp_path / "store.sqlite3", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    large = asyncio.ensure_future(store.append(many))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert by_thread == [1]
    small = asyncio.ensure_future(store.append([record(len(many) + 1)]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert by_thread == [1, 1], "the small one goes behind the large one"
    other.execute("ROLLBACK")
    other.close()
    await small
    assert large.done()
    await store.append([record(len(many) + 2)])
    assert by_thread == [1, 1], "the thread has nothing to do any more"
    assert len(await store.records(PROJECT, "s", None, 10_000)) == len(many) + 2


async def test_a_lock_of_another_process_is_waited_for_in_the_thread(
    store: SqliteStore, by_thread: list[int], tmp_path: Path
):
    other = sqlite3.connect(tmp_path / "store.sqlite3", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    saving = asyncio.ensure_future(store.save_session(session()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert by_thread == [1]
    assert not saving.done()
    other.execute("ROLLBACK")
    other.close()
    await saving
    assert await store.session(PROJECT, "s") == session()


async def test_a_slow_commit_sends_the_next_ones_to_the_thread(
    store: SqliteStore, by_thread: list[int], monkeypatch: pytest.MonkeyPatch
):
    readings = iter([0.0, 1.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(readings, 1.0))
    await store.save_session(session())
    assert by_thread == []
    await store.save_session(session())
    assert by_thread == [1]
