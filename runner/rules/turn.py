"""One turn's state machine: which event is legal in which phase, and what it makes the shell do (DESIGN 3.2, 3.3).

``step(turn, event)`` returns effects in the order in which they must be performed. The shell owns timers: an
``After`` effect comes back as ``Fired`` with the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from runner.errors import RunnerError
from runner.rules.turn_moves import (
    LATE,
    AbortPreparation,
    After,
    Again,
    AgentGone,
    Answered,
    Begin,
    CancelQuestions,
    CancelUnsent,
    ChainCold,
    CloseTools,
    Effect,
    End,
    Event,
    Fired,
    KillTurn,
    Known,
    LimitReached,
    Moved,
    Prepare,
    Prepared,
    PrepareFailed,
    Quiet,
    Reap,
    Reaped,
    SendCancel,
    SendFrame,
    Stop,
    Teller,
)
from runner.terms import Outcome, StopReason, TurnPhase

__all__ = [
    "AT_ONCE",
    "AUTH_REQUIRED",
    "CANCEL_REPEAT_SECONDS",
    "KILL_TOOLS_SECONDS",
    "LATE",
    "OURS",
    "TABLE",
    "AbortPreparation",
    "After",
    "Again",
    "AgentGone",
    "Answered",
    "Begin",
    "CancelQuestions",
    "CancelUnsent",
    "ChainCold",
    "CloseTools",
    "Effect",
    "End",
    "Event",
    "Fired",
    "IllegalMove",
    "KillTurn",
    "Known",
    "LimitReached",
    "Moved",
    "Prepare",
    "PrepareFailed",
    "Prepared",
    "Quiet",
    "Reap",
    "Reaped",
    "SendCancel",
    "SendFrame",
    "Step",
    "Stop",
    "Teller",
    "Turn",
    "classify",
    "known",
    "step",
]

CANCEL_REPEAT_SECONDS: Final = 1.0
KILL_TOOLS_SECONDS: Final = 2.0
AUTH_REQUIRED: Final = -32000
OURS: Final = frozenset({StopReason.DRAIN, StopReason.LEASE_LOST})
"""Stops that nobody asked for: a chain that was not sent to its new agent yet waits on."""
AT_ONCE: Final = frozenset({StopReason.KILL, StopReason.DELETE})
"""Stops that ask nobody: the agent is not waited for."""


class IllegalMove(Exception):
    """An event that cannot happen in this phase; the turn was not changed."""


@dataclass(slots=True)
class Turn:
    """State of one turn. ``step`` is its only writer, but for ``output`` and ``denied``, which updates set.

    ``resumes``: the agent holds a prompt of this chain open, so a Stop must settle it even before the turn prompts.
    ``cold``: it goes on with a chain whose agent is gone: nothing is open anywhere until its own frame is sent.
    ``loaded``: its agent goes on with the agent session of an earlier process and has not shown that it can.
    ``settled``: the harness answered after the mark; the turn now only waits for its final reap.
    """

    phase: TurnPhase = TurnPhase.ADMITTED
    stop: StopReason | None = None
    stop_error: RunnerError | None = None
    resumes: bool = False
    frame_sent: bool = False
    settled: bool = False
    late_completion: bool = False
    output: bool = False
    denied: bool = False
    cold: bool = False
    loaded: bool = False
    story: Teller = field(default_factory=list[Moved], compare=False)

    @property
    def stopping(self) -> bool:
        """Whether a Stop was marked and the turn has not ended."""
        return self.stop is not None and self.phase is not TurnPhase.ENDED


Step = Callable[[Turn, "Event"], list[Effect]]


def step(turn: Turn, event: Event) -> list[Effect]:
    """Move the turn by one event; an ended one ignores what is ``LATE``.

    Raises:
        IllegalMove: the table has no such move; nothing was changed.
    """
    late = turn.phase is TurnPhase.ENDED and type(event) in LATE
    move = _nothing if late else TABLE.get((turn.phase, type(event)))
    if move is None:
        raise IllegalMove(f"{type(event).__name__} while {turn.phase}")
    before = known(turn)
    effects = move(turn, event)
    turn.story.append((event, before, known(turn), effects))
    return effects


def known(turn: Turn) -> Known:
    """What is known of the turn now."""
    return Known(
        turn.phase,
        turn.stop,
        turn.stop_error.code if turn.stop_error is not None else None,
        turn.resumes,
        turn.frame_sent,
        turn.settled,
        turn.late_completion,
        turn.output,
        turn.denied,
        turn.cold,
        turn.loaded,
    )


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
    """The strongest label stays: a later drain makes no kill milder, a later Stop keeps no doomed sandbox."""
    if turn.stop is None or _strength(event.reason) > _strength(turn.stop):
        turn.stop = event.reason
        turn.stop_error = event.error or turn.stop_error


def _strength(reason: StopReason) -> int:
    return 2 if reason in AT_ONCE else 0 if reason.cooperative else 1


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
    turn.loaded = event.loaded
    return [SendFrame()]


def _prepare_failed(turn: Turn, event: Event) -> list[Effect]:
    assert isinstance(event, PrepareFailed)
    if turn.cold and (turn.stop is None or turn.stop in OURS):
        # Its question stays open: the next answer tries again (case F2).
        error = turn.stop_error or event.error
        return _end(turn, End(Outcome.PAUSED, stop_reason="paused", error=error, label=turn.stop))
    if turn.stop is not None:
        return _end(turn, _cancelled(turn, None))
    return _end(turn, End(Outcome.FAILED, error=event.error))


def _chain_cold(turn: Turn, event: Event) -> list[Effect]:
    turn.resumes, turn.cold = False, turn.resumes or turn.cold
    return []


def _start_cancel(turn: Turn) -> list[Effect]:
    if turn.stop in AT_ONCE:
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
    return _end(turn, _cancelled(turn, turn.settled)) if event.reason in AT_ONCE else []


def _answered(turn: Turn, event: Event) -> list[Effect]:
    assert isinstance(event, Answered)
    return _end(turn, classify(turn, event))


def _settled(turn: Turn, event: Event) -> list[Effect]:
    assert isinstance(event, Answered)
    if turn.settled:
        return []
    turn.settled = True
    turn.late_completion = classify(turn, event).late_completion
    return [Reap()]


def _agent_gone(turn: Turn, event: Event) -> list[Effect]:
    assert isinstance(event, AgentGone)
    return _end(turn, End(Outcome.FAILED, settled=False, error=event.error))


def _gone_cancelling(turn: Turn, event: Event) -> list[Effect]:
    return _end(turn, _cancelled(turn, turn.settled))


def _not_settled(turn: Turn, event: Event) -> list[Effect]:
    return [] if turn.settled else _end(turn, _cancelled(turn, False))


def _limit_early(turn: Turn, event: Event) -> list[Effect]:
    assert isinstance(event, LimitReached)
    return [] if turn.stop is not None else _stop_early(turn, Stop(StopReason.LIMIT, event.error))


def _limit(turn: Turn, event: Event) -> list[Effect]:
    assert isinstance(event, LimitReached)
    if turn.loaded and not turn.output and event.error.code == "limit_first_update":
        # Nothing of the prompt was done as far as anybody saw: another agent may have it, once.
        turn.loaded = False
        turn.phase = TurnPhase.PREPARING
        return [Again()]
    turn.stop = StopReason.LIMIT
    return _end(turn, End(Outcome.FAILED, settled=False, error=event.error, label=StopReason.LIMIT))


def _quiet(turn: Turn, event: Event) -> list[Effect]:
    return _end(turn, End(Outcome.PAUSED, stop_reason="paused"))


def _fired(turn: Turn, event: Event) -> list[Effect]:
    assert isinstance(event, Fired)
    if event.timer not in ("cancel_again", "kill_tools", "settle"):
        raise IllegalMove(f"timer {event.timer}")
    if event.timer == "settle" or turn.settled:
        return _not_settled(turn, event)
    if event.timer == "kill_tools":
        return [KillTurn()]
    return [SendCancel(), After("cancel_again", CANCEL_REPEAT_SECONDS)]


def _reaped(turn: Turn, event: Event) -> list[Effect]:
    assert isinstance(event, Reaped)
    if not turn.settled:
        raise IllegalMove("Reaped before the harness settled")
    return _end(turn, _cancelled(turn, True, event.survivors))


def _nothing(turn: Turn, event: Event) -> list[Effect]:
    return []


TABLE: Final[dict[tuple[TurnPhase, type[Event]], Step]] = {
    (TurnPhase.ADMITTED, Begin): _begin,
    (TurnPhase.ADMITTED, Stop): _stop_early,
    (TurnPhase.PREPARING, Stop): _stop_early,
    (TurnPhase.PREPARING, Prepared): _prepared,
    (TurnPhase.PREPARING, PrepareFailed): _prepare_failed,
    (TurnPhase.PREPARING, ChainCold): _chain_cold,
    (TurnPhase.PREPARING, LimitReached): _limit_early,
    (TurnPhase.PROMPTING, Stop): _stop_prompting,
    (TurnPhase.PROMPTING, Answered): _answered,
    (TurnPhase.PROMPTING, AgentGone): _agent_gone,
    (TurnPhase.PROMPTING, LimitReached): _limit,
    (TurnPhase.PROMPTING, Quiet): _quiet,
    (TurnPhase.CANCELLING, Stop): _stop_again,
    (TurnPhase.CANCELLING, Answered): _settled,
    (TurnPhase.CANCELLING, AgentGone): _gone_cancelling,
    (TurnPhase.CANCELLING, CancelUnsent): _not_settled,
    (TurnPhase.CANCELLING, Fired): _fired,
    (TurnPhase.CANCELLING, Reaped): _reaped,
}
