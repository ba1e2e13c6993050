"""The store in one SQLite file, for the processes of one machine."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from runner.clock import Clock, SystemClock
from runner.errors import RunnerError
from runner.ids import Ids
from runner.store import rows, sqlite_file, writes
from runner.store.inline import InlineWriter
from runner.store.log import Log
from runner.store.port import (
    Admission,
    Appended,
    CommandRow,
    Ending,
    InteractionRow,
    PromptRow,
    QuarantinedRow,
    RecordRow,
    SessionRow,
    TurnRow,
)
from runner.store.sql import PLACED
from runner.store.threads import Query, Reader, Transaction, Writer, resolve
from runner.store.writes import Statement, Work, many
from runner.terms import CommandState

Row = TypeVar("Row")

INSERT_TURN: Final = PLACED["insert_turn"]
END_TURN: Final = PLACED["end_turn"]
SAVE_SESSION: Final = PLACED["save_session"]
DELETIONS: Final = (
    "empty_ended_session",
    "delete_turns",
    "delete_prompts",
    "delete_interactions",
    "delete_records",
    "delete_commands",
    "delete_command_keys",
    "delete_quarantine",
)


class SqliteStore:
    """``Store`` over SQLite in WAL mode: durable against kill -9, not against a power cut (``synchronous=NORMAL``).

    Make it with ``open`` and use it from that event loop only. Other processes of this machine may have the same file
    open: one writes at a time, the others wait in their threads. ``busy`` counts calls that wait for a thread.
    """

    def __init__(self, store_id: str, connections: Sequence[sqlite3.Connection], clock: Clock) -> None:
        loop = asyncio.get_running_loop()
        write, read, copy, inline = connections
        self.store_id = store_id
        self._clock = clock
        self.busy = 0
        self._loop = loop
        self._connections = connections
        self._reader = Reader("reader", loop, read)
        self._copier = Reader("copier", loop, copy)
        wal = Log(self._copier.run)
        self._writer = Writer(loop, write, wal, sqlite_file.BUSY_SECONDS)
        self._inline = InlineWriter(loop, inline, self._writer, wal)
        self._closed = False
        self._tick: list[Transaction] = []
        for thread in (self._reader, self._copier, self._writer):
            thread.start()

    @classmethod
    async def open(cls, path: Path, mint: Callable[[str], str] | None = None, clock: Clock | None = None) -> Self:
        """Open or create the database; a new one gets mode 0600 and a ``store_id`` from ``mint("store")``.

        A file of an earlier schema version is brought to this one. ``clock`` tells when a late record was set aside.

        Raises:
            RunnerError: ``store_unavailable``: the file cannot be used, or has a newer schema version.
        """
        opened = await asyncio.to_thread(sqlite_file.open_file, path, mint or Ids().mint)
        return cls(*opened, clock or SystemClock())

    async def admit(self, admission: Admission) -> bool:
        statements = [
            (INSERT_TURN, [rows.turn_parameters(admission.turn)]),
            (SAVE_SESSION, [rows.session_parameters(admission.session)]),
            *many(admission.records, admission.interactions, (admission.prompt,)),
        ]
        return await self._write_together(statements, guarded=True)

    async def end(self, ending: Ending) -> bool:
        if ending.turn.outcome is None:
            raise ValueError("an ending has an outcome")
        statements = [
            (END_TURN, [rows.ending_parameters(ending.turn)]),
            (SAVE_SESSION, [rows.session_parameters(ending.session)]),
            *many((), ending.interactions, (ending.prompt, *ending.others)),
        ]
        if ending.commands:
            statements.append((PLACED["end_command"], [rows.settled_parameters(row) for row in ending.commands]))
        work = writes.ending(statements, ending.records, self._clock.now_ms())
        written: bool = await self._write(work, _rows_of(statements) + len(ending.records))
        return written

    async def save_session(self, row: SessionRow) -> None:
        await self._write_together([(SAVE_SESSION, [rows.session_parameters(row)])])

    async def append(
        self,
        records: Sequence[RecordRow],
        interactions: Sequence[InteractionRow] = (),
        prompts: Sequence[PromptRow] = (),
    ) -> Appended:
        work = writes.appending(records, interactions, prompts, self._clock.now_ms)
        appended: Appended = await self._write(work, len(records) + len(interactions) + len(prompts))
        return appended

    async def quarantine(self, records: Sequence[RecordRow], reason: str, at: int) -> None:
        aside = [rows.quarantine_parameters(row, reason, at) for row in records]
        await self._write_together([(PLACED["set_aside"], aside)])

    async def quarantined(self, project: str, limit: int, after: int = 0) -> list[tuple[int, QuarantinedRow]]:
        return await self._all("quarantined", rows.quarantined_row, project, after, rows.bounded(limit))

    async def submit_command(self, row: CommandRow) -> CommandRow:
        stored: CommandRow = await self._write(writes.submitting(row), 1)
        return stored

    async def claim_command(
        self, project: str, command_id: str, replica_id: str, now: int, until: int, max_deliveries: int
    ) -> CommandRow | None:
        work = writes.claiming(project, command_id, replica_id, now, until, max_deliveries)
        claimed: CommandRow | None = await self._write(work, 1)
        return claimed

    async def settle_command(self, project: str, command_id: str, state: str, outcome: str | None, at: int) -> bool:
        waits = state == CommandState.APPLIED and outcome is None
        late_outcome = state == CommandState.APPLIED and outcome is not None
        parameters = (project, command_id, state, outcome, None if waits else at, late_outcome)
        return await self._write_together([(PLACED["settle_command"], [parameters])], guarded=True)

    async def command(self, project: str, command_id: str) -> CommandRow | None:
        return await self._one("command", rows.command_row, project, command_id)

    async def open_commands(self, key: tuple[str, str] | None = None) -> list[CommandRow]:
        if key is None:
            return await self._all("open_commands", rows.command_row)
        return await self._all("session_open_commands", rows.command_row, *key)

    async def answer_interaction(self, row: InteractionRow, expected_status: str) -> bool:
        parameters = rows.answer_parameters(row, expected_status)
        return await self._write_together([(PLACED["answer_interaction"], [parameters])], guarded=True)

    async def session(self, project: str, session_id: str) -> SessionRow | None:
        return await self._one("session", rows.session_row, project, session_id)

    async def sessions(self, project: str, limit: int, before: tuple[int, str] | None = None) -> list[SessionRow]:
        if before is None:
            return await self._all("sessions", rows.session_row, project, rows.bounded(limit))
        return await self._all("sessions_before", rows.session_row, project, rows.bounded(limit), *before)

    async def prompt(self, project: str, session_id: str, prompt_id: str) -> PromptRow | None:
        return await self._one("prompt", rows.prompt_row, project, session_id, prompt_id)

    async def waiting_prompts(self, key: tuple[str, str] | None = None) -> list[PromptRow]:
        if key is None:
            return await self._all("waiting_prompts", rows.prompt_row)
        return await self._all("waiting_prompts_of", rows.prompt_row, *key)

    async def context_prompts(self, key: tuple[str, str]) -> list[PromptRow]:
        newest = await self._all("context_prompts", rows.prompt_row, *key, rows.CONTEXT_MAX)
        return newest[::-1]

    async def turn(self, project: str, session_id: str, turn_id: str) -> TurnRow | None:
        return await self._one("turn", rows.turn_row, project, session_id, turn_id)

    async def last_turn(self, project: str, session_id: str) -> TurnRow | None:
        return await self._one("last_turn", rows.turn_row, project, session_id)

    async def open_turns(self, key: tuple[str, str] | None = None) -> list[TurnRow]:
        if key is None:
            return await self._all("open_turns", rows.turn_row)
        return await self._all("session_open_turns", rows.turn_row, *key)

    async def paused_turns(self) -> list[TurnRow]:
        return await self._all("paused_turns", rows.turn_row)

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
        statements: list[Statement] = [(PLACED[name], [(project, session_id)]) for name in DELETIONS]
        await self._write_together(statements, guarded=True)

    async def ready(self) -> bool:
        try:
            await self._write_together([(PLACED["touch"], [(self.store_id,)])])
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

    async def _write_together(self, statements: list[Statement], *, guarded: bool = False) -> bool:
        work = writes.together(statements, guarded=guarded)
        written: bool = await self._write(work, _rows_of(statements))
        return written

    async def _write(self, work: Work, writes: int) -> Any:
        self._usable()
        future: asyncio.Future[Any] = self._loop.create_future()
        if not self._tick:
            self._loop.call_soon(self._hand_over)
        self._tick.append(Transaction(future, work, writes))
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


def _rows_of(statements: Sequence[Statement]) -> int:
    return sum(len(parameters) for _, parameters in statements)
