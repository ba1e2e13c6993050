"""Rows of the port as SQL parameters and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar

import orjson

from runner.rules.feed import Span
from runner.store.port import (
    CommandRow,
    EndedTurn,
    FeedRow,
    InteractionRow,
    PromptRow,
    QuarantinedRow,
    RecordKey,
    RecordRow,
    SessionRow,
    TurnRow,
)
from runner.wire.codec import storable_json

Parameters = tuple[Any, ...]
Keyed = TypeVar("Keyed", RecordRow, RecordKey)

ROWS_MAX: Final = 10_000
CONTEXT_MAX: Final = 1_000
COMMANDS_KEPT: Final = 256
"""Settled commands that a session keeps; older ones are deleted when it gets another."""

REFUSED: Final = "refused"
"""Why a record was set aside that no table can hold, or whose cursor belongs to another record."""
UNDELIVERABLE: Final = "undeliverable"
"""Why one was set aside that a stream gave up on."""
UNSTORABLE: Final = (REFUSED, UNDELIVERABLE)


def bounded(limit: int) -> int:
    """A limit that a reader may ask for: 0 to ``ROWS_MAX``."""
    return max(0, min(limit, ROWS_MAX))


def meant(records: Sequence[RecordRow]) -> list[RecordRow]:
    """A batch without repetitions: of one record id the highest cursor counts, among equals the last (case G2)."""
    found: dict[tuple[str, str], RecordRow] = {}
    for row in records:
        known = found.get((row.project, row.record_id))
        if known is None or row.cursor >= known.cursor:
            found[row.project, row.record_id] = row
    return list(found.values())


def by_project(keyed: Iterable[Keyed]) -> dict[str, list[Keyed]]:
    """What rows or keys of several projects mean for each of them, in their order."""
    found: dict[str, list[Keyed]] = {}
    for row in keyed:
        found.setdefault(row.project, []).append(row)
    return found


def _text(value: Any) -> str:
    return storable_json(value).decode()


def _text_or_null(value: Any) -> str | None:
    return None if value is None else _text(value)


def _value(text: str | None) -> Any:
    return None if text is None else orjson.loads(text)


def session_parameters(row: SessionRow) -> Parameters:
    """Parameters of ``save_session``."""
    return (
        row.project,
        row.session_id,
        row.created_at,
        row.updated_at,
        row.ended_at,
        row.head_epoch,
        row.head_n,
        _text(row.config),
        _text(row.agent_state),
        _text(row.usage),
    )


def session_row(columns: Parameters) -> SessionRow:
    """A row of ``session`` or ``sessions``."""
    return SessionRow(*(*columns[:-3], _value(columns[-3]), _value(columns[-2]), _value(columns[-1])))


def turn_parameters(row: TurnRow) -> Parameters:
    """Parameters of ``insert_turn``."""
    return (
        row.project,
        row.session_id,
        row.turn_id,
        row.epoch,
        row.replica_id,
        row.prompt_id,
        row.started_at,
        row.resumes,
        row.outcome,
        row.stop_reason,
        row.ended_at,
        _text_or_null(row.result),
    )


def ending_parameters(row: TurnRow) -> Parameters:
    """Parameters of ``end_turn``."""
    return (
        row.project,
        row.session_id,
        row.epoch,
        row.turn_id,
        row.outcome,
        row.stop_reason,
        row.ended_at,
        _text_or_null(row.result),
    )


def turn_row(columns: Parameters) -> TurnRow:
    """A row of ``turn``, ``last_turn`` or ``open_turns``."""
    return TurnRow(*(*columns[:-1], _value(columns[-1])))


def prompt_parameters(row: PromptRow) -> Parameters:
    """Parameters of ``save_prompt``."""
    return (
        row.project,
        row.session_id,
        row.prompt_id,
        row.digest,
        row.state,
        row.turn_id,
        row.created_at,
        _text(row.content),
        _text_or_null(row.result),
        row.kind,
        row.seq,
        _text(row.options),
    )


def prompt_row(columns: Parameters) -> PromptRow:
    """A row of ``prompt``, ``waiting_prompts`` or ``context_prompts``."""
    content, result, kind, seq, options = columns[-5:]
    return PromptRow(*(*columns[:-5], _value(content), _value(result), kind, seq, _value(options)))


def interaction_parameters(row: InteractionRow) -> Parameters:
    """Parameters of ``save_interaction``."""
    return (
        row.project,
        row.session_id,
        row.interaction_id,
        row.turn_id,
        row.status,
        row.kind,
        row.created_at,
        row.expires_at,
        _text(row.request),
        _text_or_null(row.answer),
    )


def answer_parameters(row: InteractionRow, expected_status: str) -> Parameters:
    """Parameters of ``answer_interaction``."""
    return (row.project, row.interaction_id, expected_status, row.status, _text_or_null(row.answer))


def interaction_row(columns: Parameters) -> InteractionRow:
    """A row of ``interaction`` or ``interactions``."""
    return InteractionRow(*(*columns[:-2], _value(columns[-2]), _value(columns[-1])))


def record_row(columns: Parameters) -> RecordRow:
    """A row of ``records``; it is itself what ``insert_record`` takes."""
    return RecordRow(*columns)


def command_parameters(row: CommandRow) -> Parameters:
    """Parameters of ``insert_command``."""
    return (
        row.project,
        row.session_id,
        row.command_id,
        row.kind,
        row.state,
        row.turn_id,
        row.arrived_at,
        row.idempotency_key,
        _text(row.arguments),
        row.outcome,
        row.claimed_by,
        row.claimed_until,
        row.deliveries,
        row.finished_at,
    )


def settled_parameters(row: CommandRow) -> Parameters:
    """Parameters of ``end_command``."""
    return row.project, row.command_id, row.state, row.outcome, row.finished_at, row.turn_id


def command_row(columns: Parameters) -> CommandRow:
    """A row of ``command`` or ``open_commands``."""
    return CommandRow(*(*columns[:8], _value(columns[8]), *columns[9:]))


def quarantine_parameters(row: RecordRow, reason: str, at: int) -> Parameters:
    """Parameters of ``set_aside``."""
    return (*row, reason, at)


def quarantined_row(columns: Parameters) -> tuple[int, QuarantinedRow]:
    """A row of ``quarantined``: its number, and what was set aside."""
    return columns[0], QuarantinedRow(RecordRow(*columns[1:-2]), *columns[-2:])


def record_key(columns: Parameters) -> RecordKey:
    """A row of ``expired_records`` or ``expired_quarantine``."""
    return RecordKey(*columns)


def ended_turn(columns: Parameters) -> EndedTurn:
    """A row of ``ended_turns``."""
    ended_at, project, turn_id, session_id, told = columns
    return EndedTurn(ended_at, project, turn_id, session_id, bool(told))


def counted(columns: Parameters) -> tuple[str, int]:
    """A project and its number of rows."""
    return columns[0], columns[1]


def cursor(columns: Parameters) -> tuple[int, int]:
    """A cursor, as epoch and n."""
    return columns[0], columns[1]


def feed_row(columns: Parameters) -> FeedRow:
    """A row of ``feed``."""
    project, first, second, *rest = columns
    return FeedRow(project, (first, second), *rest)


def feed_span(columns: Parameters) -> Span:
    """A row of ``feed_span``."""
    return Span((columns[0], columns[1]), (columns[2], columns[3]))
