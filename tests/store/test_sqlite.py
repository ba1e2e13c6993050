"""What only the SQLite store has: a file, threads, groups, another process, a kill."""

from __future__ import annotations

import asyncio
import itertools
import os
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.store import sqlite_file
from runner.store.sql import PLACED, Placed, named
from runner.store.sqlite import SqliteStore
from tests.store.rows import PROJECT, admission, ending, prompt, question, record, session, turn

ROOT = Path(__file__).parents[2]


async def refused(path: Path) -> str:
    with pytest.raises(RunnerError) as caught:
        await SqliteStore.open(path)
    assert caught.value.code == "store_unavailable"
    return caught.value.message


def modes_in(folder: Path) -> dict[str, int]:
    return {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}


def connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None)


async def test_only_its_user_may_read_the_files(tmp_path: Path):
    path = tmp_path / "store.sqlite3"
    path.touch(mode=0o644)
    previous = os.umask(0)
    try:
        store = await SqliteStore.open(path)
        await store.save_session(session())
    finally:
        os.umask(previous)
    assert modes_in(tmp_path) == {"store.sqlite3": 0o600, "store.sqlite3-wal": 0o600, "store.sqlite3-shm": 0o600}
    await store.close()


async def test_the_store_id_is_made_once_and_kept(tmp_path: Path):
    path = tmp_path / "db"
    ids = []
    for n in range(3):
        store = await SqliteStore.open(path, f"{{}}_{n}".format)
        ids.append(store.store_id)
        await store.close()
    assert ids == ["store_0"] * 3


async def test_rows_are_there_after_a_restart(tmp_path: Path):
    store = await SqliteStore.open(tmp_path / "db")
    await store.admit(admission(prompt=prompt(), interactions=[question()], records=[record(1)]))
    await store.close()
    store = await SqliteStore.open(tmp_path / "db")
    assert await store.open_turns() == [turn()]
    assert await store.records(PROJECT, "s", None, 10) == [record(1)]
    await store.close()
    assert list(modes_in(tmp_path)) == ["db"]


async def test_close_finishes_queued_writes(tmp_path: Path):
    store = await SqliteStore.open(tmp_path / "db")
    await store.admit(admission())
    writes = [asyncio.create_task(store.append([record(n)])) for n in range(500)]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*writes)
    store = await SqliteStore.open(tmp_path / "db")
    assert len(await store.records(PROJECT, "s", None, 1000)) == 500
    await store.close()


async def test_a_foreign_database_is_left_alone(tmp_path: Path):
    path = tmp_path / "db"
    connection = connect(path)
    connection.execute("CREATE TABLE theirs (x)")
    assert "another program" in await refused(path)
    assert connection.execute("SELECT name FROM sqlite_schema").fetchall() == [("theirs",)]
    connection.close()


async def test_what_is_no_database_refuses_to_open(tmp_path: Path):
    path = tmp_path / "db"
    path.write_bytes(b"no database at all" * 100)
    assert str(path) in await refused(path)
    assert str(tmp_path / "none") in await refused(tmp_path / "none" / "db")
    assert str(tmp_path) in await refused(tmp_path)


async def test_a_lock_of_another_process_is_unavailable_and_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sqlite_file, "BUSY_SECONDS", 0.05)
    store = await SqliteStore.open(tmp_path / "db")
    await store.save_session(session())
    other = connect(tmp_path / "db")
    other.execute("BEGIN IMMEDIATE")
    calls = [store.admit(admission()), store.append([record(1)])]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [result.code for result in results if isinstance(result, RunnerError)] == ["store_unavailable"] * 2
    assert not await store.ready()
    assert await store.session(PROJECT, "s") == session(), "reading goes on"
    other.execute("ROLLBACK")
    other.close()
    assert await store.ready()
    assert await store.admit(admission(records=[record(1)]))
    await store.close()


