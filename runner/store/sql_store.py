"""A store over named SQL statements, whichever database performs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from runner.clock import Clock
from runner.errors import RunnerError
from runner.ids import Key
from runner.rules.feed import Position, Span
from runner.store import rows, upkeep, writes
from runner.store.port import (
    Admission,
    Appended,
    CommandRow,
    EndedTurn,
    Ending,
    Expired,
    FeedRow,
    InteractionRow,
    PromptRow,
    QuarantinedRow,
    RecordKey,
    RecordRow,
    SessionRow,
    TurnRow,
)
from runner.store.writes import Run, Work, many
from runner.terms import CommandState

Row = TypeVar("Row")

DELETIONS: Final = (
    "empty_ended_session",
    "delete_turns",
    "delete_prompts",
    "delete_interactions",
    "delete_records",
    "delete_commands",
    "delete_command_keys",
    "delete_quarantine",
    "delete_feed",
    "delete_pruned",
)


class SqlStore:
    """``Store`` except for opening and closing: says what is written and read, its heirs do it."""

    store_id: str
    _clock: Clock

    async def _write(self, of: Sequence[Key], work: Work[Row], count: int) -> Row:
        """Perform a write in one transaction that no other write of the same sessions runs beside.

        Args:
            of: the (project, session) pairs whose standing the write depends on; empty for one statement that decides
                by itself.
            work: what it does; it may be performed again from the start when nothing of it was written.
            count: how many rows it writes at most.
        """
        raise NotImplementedError

    async def _all(self, name: str, make: Callable[[rows.Parameters], Row], *parameters: Any) -> list[Row]:
        """What a named statement finds, outside of every write."""
        raise NotImplementedError

    async def admit(self, admission: Admission) -> bool:
        turn = admission.turn
        statements = [
            Run("insert_turn", [rows.turn_parameters(turn)]),
            Run("save_session", [rows.session_parameters(admission.session)]),
            *many(admission.records, admission.interactions, (admission.prompt,)),
        ]
        return await self._together([(turn.project, turn.session_id)], statements, guarded=True)

    async def end(self, ending: Ending) -> bool:
        turn = ending.turn
        if turn.outcome is None:
            raise ValueError("an ending has an outcome")
        statements = [
            Run("end_turn", [rows.ending_parameters(turn)]),
            Run("save_session", [rows.session_parameters(ending.session)]),
            *many((), ending.interactions, (ending.prompt, *ending.others)),
        ]
        if ending.commands:
            statements.append(Run("end_command", [rows.settled_parameters(row) for row in ending.commands]))
        work = writes.ending(statements, ending.records, self._clock.now_ms())
        return await self._write([(turn.project, turn.session_id)], work, _rows_of(statements) + len(ending.records))

    async def save_session(self, row: SessionRow) -> None:
        await self._together([(row.project, row.session_id)], [Run("save_session", [rows.session_parameters(row)])])

    async def append(
        self,
        records: Sequence[RecordRow],
        interactions: Sequence[InteractionRow] = (),
        prompts: Sequence[PromptRow] = (),
    ) -> Appended:
        work = writes.appending(records, interactions, prompts, self._clock.now_ms)
        count = len(records) + len(interactions) + len(prompts)
        return await self._write(_keys(records, interactions, prompts), work, count)

    async def write_batch(self, records: Sequence[RecordRow]) -> Appended:
        return await self.append(rows.meant(records))

    async def create_session(self, row: SessionRow, records: Sequence[RecordRow]) -> bool:
        return await self._write([(row.project, row.session_id)], upkeep.creating(row, records), 1 + len(records))

    async def caught_up(self, project: str, session_id: str) -> None:
        """A database has nothing on the way."""

    async def quarantine(self, records: Sequence[RecordRow], reason: str, at: int) -> None:
        aside = [rows.quarantine_parameters(row, reason, at) for row in records]
        await self._together(_keys(records), [Run("set_aside", aside)])

    async def quarantined(self, project: str, limit: int, after: int = 0) -> list[tuple[int, QuarantinedRow]]:
        return await self._all("quarantined", rows.quarantined_row, project, after, rows.bounded(limit))

    async def submit_command(self, row: CommandRow) -> CommandRow:
        return await self._write([(row.project, row.session_id)], writes.submitting(row), 1)

    async def claim_command(
        self, project: str, command_id: str, replica_id: str, now: int, until: int, max_deliveries: int
    ) -> CommandRow | None:
        work = writes.claiming(project, command_id, replica_id, now, until, max_deliveries)
        return await self._write((), work, 1)

    async def settle_command(self, project: str, command_id: str, state: str, outcome: str | None, at: int) -> bool:
        waits = state == CommandState.APPLIED and outcome is None
        late_outcome = state == CommandState.APPLIED and outcome is not None
        parameters = (project, command_id, state, outcome, None if waits else at, late_outcome)
        return await self._together((), [Run("settle_command", [parameters])], guarded=True)

    async def command(self, project: str, command_id: str) -> CommandRow | None:
        return await self._one("command", rows.command_row, project, command_id)

    async def open_commands(self, key: tuple[str, str] | None = None) -> list[CommandRow]:
        if key is None:
            return await self._all("open_commands", rows.command_row)
        return await self._all("session_open_commands", rows.command_row, *key)

    async def answer_interaction(self, row: InteractionRow, expected_status: str) -> bool:
        statements = [Run("answer_interaction", [rows.answer_parameters(row, expected_status)])]
        return await self._together([(row.project, row.session_id)], statements, guarded=True)

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
        of = (project, session_id)
        await self._together([of], [Run(name, [of]) for name in DELETIONS], guarded=True)

    async def feed(self, project: str, after: Position, limit: int) -> list[FeedRow]:
        return await self._all("feed", rows.feed_row, project, *after, rows.bounded(limit))

    async def feed_span(self, project: str) -> Span:
        (span,) = await self._all("feed_span", rows.feed_span, project)
        return span

    async def trim_feed(self, project: str | None, before_ms: int, limit: int) -> int:
        return await self._write((), upkeep.trimming_feed(project, before_ms, rows.bounded(limit)), limit)

    async def expired_records(self, project: str | None, before_ms: int, limit: int) -> list[RecordKey]:
        return await self._all("expired_records", rows.record_key, project, before_ms, rows.bounded(limit))

    async def delete_records(self, keys: Sequence[RecordKey]) -> int:
        return await self._write((), upkeep.pruning(keys), len(keys))

    async def expired_quarantine(self, project: str | None, before_ms: int, limit: int) -> list[RecordKey]:
        return await self._all("expired_quarantine", rows.record_key, project, before_ms, rows.bounded(limit))

    async def delete_quarantined(self, keys: Sequence[RecordKey]) -> int:
        return await self._write((), upkeep.forgetting(keys), len(keys))

    async def count_expired(self, project: str | None, before_ms: int) -> Expired:
        records = await self._all("count_expired_records", rows.counted, project, before_ms)
        return Expired(
            dict(records), dict(await self._all("count_expired_quarantine", rows.counted, project, before_ms))
        )

    async def unstorable(self, project: str, session_id: str) -> list[tuple[int, int]]:
        return await self._all("unstorable", rows.cursor, project, session_id, rows.ROWS_MAX)

    async def pruned_to(self, project: str, session_id: str) -> tuple[int, int] | None:
        return await self._one("pruned_to", rows.cursor, project, session_id)

    async def ended_turns(self, project: str | None, after: tuple[int, str, str], limit: int) -> list[EndedTurn]:
        return await self._all("ended_turns", rows.ended_turn, project, *after, rows.bounded(limit))

    async def add_ending(self, record: RecordRow) -> bool:
        return await self._write([(record.project, record.session_id)], upkeep.telling(record), 1)

    async def ready(self) -> bool:
        try:
            await self._together((), [Run("touch", [(self.store_id,)])])
        except RunnerError:
            return False
        return True

    async def _together(self, of: Sequence[Key], statements: list[Run], *, guarded: bool = False) -> bool:
        return await self._write(of, writes.together(statements, guarded=guarded), _rows_of(statements))

    async def _one(self, name: str, make: Callable[[rows.Parameters], Row], *parameters: Any) -> Row | None:
        found = await self._all(name, make, *parameters)
        return found[0] if found else None


def _rows_of(statements: Sequence[Run]) -> int:
    return sum(len(statement.rows) for statement in statements)


def _keys(*rows_of: Sequence[RecordRow | InteractionRow | PromptRow]) -> list[Key]:
    return list({(row.project, row.session_id) for rows in rows_of for row in rows})
