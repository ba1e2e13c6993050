"""The spool on disk: writes that wait for a store, in order, in a SQLite file of one process (DESIGN 3.9)."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple, Self, TypeVar

from runner.errors import RunnerError
from runner.ids import Key

T = TypeVar("T")

_SCHEMA: Final = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE waiting (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, project TEXT NOT NULL, session_id TEXT NOT NULL, turn_id TEXT,
    call TEXT NOT NULL, payload BLOB NOT NULL, rejected INTEGER NOT NULL DEFAULT 0);
CREATE INDEX waiting_of_session ON waiting (project, session_id, seq);
CREATE TABLE refused (
    seq INTEGER PRIMARY KEY, project TEXT NOT NULL, session_id TEXT NOT NULL, turn_id TEXT,
    call TEXT NOT NULL, payload BLOB NOT NULL);
"""
_VERSION: Final = 1
LOCK_TRIES: Final = 100
LOCK_PAUSE_SECONDS: Final = 0.1
_APPLICATION_ID: Final = 0x41525350


class Entry(NamedTuple):
    """One write that waits. ``rejected``: its turn's admission was refused, so its records may only be set aside."""

    seq: int
    project: str
    session_id: str
    turn_id: str | None
    call: str
    payload: bytes
    rejected: bool

    @property
    def key(self) -> Key:
        """Project and session."""
        return self.project, self.session_id


class SpoolFile:
    """Entries on disk: what ``put`` returned for survives kill -9 of the process, not a power cut.

    One thread does all the work, in the order of the calls. Every call raises ``RunnerError("store_unavailable")`` when
    the file cannot be used; a cancelled one is carried out all the same.
    """

    def __init__(self, connection: sqlite3.Connection, lock: int, worker: ThreadPoolExecutor) -> None:
        self._connection = connection
        self._lock = lock
        self._worker = worker
        self.bytes = 0
        """Payload that waits."""

    @classmethod
    async def open(cls, path: Path) -> Self:
        """Open or create the file, mode 0600; waits a while for another process to close it."""
        for _ in range(LOCK_TRIES):
            spool = await cls.open_if_free(path, create=True)
            if spool is not None:
                return spool
            await asyncio.sleep(LOCK_PAUSE_SECONDS)
        raise RunnerError("store_unavailable", f"The spool {path} is used by another process.")

    @classmethod
    async def open_if_free(cls, path: Path, *, create: bool = False) -> Self | None:
        """As ``open``; None at once when another process has the file, or without ``create`` when there is none."""
        worker = ThreadPoolExecutor(1, thread_name_prefix="spool")
        try:
            opened = await asyncio.get_running_loop().run_in_executor(worker, _open, path, create)
        except BaseException as error:
            worker.shutdown(wait=False)
            if isinstance(error, OSError | sqlite3.Error):
                raise RunnerError("store_unavailable", f"The spool {path} cannot be used: {error}.") from error
            raise
        if opened is None:
            worker.shutdown(wait=False)
            return None
        spool = cls(*opened, worker)
        spool.bytes = await spool._run(lambda db: int(_one(db, "SELECT total(length(payload)) FROM waiting")[0]))
        return spool

    async def store_id(self, fresh: str | None = None) -> str | None:
        """The store that the entries are for; ``fresh`` replaces it."""

        def work(db: sqlite3.Connection) -> str | None:
            if fresh is not None:
                db.execute("INSERT OR REPLACE INTO meta (name, value) VALUES ('store_id', ?)", (fresh,))
            found = db.execute("SELECT value FROM meta WHERE name = 'store_id'").fetchone()
            return None if found is None else str(found[0])

        return await self._run(work)

    async def put(self, key: Key, turn_id: str | None, call: str, payload: bytes) -> None:
        """Add an entry behind all others."""
        statement = "INSERT INTO waiting (project, session_id, turn_id, call, payload) VALUES (?, ?, ?, ?, ?)"
        await self._run(lambda db: _only(db.execute(statement, (*key, turn_id, call, payload))), len(payload))

    async def first(self, key: Key) -> Entry | None:
        """The oldest entry of a session."""
        found = await self._rows("WHERE project = ? AND session_id = ? ORDER BY seq LIMIT 1", *key)
        return found[0] if found else None

    async def after(self, seq: int, limit: int) -> list[Entry]:
        """Entries of all sessions behind a number, in order."""
        return await self._rows("WHERE seq > ? ORDER BY seq LIMIT ?", seq, limit)

    async def drop(self, entry: Entry, *, reject_turn: bool = False) -> None:
        """Take an entry away; ``reject_turn`` marks what else waits of its turn, in the same transaction."""

        def work(db: sqlite3.Connection) -> None:
            if reject_turn:
                mark = "UPDATE waiting SET rejected = 1 WHERE project = ? AND session_id = ? AND turn_id = ?"
                db.execute(mark, (*entry.key, entry.turn_id))
            db.execute("DELETE FROM waiting WHERE seq = ?", (entry.seq,))

        await self._run(work, -len(entry.payload))

    async def refuse(self, entry: Entry) -> None:
        """Keep an entry that no store will ever take where it holds nothing up."""

        def work(db: sqlite3.Connection) -> None:
            db.execute("INSERT INTO refused VALUES (?, ?, ?, ?, ?, ?)", entry[:6])
            db.execute("DELETE FROM waiting WHERE seq = ?", (entry.seq,))

        await self._run(work, -len(entry.payload))

    async def refused(self) -> list[tuple[str, str]]:
        """(session, call) of what was refused, oldest first, at most 1,000."""
        statement = "SELECT session_id, call FROM refused ORDER BY seq LIMIT 1000"
        return await self._run(lambda db: db.execute(statement).fetchall())

    async def close(self) -> None:
        """Finish what was asked, then close."""
        await asyncio.get_running_loop().run_in_executor(self._worker, self._shut)
        self._worker.shutdown(wait=False)

    def _shut(self) -> None:
        self._connection.close()
        os.close(self._lock)

    async def _rows(self, where: str, *parameters: str | int) -> list[Entry]:
        columns = "seq, project, session_id, turn_id, call, payload, rejected"
        statement = f"SELECT {columns} FROM waiting {where}"
        found = await self._run(lambda db: db.execute(statement, parameters).fetchall())
        return [Entry._make((*row[:6], bool(row[6]))) for row in found]

    async def _run(self, work: Callable[[sqlite3.Connection], T], growth: int = 0) -> T:
        try:
            job = asyncio.get_running_loop().run_in_executor(self._worker, self._together, work, growth)
            return await asyncio.shield(job)
        except (sqlite3.Error, RuntimeError) as error:
            raise RunnerError("store_unavailable", f"The spool cannot be used: {error}.") from error

    def _together(self, work: Callable[[sqlite3.Connection], T], growth: int) -> T:
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            done = work(self._connection)
        self.bytes += growth
        return done