async def test_a_full_disk_is_unavailable_and_passes(sqlite: SqliteStore):
    await sqlite.admit(admission())
    writers = (sqlite._connections[0], sqlite._connections[3])
    (pages,) = writers[0].execute("PRAGMA page_count").fetchone()
    for writer in writers:
        writer.execute(f"PRAGMA max_page_count = {pages}").fetchall()
    big = record(1, data=b'"' + b"x" * 200_000 + b'"')
    results = await asyncio.gather(
        sqlite.append([record(2)]), sqlite.append([big]), sqlite.append([record(3)]), return_exceptions=True
    )
    codes = [result.code for result in results if isinstance(result, RunnerError)]
    assert set(codes) == {"store_unavailable"}
    assert len(await sqlite.records(PROJECT, "s", None, 10)) == 3 - len(codes)
    assert await sqlite.session(PROJECT, "s") == session()
    for writer in writers:
        writer.execute("PRAGMA max_page_count = 1000000").fetchall()
    assert await sqlite.ready()
    await sqlite.append([record(2), big, record(3)])
    assert len(await sqlite.records(PROJECT, "s", None, 10)) == 3


async def test_a_row_that_the_database_refuses_spares_its_group(sqlite: SqliteStore):
    """Case G8: alone and among others, a row of the wrong kind fails by itself."""
    bad = record(5, type="\ud800")
    await sqlite.admit(admission())
    with pytest.raises(RunnerError) as caught:
        await sqlite.append([record(4), bad])
    assert caught.value.code == "internal"
    too_big = session("big", head_n=2**70)
    calls = [sqlite.append([record(1)]), sqlite.append([record(2), bad]), sqlite.save_session(too_big)]
    calls.append(sqlite.append([record(3)]))
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [getattr(result, "code", None) for result in results] == [None, "internal", "internal", None]
    assert [row.n for row in await sqlite.records(PROJECT, "s", None, 10)] == [1, 3]
    assert await sqlite.session(PROJECT, "big") is None


async def test_a_record_of_the_wrong_kind_keeps_no_turn_from_ending(sqlite: SqliteStore):
    await sqlite.admit(admission())
    assert await sqlite.end(ending(turn(), records=[record(1), record(2, type="\ud800"), record(3)]))
    assert [row.n for row in await sqlite.records(PROJECT, "s", None, 10)] == [1, 3]
    assert await sqlite.quarantined(PROJECT, 10) == []


async def test_a_cancelled_call_leaves_whole_transactions(sqlite: SqliteStore):
    calls = [
        asyncio.create_task(sqlite.admit(admission(f"t{n}", n, records=[record(1, n), record(2, n)])))
        for n in range(1, 40)
    ]
    for delay, call in enumerate(calls):
        if delay % 5 == 0:
            await asyncio.sleep(0)
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert await sqlite.ready()
    written = {row.epoch for row in await sqlite.open_turns()}
    records = await sqlite.records(PROJECT, "s", None, 1000)
    assert {
        epoch: len(list(rows)) for epoch, rows in itertools.groupby(records, lambda row: row.epoch)
    } == dict.fromkeys(sorted(written), 2)
    assert sqlite.busy == 0


async def test_writing_goes_on_beside_a_long_read(sqlite: SqliteStore):
    gate = threading.Event()
    reading = asyncio.create_task(sqlite._read(lambda connection: gate.wait(30)))
    await asyncio.sleep(0)
    assert await sqlite.admit(admission())
    assert not reading.done()
    gate.set()
    assert await reading


async def test_the_log_does_not_grow_for_ever(sqlite: SqliteStore, tmp_path: Path):
    log = tmp_path / "store.sqlite3-wal"
    data = b'"' + b"x" * 3000 + b'"'
    await sqlite.admit(admission())

    async def write(worker: int) -> None:
        for n in range(800):
            await sqlite.append([record(worker * 10_000 + n * 10 + k, data=data) for k in range(3)])

    await asyncio.gather(*(write(worker) for worker in range(10)))
    written = 24_000 * len(data)
    assert log.stat().st_size < written


