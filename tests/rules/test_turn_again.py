"""A resumed agent that gives no sign gets one replacement, and only while nothing was done (case M7)."""

from __future__ import annotations

import pytest

from runner.errors import RunnerError
from runner.rules.turn import Again, Answered, Begin, End, LimitReached, Prepared, SendFrame, Stop, Turn, step
from runner.terms import Outcome, StopReason, TurnPhase

SILENT = LimitReached(RunnerError("limit_first_update", "silent"))


def prompting(*, loaded: bool) -> Turn:
    turn = Turn()
    step(turn, Begin())
    assert step(turn, Prepared(loaded=loaded)) == [SendFrame()]
    return turn


def test_silence_of_a_loaded_agent_prepares_another_one_once() -> None:
    turn = prompting(loaded=True)
    assert step(turn, SILENT) == [Again()]
    assert turn.phase is TurnPhase.PREPARING
    assert step(turn, Prepared()) == [SendFrame()]
    end = step(turn, SILENT)[-1]
    assert isinstance(end, End)
    assert (end.outcome, end.settled) == (Outcome.FAILED, False)


def test_silence_of_any_other_agent_ends_the_turn() -> None:
    assert isinstance(step(prompting(loaded=False), SILENT)[-1], End)


@pytest.mark.parametrize("code", ["limit_total", "limit_idle", "limit_tool_call", "limit_quiet"])
def test_another_limit_ends_the_turn(code: str) -> None:
    assert isinstance(step(prompting(loaded=True), LimitReached(RunnerError(code, "over")))[-1], End)


def test_nothing_that_was_done_is_done_again() -> None:
    turn = prompting(loaded=True)
    turn.output = True
    assert isinstance(step(turn, SILENT)[-1], End)


def test_a_stop_between_the_two_ends_the_turn_as_cancelled() -> None:
    turn = prompting(loaded=True)
    step(turn, SILENT)
    step(turn, Stop(StopReason.CANCEL))
    end = step(turn, Prepared())[-1]
    assert isinstance(end, End)
    assert (end.outcome, end.settled) == (Outcome.CANCELLED, None)


def test_an_answer_is_an_answer() -> None:
    turn = prompting(loaded=True)
    turn.output = True
    end = step(turn, Answered("end_turn"))[-1]
    assert isinstance(end, End)
    assert end.outcome is Outcome.COMPLETED
