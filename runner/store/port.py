"""The store port: writes as whole transactions (DESIGN 3.9)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from runner.rules.feed import Position, Span
from runner.store.row_types import (
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

__all__ = [
    "Admission",
    "Appended",
    "CommandRow",
    "EndedTurn",
    "Ending",
    "Expired",
    "FeedRow",
    "InteractionRow",
    "PromptRow",
    "QuarantinedRow",
    "RecordKey",
    "RecordRow",
    "SessionRow",
    "Store",
    "TurnRow",
]


class Store(Protocol):
    """Durable: what a finished call wrote survives kill -9 of the process.

    Every method raises ``RunnerError("store_unavailable")`` when the database cannot be used, and ``internal`` for a
    row that it refuses (a cursor that belongs to another record). A cancelled call may or may not have been written;
    it is never half written, and its rows are of one project. Upserts keep what never changes: a session's
    ``created_at`` and, once set, ``ended_at``; what a prompt is besides its ``state``, ``turn_id``
    and ``result``; an interaction's session, kind and ``created_at``.

    Several replicas may use one store. A session row with an older head (epoch, n) than the stored one is a stale
    writer's and changes nothing; so does a stale record of ``append``, which is quarantined. A parameter
    ``project: str | None`` means every project where it is None.
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
        """Upsert a session row outside a turn; one that has ended stays as it is."""
        ...

    async def append(
        self,
        records: Sequence[RecordRow],
        interactions: Sequence[InteractionRow] = (),
        prompts: Sequence[PromptRow] = (),
    ) -> Appended:
        """Write records (a known record id is a no-op), upsert interactions and prompts, in one transaction.

        Late records are quarantined (``rules.late``): their turn has its ending or is unknown, or their epoch is older
        than the session's newest one; those of a session that was deleted are dropped and counted. When any was late,
        or what comes without a record is of a deleted session, the interactions and prompts are left alone: the writer
        is stale. So it is when it brings an open question that
        is not stored, of a turn that is unknown, has ended otherwise than paused or is not the newest; the question
        counts as quarantined and is kept nowhere.
        """
        ...

    async def write_batch(self, records: Sequence[RecordRow]) -> Appended:
        """``append`` for records of any number of sessions and projects, in one transaction.

        Of several with one record id, the one with the highest cursor is meant, among equals the last one. Over HTTP
        it is one transaction for each project and each request.
        """
        ...

    async def create_session(self, row: SessionRow, records: Sequence[RecordRow]) -> bool:
        """Insert a session with a history, in one transaction; False, and nothing is written, when it exists.

        Nobody writes it yet, so its records are not judged. ``too_large`` over HTTP when one request cannot carry it.
        """
        ...

    async def caught_up(self, project: str, session_id: str) -> None:
        """Have the store know all that any replica handed over for a session on its way here (a stream, a spool).

        Returns:
            Once that is so. A database itself has nothing on the way.

        Raises:
            RunnerError: ``store_unavailable``: some of it is on its way still, or nobody can say.
        """
        ...

    async def quarantine(self, records: Sequence[RecordRow], reason: str, at: int) -> None:
        """Set records aside; one that is stored or set aside already is a no-op, so is one of a deleted session."""
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

    async def feed(self, project: str, after: Position, limit: int) -> list[FeedRow]:
        """Items of a project's feed behind a position, in the order in which they became visible, at most 10,000.

        Whoever goes on behind the last one it got misses none: a transaction that commits later has a later position.
        An item is written with its record, or with the session's end, in one transaction.
        """
        ...

    async def feed_span(self, project: str) -> Span:
        """What there is of a project's feed; its end never goes back."""
        ...

    async def trim_feed(self, project: str | None, before_ms: int, limit: int) -> int:
        """Remove the oldest items before a cutoff, at most ``limit``, raising their feeds' floors; how many it were."""
        ...

    async def expired_records(self, project: str | None, before_ms: int, limit: int) -> list[RecordKey]:
        """Records that retention may delete (``rules.retention``), oldest first, at most ``limit`` and 10,000.

        They are older than ``before_ms``, their turn ended before it, and their prompt does not go on.
        """
        ...

    async def delete_records(self, keys: Sequence[RecordKey]) -> int:
        """Delete records, in one transaction, and note how far their sessions' histories are gone; how many it were.

        The session's head stays at or behind what was deleted: no cursor is given out again.
        """
        ...

    async def expired_quarantine(self, project: str | None, before_ms: int, limit: int) -> list[RecordKey]:
        """What was set aside before ``before_ms``, oldest first, at most ``limit`` and 10,000."""
        ...

    async def delete_quarantined(self, keys: Sequence[RecordKey]) -> int:
        """Delete what was set aside, in one transaction; how many it were."""
        ...

    async def count_expired(self, project: str | None, before_ms: int) -> Expired:
        """How much ``expired_records`` and ``expired_quarantine`` would give without a limit."""
        ...

    async def pruned_to(self, project: str, session_id: str) -> tuple[int, int] | None:
        """The newest cursor (epoch, n) that retention deleted of a session; None: its history is whole.

        Everything behind it is there. A reader asks once it has read: what it had not read may be gone meanwhile.
        """
        ...

    async def unstorable(self, project: str, session_id: str) -> list[tuple[int, int]]:
        """Cursors of records that were set aside because no table could take them, in order, at most 10,000.

        They belong to the session's history, which is not whole without them; what came too late does not.
        """
        ...

    async def ended_turns(self, project: str | None, after: tuple[int, str, str], limit: int) -> list[EndedTurn]:
        """Turns with an ending in the order of (ended_at, project, turn_id), behind ``after``, at most ``limit``."""
        ...

    async def add_ending(self, record: RecordRow) -> bool:
        """Write the record ``done`` of an ended turn that lacks one, and move the session's head to its cursor.

        False, and nothing is written, when the turn has such a record, has no ending, or is unknown, or when the
        record's epoch is older than the session's newest one.
        """
        ...

    async def ready(self) -> bool:
        """Whether a write would work now."""
        ...

    async def close(self) -> None:
        """Finish queued writes, then close."""
        ...
