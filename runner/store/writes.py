"""What a write does inside its transaction, without a database in its hand: each is a generator of steps.

A backend performs the steps in one transaction and sends each one's answer back: SQLite on a cursor (``cursor.py``),
PostgreSQL on a connection (``postgres``). A generator that is left behind by an error wrote nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from runner.errors import RunnerError
from runner.rules.command import OPEN
from runner.rules.interaction import CLOSED
from runner.rules.late import Late, Standing, asked_late, late
from runner.store import rows
from runner.store.port import Appended, CommandRow, InteractionRow, PromptRow, RecordRow
from runner.terms import Outcome

log = logging.getLogger("runner.store")


class Run(NamedTuple):
    """Write these rows with a named statement. Answer: how many rows one row of parameters changed."""

    statement: str
    rows: list[rows.Parameters]


class Ask(NamedTuple):
    """Answer: the rows that a named statement finds."""

    statement: str
    parameters: rows.Parameters


class AskAll(NamedTuple):
    """Answer: for each of these parameters, in order, the rows that a named statement finds."""

    statement: str
    each: Sequence[rows.Parameters]


class Attempt(NamedTuple):
    """Like ``Run``, but a row that is refused spoils nothing. Answer: the refusal, or None.

    Of rows that came before the refused one some may be written.
    """

    statement: str
    rows: list[rows.Parameters]


T = TypeVar("T")
Step = Run | Ask | AskAll | Attempt
Steps = Generator[Step, Any, T]
Work = Callable[[], Steps[T]]

Standings = tuple[int, int, Standing | None, bool]
"""The epochs of a session's newest turn and of its head, how a turn stands, whether the session has ended."""

SAVE_PROMPT: Final = "save_prompt"
SAVE_INTERACTION: Final = "save_interaction"
INSERT_RECORD: Final = "insert_record"
SET_ASIDE: Final = "set_aside"


def together(statements: Sequence[Run], *, guarded: bool = False) -> Work[bool]:
    """Statements with their rows, in order; the answer is whether they were written.

    ``guarded``: nothing is written when the first one, of one row, changes none.
    """
    return partial(_together, statements, guarded=guarded)


def appending(
    records: Sequence[RecordRow],
    interactions: Sequence[InteractionRow],
    prompts: Sequence[PromptRow],
    now: Callable[[], int],
) -> Work[Appended]:
    """``Store.append``: late records are set aside, and then, or behind a late question, only records are written."""

    def work() -> Steps[Appended]:
        refused = yield from _late(records)
        unasked = yield from _asked_late(interactions)
        gone = yield from _of_deleted(records, [*interactions, *prompts])
        if not refused and not unasked and not gone:
            yield from _together(many(records, interactions, prompts))
            return Appended(len(records))
        fresh = [row for place, row in enumerate(records) if place not in refused]
        yield from _together(many(fresh, (), ()))
        at, dropped = now(), gone + sum(why is Late.SESSION_DELETED for why in refused.values())
        aside = [
            rows.quarantine_parameters(records[place], why, at)
            for place, why in refused.items()
            if why is not Late.SESSION_DELETED
        ]
        if aside:
            yield Run(SET_ASIDE, aside)
        return Appended(len(fresh), len(aside) + unasked, dropped)

    return work


def ending(guarded: Sequence[Run], records: Sequence[RecordRow], at: int) -> Work[bool]:
    """``Store.end``: the turn's compare-and-set first; a record that is refused is set aside and keeps nobody back."""

    def work() -> Steps[bool]:
        written = yield from _together(guarded, guarded=True)
        if written and records and (yield Attempt(INSERT_RECORD, list(records))) is not None:
            yield from _insert_or_set_aside(records, at)
        return written

    return work


def submitting(row: CommandRow) -> Work[CommandRow]:
    """``Store.submit_command``: the command that is stored now."""

    def work() -> Steps[CommandRow]:
        found = yield from _repeated(row)
        of = (row.project, row.session_id)
        if found is None:
            yield Run("insert_command", [rows.command_parameters(row)])
            if (yield Run("drop_commands", [(*of, rows.COMMANDS_KEPT)])):
                yield Run("drop_command_keys", [of])
        if row.idempotency_key is not None:
            key = (*of, row.idempotency_key, (found or row).command_id)
            yield Run("insert_command_key", [key])
        return found or row

    return work


def claiming(
    project: str, command_id: str, replica_id: str, now: int, until: int, max_deliveries: int
) -> Work[CommandRow | None]:
    """``Store.claim_command``: the claimed command, or None."""

    def work() -> Steps[CommandRow | None]:
        parameters = (project, command_id, replica_id, now, until, max_deliveries)
        if not (yield Run("claim_command", [parameters])):
            return None
        return (yield from _command("command", project, command_id))

    return work


