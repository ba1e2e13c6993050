"""Commands: their states, which turn one means, what it came to, and who has to see to an open one (DESIGN 3.7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from runner.terms import CommandKind, CommandOutcome, CommandState, Outcome, StopReason

CLAIM_MS: Final = 15_000
DELIVERIES: Final = 3
SWEEP_SECONDS: Final = 5.0

OPEN: Final = frozenset({CommandState.PENDING, CommandState.CLAIMED})
MOVES: Final[dict[CommandState, frozenset[CommandState]]] = {
    CommandState.PENDING: frozenset({CommandState.CLAIMED, CommandState.APPLIED, CommandState.OBSOLETE}),
    CommandState.CLAIMED: frozenset({CommandState.CLAIMED, CommandState.APPLIED, CommandState.OBSOLETE}),
    CommandState.APPLIED: frozenset(),
    CommandState.OBSOLETE: frozenset(),
}
REASONS: Final[dict[CommandKind, StopReason]] = {
    CommandKind.CANCEL: StopReason.CANCEL,
    CommandKind.STEER: StopReason.STEER,
    CommandKind.KILL: StopReason.KILL,
    CommandKind.ABORT_PROMPT: StopReason.ABORT_PROMPT,
}
"""The label that a command gives to the turn it stops: the kinds stay distinct all the way (DESIGN 3.4)."""


@dataclass(frozen=True, slots=True)
class Execution:
    """A turn that a command may mean; ``started_at`` is on the clock that the command's arrival is read on."""

    turn_id: str
    started_at: float


@dataclass(frozen=True, slots=True)
class Apply:
    """Stop exactly these; more than one only while none of them is admitted."""

    turn_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NotRunning:
    """There is nothing to stop."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Another execution is current: nothing is stopped and nothing is written (409 ``execution_mismatch``)."""

    current: str | None


Target = Apply | NotRunning | Mismatch


def target(
    kind: CommandKind,
    expected: str | None,
    current: Execution | None,
    starting: Sequence[Execution],
    arrived_at: float,
    *,
    ended: bool = False,
) -> Target:
    """Which turn a command means.

    Args:
        kind: a kill means everything that is there, anything else the current turn, else what is on its way.
        expected: the turn that the client named; None lets the arrival guard decide.
        current: the running turn, else the paused one.
        starting: turns that are not admitted yet.
        arrived_at: when the request arrived; a turn that started later was never meant.
        ended: ``expected`` is known to have ended.
    """
    if expected is not None:
        if expected in {run.turn_id for run in (*starting, *([current] if current is not None else ()))}:
            return Apply((expected,))
        return NotRunning() if current is None and ended else Mismatch(current.turn_id if current else None)
    there = [current] if current is not None else []
    if current is None or kind is CommandKind.KILL:
        there += starting
    if not there:
        return NotRunning()
    meant = tuple(run.turn_id for run in there if run.started_at <= arrived_at)
    return Apply(meant) if meant else Mismatch(there[0].turn_id)


def settled(outcome: Outcome, error_code: str | None) -> tuple[CommandState, CommandOutcome]:
    """What a command came to by the ending of its turn; one that came too late is ``not_running`` (case A15)."""
    if outcome is Outcome.CANCELLED:
        return CommandState.APPLIED, CommandOutcome.STOPPED
    if outcome is Outcome.LOST:
        return CommandState.OBSOLETE, CommandOutcome.LOST
    if error_code == "superseded":
        return CommandState.OBSOLETE, CommandOutcome.SUPERSEDED
    return CommandState.OBSOLETE, CommandOutcome.NOT_RUNNING


@dataclass(frozen=True, slots=True)
class Leave:
    """Somebody sees to it."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand it to whoever holds the session, else apply it here."""


@dataclass(frozen=True, slots=True)
class Settle:
    """Nobody will apply it any more."""

    state: CommandState
    outcome: CommandOutcome


Care = Leave | Deliver | Settle


@dataclass(frozen=True, slots=True)
class Found:
    """An open command as a sweep finds it.

    Attributes:
        age_ms: since it arrived.
        claim_ms: how long its claim still lasts, 0 and less when it lapsed or there is none.
        claimed_by, holder: the replica that claimed it, and the one that holds its session now.
        turn_open: the turn that it names has no ending.
        turn_outcome: how that turn ended, with the code of its error; None where it did not, or is not known.
    """

    state: CommandState
    deliveries: int
    age_ms: int
    claim_ms: int
    claimed_by: str | None
    holder: str | None
    turn_open: bool
    turn_outcome: Outcome | None = None
    turn_error: str | None = None


def care(found: Found) -> Care:
    """What a sweep does about an open command (DESIGN 3.7): three deliveries, each claim 15 s (case M9).

    A paused turn has its ending, yet its chain can still be stopped.
    """
    if found.turn_outcome is not None and found.turn_outcome is not Outcome.PAUSED:
        return Settle(*settled(found.turn_outcome, found.turn_error))
    if found.state is CommandState.CLAIMED and found.claim_ms > 0:
        return Leave()
    if found.state is CommandState.APPLIED:
        gone = found.holder is None or found.holder != found.claimed_by
        return Settle(CommandState.APPLIED, CommandOutcome.NOT_RUNNING) if gone and not found.turn_open else Leave()
    if found.deliveries >= DELIVERIES:
        return Settle(CommandState.OBSOLETE, CommandOutcome.FAILED)
    if found.holder is not None or found.turn_outcome is Outcome.PAUSED:
        return Deliver()
    if found.turn_open or found.age_ms < SWEEP_SECONDS * 1000:
        return Leave()
    return Settle(CommandState.OBSOLETE, CommandOutcome.NOT_RUNNING)