def _only(_: object) -> None:
    return None


def _one(db: sqlite3.Connection, statement: str) -> tuple[float, ...]:
    found: tuple[float, ...] = db.execute(statement).fetchone()
    return found


def _open(path: Path, create: bool) -> tuple[sqlite3.Connection, int] | None:
    if not create and not path.exists():
        return None
    lock = _locked(path)
    if lock is None:
        return None
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        path.chmod(0o600)
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            _prepare(connection, path)
        except BaseException:
            connection.close()
            raise
    except BaseException:
        os.close(lock)
        raise
    return connection, lock


def _locked(path: Path) -> int | None:
    """A lock beside the file: whoever closed the file itself once would drop SQLite's own locks on it."""
    lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    with closing(connection.cursor()) as cursor:
        (version,) = cursor.execute("PRAGMA user_version").fetchone()
        (tables,) = cursor.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        (application,) = cursor.execute("PRAGMA application_id").fetchone()
        if tables and (application, version) != (_APPLICATION_ID, _VERSION):
            raise RunnerError("store_unavailable", f"{path} is no spool of this version.")
        if not tables:
            # Set before there are tables: what was replayed gives its space back.
            cursor.execute("PRAGMA auto_vacuum = FULL")
        cursor.execute("PRAGMA journal_mode = WAL").fetchall()
        cursor.execute("PRAGMA synchronous = NORMAL")
        cursor.execute("PRAGMA journal_size_limit = 1048576").fetchall()
        if tables:
            return
        cursor.execute("BEGIN IMMEDIATE")
        for statement in _SCHEMA.strip().split(";\n"):
            cursor.execute(statement)
        cursor.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        cursor.execute(f"PRAGMA user_version = {_VERSION}")
        cursor.execute("COMMIT")
