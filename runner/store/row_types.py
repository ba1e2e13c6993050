"""Rows of the store as frozen values, and what one transaction writes (DESIGN 3.9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from runner.rules.feed import Position


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A conversation. ``config`` is the last accepted dispatch configuration as JSON, without secret values.

    ``agent_state`` is JSON about the agent session (its id, workspace, whether there is context to lose).
    ``head_epoch`` and ``head_n`` are the newest cursor given out durably. Instants are milliseconds since 1970.
    """

    project: str
    session_id: str
    created_at: int
    updated_at: int
    ended_at: int | None = None
    head_epoch: int = 0
    head_n: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    agent_state: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TurnRow:
    """One execution; ``outcome`` is None until its one ending."""

    project: str
    session_id: str
    turn_id: str
    epoch: int
    replica_id: str
    prompt_id: str | None
    started_at: int
    resumes: str | None = None
    outcome: str | None = None
    stop_reason: str | None = None
    ended_at: int | None = None
    result: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A submitted prompt: ``digest`` of its content tells a retry from a conflict; ``result`` is its last one.

    ``kind`` is ``prompt``, ``context`` (told to the agent with the next prompt) or ``shell`` (a command's output, told
    likewise). ``seq`` orders prompts by their admission; ``options`` is what else its dispatch said, as JSON without
    secret values. ``turn_id`` of a queued prompt is the turn that read it.
    """

    project: str
    session_id: str
    prompt_id: str
    digest: str
    state: str
    turn_id: str | None
    created_at: int
    content: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] | None = None
    kind: str = "prompt"
    seq: int = 0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InteractionRow:
    """A durable question. ``request`` is what the client sees (kind, tool_call, options), ``answer`` the verdict."""

    project: str
    session_id: str
    interaction_id: str
    turn_id: str
    status: str
    kind: str
    created_at: int
    expires_at: int
    request: dict[str, Any] = field(default_factory=dict)
    answer: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class CommandRow:
    """A durable command (DESIGN 3.7), addressed to ``turn_id``, or to whatever is on its way to a turn (None).

    ``kind``, ``state`` and ``outcome`` are values of ``CommandKind``, ``CommandState`` and ``CommandOutcome``.
    ``arrived_at`` and ``claimed_until`` are milliseconds since 1970; ``arguments`` is what else the request said.
    """

    project: str
    session_id: str
    command_id: str
    kind: str
    state: str
    turn_id: str | None
    arrived_at: int
    idempotency_key: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    outcome: str | None = None
    claimed_by: str | None = None
    claimed_until: int | None = None
    deliveries: int = 0
    finished_at: int | None = None


@dataclass(frozen=True, slots=True)
class QuarantinedRow:
    """A record that came too late or cannot be stored: kept, hidden from every read of its session."""

    record: RecordRow
    reason: str
    at: int


@dataclass(frozen=True, slots=True)
class FeedRow:
    """One item of a project's feed: a record of ``rules.feed.FED`` (``epoch``, ``n`` is its cursor), or an end.

    ``session_ended`` has the session's head for a cursor. ``data`` is JSON text ready to be sent.
    """

    project: str
    position: Position
    session_id: str
    turn_id: str | None
    type: str
    epoch: int
    n: int
    data: str
    at: int


@dataclass(frozen=True, slots=True)
class Appended:
    """How many records of one write count, were set aside, or were dropped with their deleted session.

    ``on_the_way``: they are durable, but the database does not have them yet, and was not asked.
    """

    accepted: int
    quarantined: int = 0
    dropped: int = 0
    on_the_way: bool = field(default=False, compare=False)

    def __add__(self, other: Appended) -> Appended:
        return Appended(
            self.accepted + other.accepted,
            self.quarantined + other.quarantined,
            self.dropped + other.dropped,
            self.on_the_way or other.on_the_way,
        )


class RecordRow(NamedTuple):
    """One durable item of history; ``data`` is JSON text ready to be sent. A tuple, for it is made for every event."""

    project: str
    session_id: str
    record_id: str
    turn_id: str | None
    prompt_id: str | None
    epoch: int
    n: int
    type: str
    data: bytes
    at: int

    @property
    def cursor(self) -> tuple[int, int]:
        """(epoch, n)."""
        return self.epoch, self.n


@dataclass(frozen=True, slots=True)
class Admission:
    """One transaction: the session row as it is from now on, the turn, the prompt, closings, first records.

    ``interactions`` are upserted; one that is consumed, cancelled or expired stays as it is (also in an ``Ending``).
    """

    session: SessionRow
    turn: TurnRow
    prompt: PromptRow | None = None
    interactions: Sequence[InteractionRow] = ()
    records: Sequence[RecordRow] = ()


@dataclass(frozen=True, slots=True)
class Ending:
    """One transaction: the turn row's compare-and-set with everything that must be durable with it.

    ``others``: more prompts that ended with this turn (a paused one that it withdrew).
    ``commands``: those that this ending settled, with state, outcome and ``finished_at``, and the turn that one without
    a turn came to mean; one that is settled already stays as it is.
    """

    session: SessionRow
    turn: TurnRow
    prompt: PromptRow | None = None
    interactions: Sequence[InteractionRow] = ()
    records: Sequence[RecordRow] = ()
    others: Sequence[PromptRow] = ()
    commands: Sequence[CommandRow] = ()


class RecordKey(NamedTuple):
    """What a record is known by, stored or set aside."""

    project: str
    record_id: str


class EndedTurn(NamedTuple):
    """A turn that has its ending, and whether its history says so (``told``: the record ``done``, or its retention).

    ``ended_at`` is milliseconds since 1970.
    """

    ended_at: int
    project: str
    turn_id: str
    session_id: str
    told: bool


@dataclass(frozen=True, slots=True)
class Expired:
    """How many rows are old enough to be deleted, by project; a project without any is left out."""

    records: dict[str, int]
    quarantined: dict[str, int]
