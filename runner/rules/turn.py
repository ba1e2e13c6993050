"""One turn's state machine: which event is legal in which phase, and what it makes the shell do (DESIGN 3.2, 3.3).

``step(turn, event)`` returns effects in the order in which they must be performed. The shell owns timers: an
``After`` effect comes back as ``Fired`` with the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from runner.errors import RunnerError
from runner.terms import Outcome, StopReason, TurnPhase

CANCEL_REPEAT_SECONDS: Final = 1.0
KILL_TOOLS_SECONDS: Final = 2.0
AUTH_REQUIRED: Final = -32000


class IllegalMove(Exception):
    """An event that cannot happen in this phase; the turn was not changed."""


@dataclass(frozen=True, slots=True)
class Begin:
    """The turn was admitted and its row is durable."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A sandbox is ready; ``resumed``: its agent still has the chain's ``session/prompt`` open."""

    resumed: bool = False


@dataclass(frozen=True, slots=True)
class PrepareFailed:
    """No sandbox could be made ready."""

    error: RunnerError


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
    | Stop
    | Answered
    | AgentGone
    | LimitReached
    | Quiet
    | CancelUnsent
    | Fired
    | Reaped
)


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
    Prepare | AbortPreparation | SendFrame | CancelQuestions | CloseTools | SendCancel | After | KillTurn | Reap | End
)


@dataclass(slots=True)
class Turn:
    """State of one turn. ``step`` is its only writer, but for ``output`` and ``denied``, which updates set.

    ``resumes``: the agent holds a prompt of this chain open, so a Stop must settle it even before the turn prompts.
    """

    phase: TurnPhase = TurnPhase.ADMITTED
    stop: StopReason | None = None
    stop_error: RunnerError | None = None
    resumes: bool = False
    frame_sent: bool = False
    late_completion: bool = False
    output: bool = False
    denied: bool = False
    story: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def stopping(self) -> bool:
        """Whether a Stop was marked and the turn has not ended."""
        return self.stop is not None and self.phase is not TurnPhase.ENDED


Step = Callable[[Turn, "Event"], list[Effect]]


def step(turn: Turn, event: Event) -> list[Effect]:
    """Move the turn by one event.

    Raises:
        IllegalMove: the table has no such move; nothing was changed.
    """
    move = TABLE.get((turn.phase, type(event)))
    if move is None:
        raise IllegalMove(f"{type(event).__name__} while {turn.phase}")
    before = turn.phase
    effects = move(turn, event)
    turn.story.append((type(event).__name__, before.value, turn.phase.value))
    return effects


def classify(turn: Turn, event: Answered) -> End:
    """The ending that an answer to ``session/prompt`` means (DESIGN 3.2, 3.3.5): our mark before its words."""
    if turn.stop is not None:
        return End(
            _stopped_outcome(turn),
            stop_reason=_stopped_word(turn),
            settled=True,
            late_completion=event.stop_reason == "end_turn",
            error=turn.stop_error,
            label=turn.stop,
        )
    if event.error_code is not None:
        return _failed(_answer_error(event))
    if event.stop_reason is None:
        return _failed(RunnerError("harness_protocol_error", "The agent ended the turn without a stop reason."))
    if event.stop_reason == "cancelled" and not turn.denied:
        return _failed(
            RunnerError("harness_protocol_error", "The agent cancelled the turn although nobody asked it to.")
        )
    if event.stop_reason == "end_turn" and not turn.output and not turn.denied:
        return _failed(RunnerError("empty_turn", "The agent ended the turn without a message and without a tool call."))
    return End(Outcome.COMPLETED, stop_reason=event.stop_reason, settled=True)


def _answer_error(event: Answered) -> RunnerError:
    if event.error_code == AUTH_REQUIRED:
        return RunnerError("harness_auth_required", f"The agent needs a login: {event.error_message}")
    return RunnerError(
        "harness_protocol_error", f"The agent answered with error {event.error_code}: {event.error_message}"
    )


def _failed(error: RunnerError) -> End:
    return End(Outcome.FAILED, settled=True, error=error)


def _stopped_outcome(turn: Turn) -> Outcome:
    return Outcome.FAILED if turn.stop_error is not None else Outcome.CANCELLED


def _stopped_word(turn: Turn) -> str | None:
    return None if turn.stop_error is not None else "cancelled"


def _cancelled(turn: Turn, settled: bool | None, survivors: bool = False) -> End:
    return End(
        _stopped_outcome(turn),
        stop_reason=_stopped_word(turn),
        settled=settled,
        late_completion=turn.late_completion,
        error=turn.stop_error,
        label=turn.stop,
        survivors=survivors,
    )


def _end(turn: Turn, end: End) -> list[Effect]:
    turn.phase = TurnPhase.ENDED
    status = "failed" if end.outcome in (Outcome.FAILED, Outcome.LOST) else "cancelled"
    tools: list[Effect] = [] if end.outcome is Outcome.PAUSED else [CancelQuestions(), CloseTools(status)]
    return [*tools, end]


def _mark(turn: Turn, event: Stop) -> None:
    if turn.stop is None or not event.reason.cooperative:
        turn.stop = event.reason
        turn.stop_error = event.error


def _begin(turn: Turn, event: Event) -> list[Effect]:
    if turn.stop is not None and not turn.resumes:
        return _end(turn, _cancelled(turn, None))
    turn.phase = TurnPhase.PREPARING
    return [Prepare()]


