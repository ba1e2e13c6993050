"""What a write does inside its transaction, with a cursor in its hand; everything here runs to its end or raises."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from runner.rules.command import OPEN
from runner.rules.interaction import CLOSED
from runner.rules.late import Standing, asked_late, late
from runner.store import rows
from runner.store.faults import translated
from runner.store.port import Appended, CommandRow, InteractionRow, PromptRow, RecordRow
from runner.store.sql import PLACED, Placed
from runner.terms import Outcome

log = logging.getLogger("runner.store")

Statement = tuple[Placed, list[rows.Parameters]]
Work = Callable[[sqlite3.Cursor], Any]

SAVE_PROMPT: Final = PLACED["save_prompt"]
SAVE_INTERACTION: Final = PLACED["save_interaction"]
INSERT_RECORD: Final = PLACED["insert_record"]
SET_ASIDE: Final = PLACED["set_aside"]


def together(statements: Sequence[Statement], *, guarded: bool = False) -> Work:
    """Statements with their rows, in order; the answer is whether they were written.

    ``guarded``: nothing is written when the first one changes no row.
    """
    return partial(_run, statements, guarded)


def appending(
    records: Sequence[RecordRow],
    interactions: Sequence[InteractionRow],
    prompts: Sequence[PromptRow],
    now: Callable[[], int],
) -> Work:
    """``Store.append``: late records are set aside, and then, or behind a late question, only records are written."""

    def work(cursor: sqlite3.Cursor) -> Appended:
        refused, unasked = _late(cursor, records), _asked_late(cursor, interactions)
        if not refused and not unasked:
            _run(many(records, interactions, prompts), False, cursor)
            return Appended(len(records))
        _run(many([row for place, row in enumerate(records) if place not in refused], (), ()), False, cursor)
        at = now()
        aside = [rows.quarantine_parameters(records[place], why, at) for place, why in refused.items()]
        _run([(SET_ASIDE, aside)], False, cursor)
        return Appended(len(records) - len(refused), len(refused) + unasked)

    return work


def ending(guarded: Sequence[Statement], records: Sequence[RecordRow], at: int) -> Work:
    """``Store.end``: the turn's compare-and-set first; a record that is refused is set aside and keeps nobody back."""

    def work(cursor: sqlite3.Cursor) -> bool:
        if not _run(guarded, True, cursor):
            return False
        try:
            _run(many(records, (), ()), False, cursor)
        except Exception as error:
            if translated(error).code == "store_unavailable":
                raise
            for row in records:
                _insert_or_set_aside(cursor, row, at)
        return True

    return work


def submitting(row: CommandRow) -> Work:
    """``Store.submit_command``: the command that is stored now."""

    def work(cursor: sqlite3.Cursor) -> CommandRow:
        found = _repeated(cursor, row)
        of = (row.project, row.session_id)
        if found is None:
            _run([(PLACED["insert_command"], [rows.command_parameters(row)])], False, cursor)
            if _run([(PLACED["drop_commands"], [(*of, rows.COMMANDS_KEPT)])], True, cursor):
                _run([(PLACED["drop_command_keys"], [of])], False, cursor)
        if row.idempotency_key is not None:
            key = (*of, row.idempotency_key, (found or row).command_id)
            _run([(PLACED["insert_command_key"], [key])], False, cursor)
        return found or row

    return work


def claiming(project: str, command_id: str, replica_id: str, now: int, until: int, max_deliveries: int) -> Work:
    """``Store.claim_command``: the claimed command, or None."""

    def work(cursor: sqlite3.Cursor) -> CommandRow | None:
        parameters = (project, command_id, replica_id, now, until, max_deliveries)
        if not _run([(PLACED["claim_command"], [parameters])], True, cursor):
            return None
        return _command(cursor, "command", project, command_id)

    return work


