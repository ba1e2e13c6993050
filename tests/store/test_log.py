"""The write-ahead log: when its rest is copied, and by whom."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.store import log
from runner.store.log import Log, checkpoint
from runner.store.sqlite_file import open_file


@pytest.fixture
def connections(tmp_path: Path) -> Iterator[list[sqlite3.Connection]]:
    _, made = open_file(tmp_path / "db", "{}_1".format)
    yield made
    for connection in made:
        connection.close()


@pytest.fixture
def wal(monkeypatch: pytest.MonkeyPatch) -> Log:
    monkeypatch.setattr(log, "LONG_FRAMES", 3)
    monkeypatch.setattr(log, "TOO_LONG_FRAMES", 9)
    monkeypatch.setattr(log, "RESTART_MS", 5)
    return Log(lambda work: None)


def write(connection: sqlite3.Connection, times: int) -> None:
    for n in range(times):
        connection.execute(f"UPDATE meta SET value = 'store_{n}'")


def test_a_log_that_was_copied_starts_over(connections: list[sqlite3.Connection], wal: Log):
    write(connections[0], 5)
    wal.call_for_rest()
    assert wal.long
    wal.copy_rest(connections[0])
    write(connections[0], 1)
    wal.copy_rest(connections[0])
    assert not wal.long
    assert checkpoint(connections[0]).frames < 3


def test_a_rest_that_cannot_be_copied_now_is_looked_at_again(connections: list[sqlite3.Connection], wal: Log):
    write(connections[0], 2)
    reader = connections[1]
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM meta").fetchall()
    write(connections[0], 1)
    wal.copy_rest(connections[0])
    assert wal.long, "a reader still needs the log"
    reader.execute("ROLLBACK")
    wal.copy_rest(connections[0])
    assert not wal.long


def test_a_log_that_grew_too_long_holds_the_other_writers_up(connections: list[sqlite3.Connection], wal: Log):
    """A neighbour who is always writing keeps a log going that was copied whole."""
    mine, theirs = connections[0], connections[2]
    write(mine, 15)
    theirs.execute("BEGIN IMMEDIATE")
    theirs.execute("UPDATE meta SET value = 'store_x'")
    wal.copy_rest(mine)
    assert wal.long
    theirs.execute("COMMIT")
    assert checkpoint(mine).frames > 9, "it was copied whole, and goes on"
    wal.copy_rest(mine)
    assert not wal.long
    write(theirs, 1)
    assert checkpoint(mine).frames < 3
    assert mine.execute("PRAGMA busy_timeout").fetchone() == (0,), "it waits for nothing by itself, as before"


def test_a_database_that_fails_calls_nobody_again(tmp_path: Path, wal: Log):
    connection = sqlite3.connect(tmp_path / "closed")
    connection.close()
    wal.call_for_rest()
    wal.copy_rest(connection)
    assert not wal.long
