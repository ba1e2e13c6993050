"""Opening the file: by several at once, beside a process that has it open."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.store import sqlite_file
from runner.store.sql.schema import SCHEMA_VERSION
from runner.store.sqlite import SqliteStore
from tests.store.migrations.old import old_file
from tests.store.rows import PROJECT, admission


@pytest.mark.parametrize("old", [False, True])
async def test_several_may_open_it_at_the_same_moment(tmp_path: Path, old: bool):
    path = tmp_path / "db"
    if old:
        old_file(path, 1).close()
    stores = await asyncio.gather(*(SqliteStore.open(path, f"{{}}_{n}".format, upgrade=True) for n in range(4)))
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