def many(
    records: Sequence[RecordRow], interactions: Sequence[InteractionRow], prompts: Sequence[PromptRow | None]
) -> list[Run]:
    """Upserts of prompts and interactions, inserts of records; nothing for what is empty."""
    statements: list[Run] = []
    known = [rows.prompt_parameters(row) for row in prompts if row is not None]
    if known:
        statements.append(Run(SAVE_PROMPT, known))
    if interactions:
        statements.append(Run(SAVE_INTERACTION, [rows.interaction_parameters(row) for row in interactions]))
    if records:
        statements.append(Run(INSERT_RECORD, list(records)))
    return statements


def _together(statements: Sequence[Run], *, guarded: bool = False) -> Steps[bool]:
    for statement in statements:
        changed = yield statement
        if guarded and not changed:
            return False
        guarded = False
    return True


def _insert_or_set_aside(records: Sequence[RecordRow], at: int) -> Steps[None]:
    """Row by row; what is refused goes last, for a record that is stored after all is not set aside."""
    refused = []
    for row in records:
        if (yield from _refused(row, INSERT_RECORD, row)):
            refused.append(row)
    for row in refused:
        yield from _refused(row, SET_ASIDE, rows.quarantine_parameters(row, rows.REFUSED, at))


def _refused(row: RecordRow, statement: str, parameters: rows.Parameters) -> Steps[bool]:
    error: RunnerError | None = yield Attempt(statement, [parameters])
    if error is not None:
        log.error("record %s (%s) of session %s: %s", row.record_id, row.type, row.session_id, error.message)
    return error is not None


def _late(records: Sequence[RecordRow]) -> Steps[dict[int, Late]]:
    """Places of the records that do not count, with the reason; one that is stored already counts."""
    turns = list({(row.project, row.session_id, row.turn_id): None for row in records})
    found = yield AskAll("standing", turns)
    standings = {of: _standing(*answer[0]) for of, answer in zip(turns, found, strict=True)}
    refused: dict[int, Late] = {}
    for place, row in enumerate(records):
        newest, head, turn, ended = standings[row.project, row.session_id, row.turn_id]
        why = late(row.turn_id, row.epoch, turn, newest, head, ended=ended)
        if why is not None:
            refused[place] = why
    if refused:
        known = yield AskAll("record_exists", [(records[place].project, records[place].record_id) for place in refused])
        refused = {place: why for (place, why), stored in zip(refused.items(), known, strict=True) if not stored}
    return refused


def _asked_late(interactions: Sequence[InteractionRow]) -> Steps[int]:
    """How many open questions are new and of a turn that may not ask any more."""
    found = 0
    for row in interactions:
        if row.status not in CLOSED:
            newest, _, turn, _ = yield from standing(row.project, row.session_id, row.turn_id)
            if asked_late(turn, newest) and not (yield Ask("interaction", (row.project, row.interaction_id))):
                found += 1
    return found


def _of_deleted(records: Sequence[RecordRow], others: Sequence[InteractionRow | PromptRow]) -> Steps[int]:
    """How many rows are of sessions that were deleted; of those with records, that is known by these."""
    keys = {(row.project, row.session_id) for row in others} - {(row.project, row.session_id) for row in records}
    deleted = set()
    for key in sorted(keys):
        newest, _, _, ended = yield from standing(*key, None)
        if ended and newest == 0:
            deleted.add(key)
    return sum((row.project, row.session_id) in deleted for row in others)


def standing(project: str, session_id: str, turn_id: str | None) -> Steps[Standings]:
    """How a session and one of its turns stand."""
    (answer,) = yield Ask("standing", (project, session_id, turn_id))
    return _standing(*answer)


def _standing(
    newest: int | None, head: int | None, epoch: int | None, outcome: str | None, ended_at: int | None
) -> Standings:
    turn = Standing(epoch, outcome is not None, outcome == Outcome.PAUSED) if epoch is not None else None
    return newest or 0, head or 0, turn, ended_at is not None


def _repeated(row: CommandRow) -> Steps[CommandRow | None]:
    """The stored command that one repeats: by its id, by its key, or an open one for the same."""
    found = yield from _command("command", row.project, row.command_id)
    if found is None and row.idempotency_key is not None:
        found = yield from _command("command_of_key", row.project, row.session_id, row.idempotency_key)
    if found is None and row.state in OPEN:
        found = yield from _command("same_command", row.project, row.session_id, row.kind, row.turn_id)
    return found


def _command(name: str, *parameters: Any) -> Steps[CommandRow | None]:
    found = yield Ask(name, parameters)
    return rows.command_row(found[0]) if found else None
