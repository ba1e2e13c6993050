"""What an answer may do to an interaction in each of its states (DESIGN 3.8)."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.rules.interaction import CLOSED, EXPIRY_MS, MOVES, claim, verdict
from runner.terms import InteractionStatus as S

ALLOW = {"decision": "allow", "idempotency_key": "k1"}


def test_a_question_lives_seven_days():
    assert EXPIRY_MS == 7 * 86_400_000


ALLOWED = {
    (S.PENDING, S.ANSWERED),
    (S.PENDING, S.CANCELLED),
    (S.PENDING, S.EXPIRED),
    (S.ANSWERED, S.CONSUMED),
    (S.ANSWERED, S.PENDING),
    (S.ANSWERED, S.CANCELLED),
}


@pytest.mark.parametrize(("old", "new"), list(product(S, S)))
def test_moves(old: S, new: S):
    assert (new in MOVES[old]) == ((old, new) in ALLOWED)
    assert set(MOVES) == set(S)


def test_what_is_closed_moves_no_more():
    assert {S.CONSUMED, S.CANCELLED, S.EXPIRED} == CLOSED


@pytest.mark.parametrize(
    ("status", "recorded", "answer", "outcome"),
    [
        (S.PENDING, None, ALLOW, "claim"),
        (S.PENDING, None, {"option_id": "x"}, "claim"),
        (S.ANSWERED, ALLOW, ALLOW, "repeat"),
        (S.CONSUMED, ALLOW, ALLOW, "repeat"),
        (S.ANSWERED, ALLOW, {**ALLOW, "idempotency_key": "k2"}, "interaction_conflict"),
        (S.ANSWERED, ALLOW, {"decision": "allow"}, "interaction_conflict"),
        (S.ANSWERED, {"decision": "allow"}, {"decision": "allow"}, "interaction_conflict"),
        (S.ANSWERED, ALLOW, {**ALLOW, "decision": "deny"}, "interaction_conflict"),
        (S.CONSUMED, ALLOW, {**ALLOW, "decision": "deny"}, "interaction_conflict"),
        (S.CONSUMED, {"option_id": "x", "idempotency_key": "k1"}, ALLOW, "interaction_conflict"),
        (S.CANCELLED, None, ALLOW, "interaction_closed"),
        (S.CANCELLED, ALLOW, ALLOW, "interaction_closed"),
        (S.EXPIRED, None, ALLOW, "interaction_closed"),
        (S.ANSWERED, None, ALLOW, "interaction_closed"),
    ],
)
def test_an_answer_meets_a_state(status: S, recorded: dict | None, answer: dict, outcome: str):
    """Cases F1, F10 and F12: claimed once, repeated only by the one who gave it, else refused."""
    if outcome in ("claim", "repeat"):
        assert claim(status, recorded, answer) == outcome
        return
    with pytest.raises(RunnerError) as caught:
        claim(status, recorded, answer)
    assert caught.value.code == outcome


@pytest.mark.parametrize(
    ("recorded", "word"), [(ALLOW, "allow"), ({"decision": "deny"}, "deny"), ({"option_id": "yes"}, "yes")]
)
def test_a_loser_is_told_the_recorded_verdict_case_f12(recorded: dict[str, Any], word: str):
    with pytest.raises(RunnerError) as caught:
        claim(S.ANSWERED, recorded, {"decision": "other"})
    assert caught.value.extra == {"recorded_decision": word}
    assert word in caught.value.message
    assert verdict(recorded) == word