def _stop_early(turn: Turn, event: Event) -> list[Effect]:
    assert isinstance(event, Stop)
    _mark(turn, event)
    return [AbortPreparation()] if turn.phase is TurnPhase.PREPARING else []


def _prepared(turn: Turn, event: Event) -> list[Effect]:
    assert isinstance(event, Prepared)
    if event.resumed:
        turn.phase = TurnPhase.PROMPTING
        turn.frame_sent = True
        return _start_cancel(turn) if turn.stop is not None else []
    if turn.stop is not None:
        return _end(turn, _cancelled(turn, None))
    turn.phase = TurnPhase.PROMPTING
    turn.frame_sent = True
    return [SendFrame()]


def _prepare_failed(turn: Turn, event: Event) -> list[Effect]:
    assert isinstance(event, PrepareFailed | AgentGone)
    if turn.stop is not None:
        return _end(turn, _cancelled(turn, None))
    return _end(turn, End(Outcome.FAILED, error=event.error))


def _start_cancel(turn: Turn) -> list[Effect]:
    if turn.stop in (StopReason.KILL, StopReason.DELETE):
        return _end(turn, _cancelled(turn, False))
    turn.phase = TurnPhase.CANCELLING
    return [
        CancelQuestions(),
        CloseTools("cancelled"),
        SendCancel(),
        After("cancel_again", CANCEL_REPEAT_SECONDS),
        After("kill_tools", KILL_TOOLS_SECONDS),
        After("settle", None),
    ]


def _stop_prompting(turn: Turn, event: Event) -> list[Effect]:
    assert isinstance(event, Stop)
    _mark(turn, event)
    return _start_cancel(turn)


def _stop_again(turn: Turn, event: Event) -> list[Effect]:
    assert isinstance(event, Stop)
    _mark(turn, event)
    if event.reason in (StopReason.KILL, StopReason.DELETE):
        return _end(turn, _cancelled(turn, False))
    return []


def _answered(turn: Turn, event: Event) -> list[Effect]:
    assert isinstance(event, Answered)
    return _end(turn, classify(turn, event))


def _settled(turn: Turn, event: Event) -> list[Effect]:
    assert isinstance(event, Answered)
    turn.late_completion = classify(turn, event).late_completion
    return [Reap()]


def _agent_gone(turn: Turn, event: Event) -> list[Effect]:
    assert isinstance(event, AgentGone)
    return _end(turn, End(Outcome.FAILED, settled=False, error=event.error))


def _not_settled(turn: Turn, event: Event) -> list[Effect]:
    return _end(turn, _cancelled(turn, False))


def _limit(turn: Turn, event: Event) -> list[Effect]:
    assert isinstance(event, LimitReached)
    turn.stop = StopReason.LIMIT
    return _end(turn, End(Outcome.FAILED, settled=False, error=event.error, label=StopReason.LIMIT))


def _quiet(turn: Turn, event: Event) -> list[Effect]:
    return _end(turn, End(Outcome.PAUSED, stop_reason="paused"))


def _fired(turn: Turn, event: Event) -> list[Effect]:
    assert isinstance(event, Fired)
    if event.timer == "cancel_again":
        return [SendCancel(), After("cancel_again", CANCEL_REPEAT_SECONDS)]
    if event.timer == "kill_tools":
        return [KillTurn()]
    if event.timer == "settle":
        return _not_settled(turn, event)
    raise IllegalMove(f"timer {event.timer}")


def _reaped(turn: Turn, event: Event) -> list[Effect]:
    assert isinstance(event, Reaped)
    return _end(turn, _cancelled(turn, True, event.survivors))


def _nothing(turn: Turn, event: Event) -> list[Effect]:
    return []


TABLE: Final[dict[tuple[TurnPhase, type[Event]], Step]] = {
    (TurnPhase.ADMITTED, Begin): _begin,
    (TurnPhase.ADMITTED, Stop): _stop_early,
    (TurnPhase.PREPARING, Stop): _stop_early,
    (TurnPhase.PREPARING, Prepared): _prepared,
    (TurnPhase.PREPARING, PrepareFailed): _prepare_failed,
    (TurnPhase.PREPARING, AgentGone): _prepare_failed,
    (TurnPhase.PREPARING, LimitReached): _limit,
    (TurnPhase.PROMPTING, Stop): _stop_prompting,
    (TurnPhase.PROMPTING, Answered): _answered,
    (TurnPhase.PROMPTING, AgentGone): _agent_gone,
    (TurnPhase.PROMPTING, LimitReached): _limit,
    (TurnPhase.PROMPTING, Quiet): _quiet,
    (TurnPhase.CANCELLING, Stop): _stop_again,
    (TurnPhase.CANCELLING, Answered): _settled,
    (TurnPhase.CANCELLING, AgentGone): _not_settled,
    (TurnPhase.CANCELLING, CancelUnsent): _not_settled,
    (TurnPhase.CANCELLING, Fired): _fired,
    (TurnPhase.CANCELLING, LimitReached): _nothing,
    (TurnPhase.CANCELLING, Reaped): _reaped,
    (TurnPhase.ENDED, Stop): _nothing,
    (TurnPhase.ENDED, Answered): _nothing,
    (TurnPhase.ENDED, AgentGone): _nothing,
    (TurnPhase.ENDED, LimitReached): _nothing,
    (TurnPhase.ENDED, Fired): _nothing,
    (TurnPhase.ENDED, CancelUnsent): _nothing,
    (TurnPhase.ENDED, Reaped): _nothing,
}
