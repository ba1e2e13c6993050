"""What can happen to a turn, and what its machine makes the shell do: the events and effects of ``rules.turn``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from runner.errors import RunnerError
from runner.terms import Outcome, StopReason, TurnPhase


@dataclass(frozen=True, slots=True)
class Begin:
    """The turn was admitted and its row is durable."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A sandbox is ready.

    ``resumed``: its agent still has the chain's ``session/prompt`` open; ``loaded``: it goes on with the agent session
    of an earlier process.
    """

    resumed: bool = False
    loaded: bool = False


@dataclass(frozen=True, slots=True)
class PrepareFailed:
    """No sandbox could be made ready."""

    error: RunnerError


@dataclass(frozen=True, slots=True)
class ChainCold:
    """The seat of the chain that is to be resumed is gone: an agent must be started, and nothing is open in it."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Somebody wants the turn to stop; the reason is the abort's label."""

    reason: StopReason
    error: RunnerError | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """The harness answered its open ``session/prompt``; null results have neither member."""

    stop_reason: str | None = None
    error_code: int | None = None
    error_message: str = ""


@dataclass(frozen=True, slots=True)
class AgentGone:
    """The agent exited or its carrier broke."""

    error: RunnerError


@dataclass(frozen=True, slots=True)
class LimitReached:
    """A limit of DESIGN 4.1 ran out."""

    error: RunnerError


@dataclass(frozen=True, slots=True)
class Quiet:
    """Every running tool call waits for an open question and the agent has been silent (DESIGN 3.2, Paused)."""


@dataclass(frozen=True, slots=True)
class CancelUnsent:
    """``session/cancel`` could not be written: the agent's state is unknown."""


@dataclass(frozen=True, slots=True)
class Fired:
    """A timer of this turn ran out."""

    timer: str


@dataclass(frozen=True, slots=True)
class Reaped:
    """The final reap ended; ``survivors`` would not die."""

    survivors: bool


Event = (
    Begin
    | Prepared
    | PrepareFailed
    | ChainCold
    | Stop
    | Answered
    | AgentGone
    | LimitReached
    | Quiet
    | CancelUnsent
    | Fired
    | Reaped
)


LATE: Final = frozenset({Stop, Answered, AgentGone, LimitReached, Fired, CancelUnsent, Reaped})
"""What may still come when a turn has ended: its clients, its agent and its timers know later than it."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """Check out or start a sandbox."""


@dataclass(frozen=True, slots=True)
class AbortPreparation:
    """Give up the start under way; undo it."""


@dataclass(frozen=True, slots=True)
class SendFrame:
    """Write the ``session/prompt`` frame."""


@dataclass(frozen=True, slots=True)
class CancelQuestions:
    """Answer every pending permission with ``cancelled`` and close its interaction."""


@dataclass(frozen=True, slots=True)
class CloseTools:
    """Give every open tool call an ending in our own view."""

    status: str


@dataclass(frozen=True, slots=True)
class SendCancel:
    """Write ``session/cancel``."""


@dataclass(frozen=True, slots=True)
class After:
    """Come back with ``Fired(timer)``; ``seconds`` None means the settle budget."""

    timer: str
    seconds: float | None


@dataclass(frozen=True, slots=True)
class KillTurn:
    """Kill the turn's own processes, not the agent."""


@dataclass(frozen=True, slots=True)
class Reap:
    """The final reap of a stopped turn, at most one second; comes back as ``Reaped``."""


@dataclass(frozen=True, slots=True)
class Again:
    """The resumed agent gave no sign (case M7): kill it, and prepare one without its memory for the same prompt."""


@dataclass(frozen=True, slots=True)
class End:
    """The turn's one ending.

    Attributes:
        outcome: its outcome.
        stop_reason: the agent's own word, ``cancelled`` when we cancelled, ``paused``, None for failures.
        settled: whether the harness answered its open prompt; None when no frame was ever sent.
        late_completion: the answer to our cancel was ``end_turn``.
        error: why it failed.
        label: the abort's reason, None when nobody stopped it.
        survivors: the final reap left somebody.
    """

    outcome: Outcome
    stop_reason: str | None = None
    settled: bool | None = None
    late_completion: bool = False
    error: RunnerError | None = None
    label: StopReason | None = None
    survivors: bool = False


Effect = (
    Prepare
    | AbortPreparation
    | SendFrame
    | CancelQuestions
    | CloseTools
    | SendCancel
    | After
    | KillTurn
    | Reap
    | Again
    | End
)


class Known(NamedTuple):
    """Everything that a turn's next move depends on."""

    phase: TurnPhase
    stop: StopReason | None
    stop_error: str | None
    resumes: bool
    frame_sent: bool
    settled: bool
    late_completion: bool
    output: bool
    denied: bool
    cold: bool
    loaded: bool


Moved = tuple[Event, Known, Known, list[Effect]]
"""A move as it is told: the event, what was known before and after it, and its effects."""


class Teller(Protocol):
    """Where a machine tells its moves."""

    def append(self, move: Moved, /) -> None:
        """Keep one."""
        ...
