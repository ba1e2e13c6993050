"""Opening the file: by several at once, over an earlier schema, beside a process that has it open."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.store import sqlite_file
from runner.store.sql import SCHEMA_VERSION, load
from runner.store.sqlite import SqliteStore
from tests.store.rows import PROJECT, admission, command, record, turn


def old_file(path: Path) -> sqlite3.Connection:
    """A store of schema version 1 with an open turn in it."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.executescript(load("schema_1.sql"))
    connection.execute(f"PRAGMA application_id = {sqlite_file.APPLICATION_ID}")
    connection.execute("PRAGMA user_version = 1")
    connection.execute("INSERT INTO meta VALUES ('store_id', 'store_old')")
    connection.execute(
        "INSERT INTO turns (project, session_id, turn_id, epoch, replica_id, prompt_id, started_at)"
        " VALUES ('p', 's', 't1', 1, 'r1', 'p1', 1000)"
    )
    return connection


def schema(path: Path) -> set[tuple[str, ...]]:
    connection = sqlite3.connect(path)
    try:
        return set(connection.execute("SELECT type, name, sql FROM sqlite_schema"))
    finally:
        connection.close()


async def test_an_earlier_schema_is_brought_to_this_one(tmp_path: Path):
    old_file(tmp_path / "old").close()
    store = await SqliteStore.open(tmp_path / "old")
    assert store.store_id == "store_old"
    assert await store.open_turns() == await store.open_turns((PROJECT, "s")) == [turn()]
    assert (await store.append([record(1)])).accepted == 1
    assert await store.submit_command(command()) == command()
    await store.close()
    await (await SqliteStore.open(tmp_path / "new")).close()
    assert schema(tmp_path / "old") == schema(tmp_path / "new")
    again = await SqliteStore.open(tmp_path / "old")
    assert await again.open_commands() == [command()]
    await again.close()


async def test_a_migration_is_whole_or_not_at_all(tmp_path: Path):
    connection = old_file(tmp_path / "db")
    connection.execute("CREATE TABLE quarantine (theirs)")
    before = schema(tmp_path / "db")
    with pytest.raises(RunnerError) as caught:
        await SqliteStore.open(tmp_path / "db")
    assert caught.value.code == "store_unavailable"
    assert schema(tmp_path / "db") == before
    assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    connection.close()


@pytest.mark.parametrize("old", [False, True])
async def test_several_may_open_it_at_the_same_moment(tmp_path: Path, old: bool):
    path = tmp_path / "db"
    if old:
        old_file(path).close()
    stores = await asyncio.gather(*(SqliteStore.open(path, f"{{}}_{n}".format) for n in range(4)))
    assert len({store.store_id for store in stores}) == 1
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
    connection.close()
    for number, store in enumerate(stores):
        assert await store.admit(admission(f"t{number + 5}", number + 5))
        seen = await stores[number - 1].last_turn(PROJECT, "s")
        assert seen is not None
        assert seen.epoch == number + 5, "what one wrote the others read"
    for store in stores:
        await store.close()


async def test_closing_one_of_two_stores_leaves_the_others_locks(tmp_path: Path):
    """Whoever opens the file again in this process and closes it must not drop the locks of the first."""
    path = tmp_path / "db"
    store = await SqliteStore.open(path)
    await (await SqliteStore.open(path)).close()
    code = f"import sqlite3; sqlite3.connect({str(path)!r}, timeout=0).execute('PRAGMA journal_mode = DELETE')"
    done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True)
    assert "database is locked" in done.stderr
    assert await store.admit(admission())
    await store.close()


def test_a_directory_is_left_as_it_is(tmp_path: Path):
    mode = tmp_path.stat().st_mode
    with pytest.raises(RunnerError):
        sqlite_file.open_file(tmp_path, str)
    assert tmp_path.stat().st_mode == mode
