"""What an answer to ``session/prompt`` means: our mark before its words (DESIGN 3.2 Output, 3.3.5)."""

from __future__ import annotations

import pytest

from runner.rules.turn import Answered, End, Reap, Reaped, Stop, Turn, step
from runner.terms import Outcome, StopReason, TurnPhase


def prompting(*, output: bool = False, denied: bool = False) -> Turn:
    return Turn(phase=TurnPhase.PROMPTING, output=output, denied=denied)


@pytest.mark.parametrize(
    ("word", "output", "denied", "outcome", "code"),
    [
        ("end_turn", True, False, Outcome.COMPLETED, None),
        ("end_turn", False, True, Outcome.COMPLETED, None),
        ("end_turn", False, False, Outcome.FAILED, "empty_turn"),
        ("max_tokens", False, False, Outcome.COMPLETED, None),
        ("max_turn_requests", True, False, Outcome.COMPLETED, None),
        ("refusal", False, False, Outcome.COMPLETED, None),
        ("cancelled", True, False, Outcome.FAILED, "harness_protocol_error"),
        ("cancelled", False, True, Outcome.COMPLETED, None),
        (None, True, False, Outcome.FAILED, "harness_protocol_error"),
    ],
)
def test_an_answer_without_our_mark(word: str | None, output: bool, denied: bool, outcome: Outcome, code: str | None):
    """Cases L1 and A7: an empty end_turn is an error, a null result is one, nothing raises."""
    machine = prompting(output=output, denied=denied)
    end = step(machine, Answered(word))[-1]
    assert isinstance(end, End)
    assert (end.outcome, end.error.code if end.error else None) == (outcome, code)
    assert end.stop_reason == (word if outcome is Outcome.COMPLETED else None)
    assert (end.settled, end.label, end.late_completion) == (True, None, False)


@pytest.mark.parametrize(
    ("code", "expected"),
    [(-32000, "harness_auth_required"), (-32603, "harness_protocol_error"), (-32800, "harness_protocol_error")],
)
def test_an_error_answer_without_our_mark_fails_the_turn(code: int, expected: str):
    end = step(prompting(output=True), Answered(None, code, "the agent's own sentence"))[-1]
    assert isinstance(end, End)
    assert end.outcome is Outcome.FAILED
    assert end.error is not None
    assert end.error.code == expected
    assert "the agent's own sentence" in end.error.message


@pytest.mark.parametrize(
    ("answer", "late"),
    [
        (Answered("cancelled"), False),
        (Answered("end_turn"), True),
        (Answered("max_tokens"), False),
        (Answered(None, -32800, "Request cancelled"), False),
        (Answered(None, -32603, "boom"), False),
        (Answered(None), False),
    ],
    ids=["cancelled", "end_turn", "max_tokens", "error -32800", "another error", "null"],
)
@pytest.mark.parametrize("output", [True, False])
def test_any_answer_behind_our_mark_is_cancelled(answer: Answered, late: bool, output: bool):
    """Cases A7 and A16: what the agent says to our cancel is never its failure, and the sandbox may stay warm."""
    machine = prompting(output=output)
    step(machine, Stop(StopReason.CANCEL))
    assert step(machine, answer) == [Reap()]
    end = step(machine, Reaped(False))[-1]
    expected = End(Outcome.CANCELLED, "cancelled", settled=True, late_completion=late, label=StopReason.CANCEL)
    assert end == expected
