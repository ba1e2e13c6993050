"""The store port: rows as frozen values, writes as whole transactions (DESIGN 3.9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


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
class Appended:
    """How many records of one write count, and how many were set aside."""

    accepted: int
    quarantined: int = 0


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


class Store(Protocol):
    """Durable: what a finished call wrote survives kill -9 of the process.

    Every method raises ``RunnerError("store_unavailable")`` when the database cannot be used, and ``internal`` for a
    row that it refuses (a cursor that belongs to another record). A cancelled call may or may not have been written;
    it is never half written, and its rows are of one project. Upserts keep what never changes: a session's
    ``created_at`` and, once set, ``ended_at``; what a prompt is besides its ``state``, ``turn_id``
    and ``result``; an interaction's session, kind and ``created_at``.

    Several replicas may use one store. A session row with an older head (epoch, n) than the stored one is a stale
    writer's and changes nothing; so does a stale record of ``append``, which is quarantined.
    """

    store_id: str

    async def admit(self, admission: Admission) -> bool:
        """Insert the turn (and upsert its session and prompt).

        False, and nothing is written, when the session has ended, the turn exists, or the session has another turn of
        its epoch, or a turn or a head of a newer one.
        """
        ...

    async def end(self, ending: Ending) -> bool:
        """Write the ending if the turn has none yet. False when it already ended: then nothing was written.

        A record that is refused is quarantined: it keeps no turn from ending.
        """
        ...

    async def save_session(self, row: SessionRow) -> None:
        """Upsert a session row outside a turn."""
        ...

    async def append(
        self,
        records: Sequence[RecordRow],
        interactions: Sequence[InteractionRow] = (),
        prompts: Sequence[PromptRow] = (),
    ) -> Appended:
        """Write records (a known record id is a no-op), upsert interactions and prompts, in one transaction.

        Late records are quarantined (``rules.late``): their turn has its ending or is unknown, or their epoch is older
        than the session's newest one. When any was, the interactions and prompts are left alone: the writer is stale.
        So it is when it brings an open question that is not stored, of a turn that has ended otherwise than paused or
        that is not the newest; the question counts as quarantined and is kept nowhere.
        """
        ...

    async def quarantine(self, records: Sequence[RecordRow], reason: str, at: int) -> None:
        """Set records aside; one that is stored or set aside already is a no-op."""
        ...

    async def quarantined(self, project: str, limit: int, after: int = 0) -> list[tuple[int, QuarantinedRow]]:
        """What was set aside, oldest first, each with its number, those behind ``after``."""
        ...

    async def submit_command(self, row: CommandRow) -> CommandRow:
        """Insert a command (pending, or claimed by its writer), or return the one that it repeats.

        That is the one of the same id, else the session's one that was ever submitted with this idempotency key, else
        an open one (pending or claimed) of the same kind for the same turn: two simultaneous Stops are one. The caller
        compares ``command_id``. A session keeps its newest settled commands only; older ones are deleted here.
        """
        ...

    async def claim_command(
        self, project: str, command_id: str, replica_id: str, now: int, until: int, max_deliveries: int
    ) -> CommandRow | None:
        """Claim a command that is pending, or whose claim lapsed by ``now``; one more delivery.

        None when it is settled, held by another claim, or was delivered ``max_deliveries`` times.
        """
        ...

    async def settle_command(self, project: str, command_id: str, state: str, outcome: str | None, at: int) -> bool:
        """Compare-and-set of an open command to ``applied`` or ``obsolete``; ``applied`` may get its outcome later.

        An applied command without an outcome takes one; anything else that is settled stays: False. ``finished_at`` is
        when there was an outcome, or nothing to wait for.
        """
        ...

    async def command(self, project: str, command_id: str) -> CommandRow | None:
        """One command, by its id alone."""
        ...

    async def open_commands(self, key: tuple[str, str] | None = None) -> list[CommandRow]:
        """Commands that are not finished, oldest first, of one (project, session) or of all."""
        ...

    async def answer_interaction(self, row: InteractionRow, expected_status: str) -> bool:
        """Compare-and-set of an interaction's status and answer."""
        ...

    async def session(self, project: str, session_id: str) -> SessionRow | None:
        """One session, ended ones too."""
        ...

    async def sessions(self, project: str, limit: int, before: tuple[int, str] | None = None) -> list[SessionRow]:
        """Newest ``updated_at`` first, tie broken by id, at most ``limit`` and never more than 10,000.

        ``before`` is the last row's (updated_at, id).
        """
        ...

    async def prompt(self, project: str, session_id: str, prompt_id: str) -> PromptRow | None:
        """One prompt."""
        ...

    async def waiting_prompts(self, key: tuple[str, str] | None = None) -> list[PromptRow]:
        """Prompts in state ``queued``, by ``seq``, of one (project, session) or of all."""
        ...

    async def context_prompts(self, key: tuple[str, str]) -> list[PromptRow]:
        """What is no prompt but told to the agent with one, delivered or not, by ``seq``; the newest 1,000."""
        ...

    async def turn(self, project: str, session_id: str, turn_id: str) -> TurnRow | None:
        """One turn."""
        ...

    async def last_turn(self, project: str, session_id: str) -> TurnRow | None:
        """The turn with the highest epoch."""
        ...

    async def open_turns(self, key: tuple[str, str] | None = None) -> list[TurnRow]:
        """Turns without an ending, oldest first, of one (project, session) or of every project."""
        ...

    async def paused_turns(self) -> list[TurnRow]:
        """The newest turn of each session that has not ended, where that turn's outcome is ``paused``."""
        ...

    async def records(
        self, project: str, session_id: str, after: tuple[int, int] | None, limit: int
    ) -> list[RecordRow]:
        """Records in cursor order, those behind ``after`` = (epoch, n), at most ``limit`` and 10,000."""
        ...

    async def interactions(
        self, project: str, session_id: str | None = None, status: str | None = None
    ) -> list[InteractionRow]:
        """Interactions in order of creation, the newest 10,000."""
        ...

    async def open_interactions(self, status: str) -> list[InteractionRow]:
        """Interactions of every project in this status: for the boot reconcile."""
        ...

    async def interaction(self, project: str, interaction_id: str) -> InteractionRow | None:
        """One interaction, by its id alone."""
        ...

    async def delete_session_content(self, project: str, session_id: str) -> None:
        """Nothing of an ended session but its row, without config and agent state, stays; others are left alone."""
        ...

    async def ready(self) -> bool:
        """Whether a write would work now."""
        ...

    async def close(self) -> None:
        """Finish queued writes, then close."""
        ...
