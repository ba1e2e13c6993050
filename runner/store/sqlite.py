"""The store in one SQLite file, for one process."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from runner.errors import RunnerError
from runner.ids import Ids
from runner.store import rows
from runner.store.inline import InlineWriter
from runner.store.port import (
    Admission,
    Ending,
    InteractionRow,
    PromptRow,
    RecordRow,
    SessionRow,
    TurnRow,
)
from runner.store.sql import PLACED, SCHEMA_VERSION, load
from runner.store.threads import Query, Reader, Statement, Transaction, Writer, checkpoint, resolve

Row = TypeVar("Row")

APPLICATION_ID: Final = 0x41435052
PAGE_BYTES: Final = 2048
BUSY_SECONDS: Final = 2.0
WAL_KEPT_BYTES: Final = 8 * 1024 * 1024

INSERT_TURN: Final = PLACED["insert_turn"]
END_TURN: Final = PLACED["end_turn"]
SAVE_SESSION: Final = PLACED["save_session"]
SAVE_PROMPT: Final = PLACED["save_prompt"]
SAVE_INTERACTION: Final = PLACED["save_interaction"]
INSERT_RECORD: Final = PLACED["insert_record"]


class SqliteStore:
    """``Store`` over SQLite in WAL mode: durable against kill -9, not against a power cut (``synchronous=NORMAL``).

    Make it with ``open`` and use it from that event loop only. ``busy`` counts calls that wait for a thread.
    """

    def __init__(self, store_id: str, connections: Sequence[sqlite3.Connection]) -> None:
        loop = asyncio.get_running_loop()
        write, read, copy, inline = connections
        self.store_id = store_id
        self.busy = 0
        self._loop = loop
        self._connections = connections
        self._reader = Reader("reader", loop, read)
        self._copier = Reader("copier", loop, copy)
        self._writer = Writer(loop, write, self._copier)
        self._inline = InlineWriter(loop, inline, self._writer, self._copier)
        self._closed = False
        self._tick: list[Transaction] = []
        for thread in (self._reader, self._copier, self._writer):
            thread.start()

    @classmethod
    async def open(cls, path: Path, mint: Callable[[str], str] | None = None) -> Self:
        """Open or create the database; a new one gets mode 0600 and a ``store_id`` from ``mint("store")``.

        Raises:
            RunnerError: ``store_unavailable``: the file cannot be used, or has another schema version.
        """
        return cls(*await asyncio.to_thread(_open, path, mint or Ids().mint))

    async def admit(self, admission: Admission) -> bool:
        statements = [
            (INSERT_TURN, [rows.turn_parameters(admission.turn)]),
            (SAVE_SESSION, [rows.session_parameters(admission.session)]),
            *_many(admission.records, admission.interactions, (admission.prompt,)),
        ]
        return await self._write(statements, guarded=True)

    async def end(self, ending: Ending) -> bool:
        if ending.turn.outcome is None:
            raise ValueError("an ending has an outcome")
        statements = [
            (END_TURN, [rows.ending_parameters(ending.turn)]),
            (SAVE_SESSION, [rows.session_parameters(ending.session)]),
            *_many(ending.records, ending.interactions, (ending.prompt, *ending.others)),
        ]
        return await self._write(statements, guarded=True)

    async def save_session(self, row: SessionRow) -> None:
        await self._write([(SAVE_SESSION, [rows.session_parameters(row)])])

    async def append(
        self,
        records: Sequence[RecordRow],
        interactions: Sequence[InteractionRow] = (),
        prompts: Sequence[PromptRow] = (),
    ) -> None:
        await self._write(_many(records, interactions, prompts))

    async def answer_interaction(self, row: InteractionRow, expected_status: str) -> bool:
        parameters = rows.answer_parameters(row, expected_status)
        return await self._write([(PLACED["answer_interaction"], [parameters])], guarded=True)

    async def session(self, project: str, session_id: str) -> SessionRow | None:
        return await self._one("session", rows.session_row, project, session_id)

    async def sessions(self, project: str, limit: int, before: tuple[int, str] | None = None) -> list[SessionRow]:
        if before is None:
            return await self._all("sessions", rows.session_row, project, rows.bounded(limit))
        return await self._all("sessions_before", rows.session_row, project, rows.bounded(limit), *before)

    async def prompt(self, project: str, session_id: str, prompt_id: str) -> PromptRow | None:
        return await self._one("prompt", rows.prompt_row, project, session_id, prompt_id)

    async def turn(self, project: str, session_id: str, turn_id: str) -> TurnRow | None:
        return await self._one("turn", rows.turn_row, project, session_id, turn_id)

    async def last_turn(self, project: str, session_id: str) -> TurnRow | None:
        return await self._one("last_turn", rows.turn_row, project, session_id)

    async def open_turns(self) -> list[TurnRow]:
        return await self._all("open_turns", rows.turn_row)

    async def records(
        self, project: str, session_id: str, after: tuple[int, int] | None, limit: int
    ) -> list[RecordRow]:
        epoch, n = after or (-1, -1)
        return await self._all("records", rows.record_row, project, session_id, epoch, n, rows.bounded(limit))

    async def interactions(
        self, project: str, session_id: str | None = None, status: str | None = None
    ) -> list[InteractionRow]:
        name, of = ("interactions", ()) if session_id is None else ("session_interactions", (session_id,))
        newest = await self._all(name, rows.interaction_row, project, status, rows.ROWS_MAX, *of)
        return newest[::-1]

    async def open_interactions(self, status: str) -> list[InteractionRow]:
        return await self._all("open_interactions", rows.interaction_row, status)

    async def interaction(self, project: str, interaction_id: str) -> InteractionRow | None:
        return await self._one("interaction", rows.interaction_row, project, interaction_id)

    async def delete_session_content(self, project: str, session_id: str) -> None:
        names = ("empty_ended_session", "delete_turns", "delete_prompts", "delete_interactions", "delete_records")
        await self._write([(PLACED[name], [(project, session_id)]) for name in names], guarded=True)

    async def ready(self) -> bool:
        try:
            await self._write([(PLACED["touch"], [(self.store_id,)])])
        except RunnerError:
            return False
        return True

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._hand_over()
            self._inline.close()
            self._writer.put(None)
            await asyncio.to_thread(self._shut)

    def _shut(self) -> None:
        self._writer.join()
        for reader in (self._reader, self._copier):
            reader.put(None)
            reader.join()
        for connection in reversed(self._connections):
            connection.close()

    async def _write(self, statements: list[Statement], *, guarded: bool = False) -> bool:
        self._usable()
        future: asyncio.Future[bool] = self._loop.create_future()
        if not self._tick:
            self._loop.call_soon(self._hand_over)
        self._tick.append(Transaction(future, statements, guarded))
        return await self._answer(future)

    def _hand_over(self) -> None:
        """All that one tick of the loop wrote shares one commit: here while that is quick, else in the thread."""
        tick, self._tick = self._tick, []
        if not tick:
            return
        answers = self._inline.write(tick)
        if answers is None:
            self._writer.put(tick)
        else:
            resolve(answers)

    async def _one(self, name: str, make: Callable[[rows.Parameters], Row], *parameters: Any) -> Row | None:
        def work(connection: sqlite3.Connection) -> Row | None:
            statement = PLACED[name]
            found = connection.execute(statement.text, statement.place(parameters)).fetchall()
            return make(found[0]) if found else None

        return await self._read(work)

    async def _all(self, name: str, make: Callable[[rows.Parameters], Row], *parameters: Any) -> list[Row]:
        def work(connection: sqlite3.Connection) -> list[Row]:
            statement = PLACED[name]
            found = connection.execute(statement.text, statement.place(parameters)).fetchall()
            return [make(columns) for columns in found]

        return await self._read(work)

    async def _read(self, work: Callable[[sqlite3.Connection], Row]) -> Row:
        self._usable()
        future: asyncio.Future[Row] = self._loop.create_future()
        self._reader.put(Query(future, work))
        return await self._answer(future)

    async def _answer(self, future: asyncio.Future[Row]) -> Row:
        self.busy += 1
        try:
            return await future
        finally:
            self.busy -= 1

    def _usable(self) -> None:
        if self._closed:
            raise RunnerError("store_unavailable", "The store is closed.")


def _many(
    records: Sequence[RecordRow], interactions: Sequence[InteractionRow], prompts: Sequence[PromptRow | None]
) -> list[Statement]:
    statements: list[Statement] = []
    known = [rows.prompt_parameters(row) for row in prompts if row is not None]
    if known:
        statements.append((SAVE_PROMPT, known))
    if interactions:
        statements.append((SAVE_INTERACTION, [rows.interaction_parameters(row) for row in interactions]))
    if records:
        statements.append((INSERT_RECORD, [rows.record_parameters(row) for row in records]))
    return statements


def _open(path: Path, mint: Callable[[str], str]) -> tuple[str, list[sqlite3.Connection]]:
    connections: list[sqlite3.Connection] = []
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        path.chmod(0o600)
        connections.append(_connect(path))
        store_id = _prepare(connections[0], path, mint)
        connections += [_connect(path), _connect(path), _connect(path, busy_seconds=0.0)]
        connections[1].execute("PRAGMA query_only = ON")
        checkpoint(connections[0])
    except Exception as error:
        for connection in connections:
            connection.close()
        if isinstance(error, OSError | sqlite3.Error):
            raise RunnerError("store_unavailable", f"The store {path} cannot be used: {error}.") from error
        raise
    return store_id, connections


def _connect(path: Path, busy_seconds: float = BUSY_SECONDS) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=busy_seconds, isolation_level=None, check_same_thread=False)
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


def _prepare(connection: sqlite3.Connection, path: Path, mint: Callable[[str], str]) -> str:
    """Create the schema in an empty file, refuse a foreign one; the store's id."""
    with closing(connection.cursor()) as cursor:
        cursor.execute("BEGIN IMMEDIATE")
        (version,) = cursor.execute("PRAGMA user_version").fetchone()
        (tables,) = cursor.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        (application,) = cursor.execute("PRAGMA application_id").fetchone()
        if tables == 0:
            for statement in load("schema.sql").split(";\n"):
                cursor.execute(statement)
            cursor.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            cursor.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            cursor.execute("INSERT INTO meta (name, value) VALUES ('store_id', ?)", (mint("store"),))
        elif application != APPLICATION_ID:
            cursor.execute("ROLLBACK")
            raise RunnerError("store_unavailable", f"{path} is a database of another program.")
        elif version != SCHEMA_VERSION:
            cursor.execute("ROLLBACK")
            raise RunnerError(
                "store_unavailable",
                f"{path} has schema version {version}; this runner needs version {SCHEMA_VERSION}.",
            )
        (store_id,) = cursor.execute("SELECT value FROM meta WHERE name = 'store_id'").fetchone()
        cursor.execute("COMMIT")
        return str(store_id)
