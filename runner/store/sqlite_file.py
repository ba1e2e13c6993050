"""Opening the store's SQLite file: its mode, its connections, its schema."""

from __future__ import annotations

import os
import sqlite3
import stat
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

from runner.errors import RunnerError
from runner.store.faults import is_busy
from runner.store.log import checkpoint
from runner.store.sql.schema import APPLICATION_ID, SCHEMA_VERSION, creation, foreign, refusal

PAGE_BYTES: Final = 2048
BUSY_SECONDS: Final = 5.0
ASK_AGAIN_SECONDS: Final = 0.02
WAL_KEPT_BYTES: Final = 8 * 1024 * 1024


def open_file(path: Path, mint: Callable[[str], str], *, upgrade: bool = False) -> tuple[str, list[sqlite3.Connection]]:
    """The store's id, and connections for: the writer, the reader, the copier, the loop. Blocks; for a thread.

    Another process may create or migrate the same file at this moment: it is waited for. The writer's and the loop's
    connection never wait for a lock by themselves. ``upgrade``: a file of an earlier schema version is migrated.

    Raises:
        RunnerError: ``store_unavailable``: the file cannot be used, is another program's, or has another schema.
    """
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            return _open(path, mint, upgrade)
        except (OSError, sqlite3.Error) as error:
            if not is_busy(error) or time.monotonic() > deadline:
                raise RunnerError("store_unavailable", f"The store {path} cannot be used: {error}.") from error
        time.sleep(ASK_AGAIN_SECONDS)


def _open(path: Path, mint: Callable[[str], str], upgrade: bool) -> tuple[str, list[sqlite3.Connection]]:
    connections: list[sqlite3.Connection] = []
    try:
        own(path)
        connections.append(_connect(path))
        store_id = _prepare(connections[0], path, mint, upgrade)
        connections += [_connect(path) for _ in range(3)]
        connections[1].execute("PRAGMA query_only = ON")
        checkpoint(connections[0])
        for connection in (connections[0], connections[3]):
            connection.execute("PRAGMA busy_timeout = 0").fetchall()
    except BaseException:
        for connection in connections:
            connection.close()
        raise
    return store_id, connections


def own(path: Path) -> None:
    """Create the file, or take its permissions from everybody else.

    A file that is there is not opened: closing it again would drop the locks that SQLite holds in this process.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        if stat.S_ISREG(path.stat().st_mode):
            path.chmod(0o600)


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute("PRAGMA journal_mode = WAL").fetchall()
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint = 0").fetchall()
        connection.execute(f"PRAGMA journal_size_limit = {WAL_KEPT_BYTES}").fetchall()
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path, mint: Callable[[str], str], upgrade: bool) -> str:
    """Create the schema in an empty file or bring an earlier one to this version, refuse any other; the store's id."""
    with closing(connection.cursor()) as cursor:
        cursor.execute("BEGIN IMMEDIATE")
        try:
            version = version_of(cursor, str(path))
            if version == 0:
                for statement in creation("sqlite", mint("store")):
                    cursor.execute(statement)
            elif version < SCHEMA_VERSION and upgrade:
                _upgrade(cursor, version, mint)
            elif version != SCHEMA_VERSION:
                raise refusal(str(path), version)
            (store_id,) = cursor.execute("SELECT value FROM meta WHERE name = 'store_id'").fetchone()
        except BaseException:
            cursor.execute("ROLLBACK")
            raise
        cursor.execute("COMMIT")
        return str(store_id)


def _upgrade(cursor: sqlite3.Cursor, version: int, mint: Callable[[str], str]) -> None:
    # Alembic takes a third of a second to import, and a file is migrated once.
    from runner.store.migrations.chain import steps
    from runner.store.migrations.sqlite import perform

    perform(cursor, steps("sqlite", version, SCHEMA_VERSION, mint))


def version_of(cursor: sqlite3.Cursor, where: str) -> int:
    """The file's schema version, 0 when it is empty.

    Raises:
        RunnerError: ``store_unavailable``: it is another program's.
    """
    (tables,) = cursor.execute(
        "SELECT count(*) FROM sqlite_schema WHERE name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
    ).fetchone()
    if tables == 0:
        return 0
    (application,) = cursor.execute("PRAGMA application_id").fetchone()
    (version,) = cursor.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID or version <= 0:
        raise foreign(where)
    return int(version)