def many(
    records: Sequence[RecordRow], interactions: Sequence[InteractionRow], prompts: Sequence[PromptRow | None]
) -> list[Statement]:
    """Upserts of prompts and interactions, inserts of records; nothing for what is empty."""
    statements: list[Statement] = []
    known = [rows.prompt_parameters(row) for row in prompts if row is not None]
    if known:
        statements.append((SAVE_PROMPT, known))
    if interactions:
        statements.append((SAVE_INTERACTION, [rows.interaction_parameters(row) for row in interactions]))
    if records:
        statements.append((INSERT_RECORD, [rows.record_parameters(row) for row in records]))
    return statements


def _run(statements: Sequence[Statement], guarded: bool, cursor: sqlite3.Cursor) -> bool:
    for statement, parameters in statements:
        if len(parameters) == 1:
            cursor.execute(statement.text, statement.place(parameters[0]))
        else:
            cursor.executemany(statement.text, [statement.place(row) for row in parameters])
        if guarded and cursor.rowcount == 0:
            return False
        guarded = False
    return True


def _insert_or_set_aside(cursor: sqlite3.Cursor, row: RecordRow, at: int) -> None:
    for place in (INSERT_RECORD, SET_ASIDE):
        parameters = row if place is INSERT_RECORD else rows.quarantine_parameters(row, rows.REFUSED, at)
        try:
            _run([(place, [parameters])], False, cursor)
            return
        except Exception as error:
            if translated(error).code == "store_unavailable":
                raise
            log.error("record %s (%s) of session %s is refused: %s", row.record_id, row.type, row.session_id, error)


def _late(cursor: sqlite3.Cursor, records: Sequence[RecordRow]) -> dict[int, str]:
    """Places of the records that do not count, with the reason; one that is stored already counts."""
    standings: dict[tuple[str, str, str | None], tuple[int, int, Standing | None]] = {}
    refused: dict[int, str] = {}
    for place, row in enumerate(records):
        of = (row.project, row.session_id, row.turn_id)
        if of not in standings:
            standings[of] = _standing(cursor, *of)
        newest, head, turn = standings[of]
        why = late(row.turn_id, row.epoch, turn, newest, head)
        if why is not None and not _rows(cursor, "record_exists", row.project, row.record_id):
            refused[place] = why
    return refused


def _asked_late(cursor: sqlite3.Cursor, interactions: Sequence[InteractionRow]) -> int:
    """How many open questions are new and of a turn that may not ask any more."""
    found = 0
    for row in interactions:
        if row.status not in CLOSED:
            newest, _, turn = _standing(cursor, row.project, row.session_id, row.turn_id)
            if asked_late(turn, newest) and not _rows(cursor, "interaction", row.project, row.interaction_id):
                found += 1
    return found


def _standing(
    cursor: sqlite3.Cursor, project: str, session_id: str, turn_id: str | None
) -> tuple[int, int, Standing | None]:
    """The epochs of the session's newest turn and of its head, and how the turn stands."""
    ((newest, head, epoch, outcome),) = _rows(cursor, "standing", project, session_id, turn_id)
    turn = Standing(epoch, outcome is not None, outcome == Outcome.PAUSED) if epoch is not None else None
    return newest or 0, head or 0, turn


def _repeated(cursor: sqlite3.Cursor, row: CommandRow) -> CommandRow | None:
    """The stored command that one repeats: by its id, by its key, or an open one for the same."""
    found = _command(cursor, "command", row.project, row.command_id)
    if found is None and row.idempotency_key is not None:
        found = _command(cursor, "command_of_key", row.project, row.session_id, row.idempotency_key)
    if found is None and row.state in OPEN:
        found = _command(cursor, "same_command", row.project, row.session_id, row.kind, row.turn_id)
    return found


def _command(cursor: sqlite3.Cursor, name: str, *parameters: Any) -> CommandRow | None:
    found = _rows(cursor, name, *parameters)
    return rows.command_row(found[0]) if found else None


def _rows(cursor: sqlite3.Cursor, name: str, *parameters: Any) -> list[Any]:
    statement = PLACED[name]
    return cursor.execute(statement.text, statement.place(parameters)).fetchall()