async def test_an_idle_store_copies_its_log_back(sqlite: SqliteStore, tmp_path: Path):
    await sqlite.admit(admission())
    await sqlite.append([record(n) for n in range(100)])
    deadline = time.monotonic() + 20
    while not _copied(tmp_path / "store.sqlite3"):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def _copied(path: Path) -> bool:
    """Whether the main file alone, without the log, holds the rows."""
    connection = sqlite3.connect(f"file:{path}?immutable=1", uri=True)
    try:
        return bool(connection.execute("SELECT count(*) FROM records").fetchone() == (100,))
    finally:
        connection.close()


def write_until_killed(path: Path, lines: int) -> list[list[str]]:
    """What a child had said, word by word, when it was killed after ``lines`` whole lines."""
    command = [sys.executable, "-m", "tests.store.writing_child", str(path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert child.stdout is not None
    said: list[list[str]] = []
    try:
        for line in child.stdout:
            if line.endswith("\n"):
                said.append(line.split())
            if len(said) == lines:
                child.kill()
    finally:
        child.kill()
        child.wait(10)
        child.stdout.close()
    return said


async def test_a_finished_call_survives_kill_9(tmp_path: Path):
    """DESIGN 3.9: durable means it survives kill -9 of the process."""
    path = tmp_path / "db"
    said = await asyncio.to_thread(write_until_killed, path, 400)
    assert len(said) >= 400
    store = await SqliteStore.open(path)
    assert store.store_id == said[0][1]
    last = {(kind, name): int(epoch) for kind, name, epoch in said[1:]}
    for (kind, name), epoch in last.items():
        row = await store.turn(PROJECT, name, f"{name}-t{epoch}")
        assert row is not None
        if kind == "end":
            assert row.outcome == "completed"
        kept = [found.n for found in await store.records(PROJECT, name, (epoch, 0), 3) if found.epoch == epoch]
        assert kept[:2] == [1, 2]
        assert (row.outcome is not None) == (kept == [1, 2, 3]), "a turn and its records are written together"
    assert {name for _, name in last} == {"s0", "s1", "s2", "s3"}
    assert await store.end(ending(turn("s0-t1", 1, "s0"))) is False
    assert await store.ready()
    await store.close()


@pytest.mark.parametrize("name", sorted(PLACED))
async def test_no_hot_statement_scans_a_table(sqlite: SqliteStore, name: str):
    sql = PLACED[name].text
    count = sql.count("?")
    plan = sqlite._connections[1].execute(f"EXPLAIN QUERY PLAN {sql}", (None,) * count).fetchall()
    details = [str(row[3]) for row in plan]
    few = (
        "CONSTANT ROW",
        "turns_open",
        "turns_paused",
        "commands_unfinished",
        "prompts_waiting",
        "sqlite_sequence",
        "SCAN old",
    )
    assert [detail for detail in details if detail.startswith("SCAN") and not any(word in detail for word in few)] == []
    if name in (
        "records",
        "sessions",
        "sessions_before",
        "last_turn",
        "session_interactions",
        "open_interactions",
        "quarantined",
    ):
        assert not any("ORDER BY" in detail and "RIGHT PART" not in detail for detail in details)


def test_numbered_parameters_are_put_in_the_order_of_their_places():
    placed = Placed("UPDATE t SET a = ?2 WHERE b = ?1 AND (?2 IS NULL OR c = ?10)")
    assert placed.text == "UPDATE t SET a = ? WHERE b = ? AND (? IS NULL OR c = ?)"
    assert placed.place(tuple("abcdefghij")) == ("b", "a", "b", "j")
    assert Placed("INSERT INTO t VALUES (?1, ?2)").place((1, 2)) == (1, 2)


def test_statements_are_read_by_name():
    assert named("-- name: one\nSELECT ?1,\n  2;\n\n-- name: two\nSELECT 3;\n") == {
        "one": "SELECT ?1, 2",
        "two": "SELECT 3",
    }
