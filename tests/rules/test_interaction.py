"""What an answer may do to an interaction in each of its states (DESIGN 3.8)."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.rules.interaction import (
    CLAIM_MS,
    CLOSED,
    EXPIRY_MS,
    LAST,
    MOVES,
    REASONS,
    Cause,
    binding,
    claim,
    form_binding,
    last_status,
    open_for,
    orphaned,
    verdict,
)
from runner.terms import InteractionStatus as S

ALLOW = {"decision": "allow", "idempotency_key": "k1"}
FORM = {"action": "accept", "content": {"name": "x"}, "idempotency_key": "k1"}


def test_a_question_lives_seven_days():
    assert EXPIRY_MS == 7 * 86_400_000


ALLOWED = {
    (S.PENDING, S.ANSWERED),
    (S.PENDING, S.CANCELLED),
    (S.PENDING, S.EXPIRED),
    (S.ANSWERED, S.CONSUMED),
    (S.ANSWERED, S.PENDING),
    (S.ANSWERED, S.CANCELLED),
    (S.ANSWERED, S.EXPIRED),
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
        (S.CONSUMED, FORM, FORM, "repeat"),
        (S.CONSUMED, FORM, {**FORM, "content": {"name": "y"}}, "interaction_conflict"),
        (S.PENDING, {"reason": "no room"}, ALLOW, "claim"),
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
    ("recorded", "word"),
    [(ALLOW, "allow"), ({"decision": "deny"}, "deny"), ({"option_id": "yes"}, "yes"), (FORM, "accept")],
)
def test_a_loser_is_told_the_recorded_verdict_case_f12(recorded: dict[str, Any], word: str):
    with pytest.raises(RunnerError) as caught:
        claim(S.ANSWERED, recorded, {"decision": "other"})
    assert caught.value.extra == {"recorded_decision": word}
    assert word in caught.value.message
    assert verdict(recorded) == word


# What closes a question without an answer: one rule for every ending, Stop, withdrawal, expiry and loss.


@pytest.mark.parametrize(("cause", "status"), list(product(Cause, S)))
def test_no_card_is_left_case_f11(cause: Cause, status: S):
    last = last_status(status, cause)
    if last is None:
        assert status in CLOSED or (status is S.ANSWERED and cause is Cause.EXPIRED), "an open question stays open"
        return
    assert last in MOVES[status]
    assert last in CLOSED
    assert last is not S.CONSUMED, "nobody answered it"


def test_every_cause_is_in_the_table_and_says_why():
    assert set(LAST) == set(REASONS) == set(Cause)
    assert all(REASONS.values())


@pytest.mark.parametrize(
    ("cause", "pending", "answered"),
    [
        (Cause.STOPPED, S.CANCELLED, S.CANCELLED),
        (Cause.WITHDRAWN, S.CANCELLED, S.CANCELLED),
        (Cause.ENDED, S.CANCELLED, S.EXPIRED),
        (Cause.OUTDATED, S.EXPIRED, S.EXPIRED),
        (Cause.EXPIRED, S.EXPIRED, None),
        (Cause.LOST, S.EXPIRED, S.EXPIRED),
    ],
)
def test_what_each_cause_makes_of_a_question(cause: Cause, pending: S, answered: S | None):
    assert (last_status(S.PENDING, cause), last_status(S.ANSWERED, cause)) == (pending, answered)


@pytest.mark.parametrize(
    ("status", "now", "there"),
    [(S.PENDING, 9, True), (S.PENDING, 10, False), (S.ANSWERED, 9, False), (S.CONSUMED, 9, False)],
)
def test_what_can_still_be_answered(status: S, now: int, there: bool):
    assert open_for(status, 10, now) is there


def test_a_claim_lasts_as_long_as_a_commands_case_f2():
    claimed = {"decision": "allow", "claimed_at": 1000}
    assert not orphaned(claimed, 1000 + CLAIM_MS - 1)
    assert orphaned(claimed, 1000 + CLAIM_MS)
    assert orphaned({"decision": "allow"}, 0)
    assert orphaned(None, 0)


# The exact (tool, canonical arguments) that an approval covers.

CALL = {"tool_call_id": "t1", "kind": "execute", "title": "run", "raw_input": {"command": "rm x", "cwd": "/w"}}


@pytest.mark.parametrize(
    "same",
    [
        {**CALL, "tool_call_id": "t2"},
        {**CALL, "status": "in_progress"},
        {**CALL, "content": [{"type": "content"}]},
        {**CALL, "raw_input": {"cwd": "/w", "command": "rm x"}},
    ],
)
def test_an_approval_covers_the_same_call(same: dict[str, Any]):
    assert binding(same) == binding(CALL)


def test_what_an_agent_makes_anew_for_each_call_is_no_argument():
    """An agent that was started again asks for the same call with other ids; everything else stays bound."""
    first = {**CALL, "raw_input": {"command": "rm x", "call_id": "1"}}
    again = {**CALL, "raw_input": {"command": "rm x", "call_id": "2"}}
    other = {**CALL, "raw_input": {"command": "rm y", "call_id": "1"}}
    assert binding(first) != binding(again)
    assert binding(first, {"call_id"}) == binding(again, {"call_id"})
    assert binding(first, {"call_id"}) != binding(other, {"call_id"})
    assert binding({**CALL, "raw_input": "rm x"}, {"call_id"}) == binding({**CALL, "raw_input": "rm x"})


@pytest.mark.parametrize(
    "other",
    [
        {**CALL, "raw_input": {"command": "rm y", "cwd": "/w"}},
        {**CALL, "raw_input": {"command": "rm x"}},
        {**CALL, "raw_input": {"command": ["rm", "x"], "cwd": "/w"}},
        {**CALL, "raw_input": {}},
        {**CALL, "kind": "edit"},
        {**CALL, "title": "run it"},
        {name: value for name, value in CALL.items() if name != "raw_input"},
    ],
)
def test_an_approval_covers_no_other_call_case_f8(other: dict[str, Any]):
    assert binding(other) != binding(CALL)


def test_without_raw_input_what_is_shown_counts():
    diff = {"kind": "edit", "title": "Edit a", "content": [{"type": "diff", "path": "/a", "newText": "1"}]}
    other = {**diff, "content": [{"type": "diff", "path": "/a", "newText": "2"}]}
    elsewhere = {**diff, "locations": [{"path": "/b"}]}
    assert len({binding(diff), binding(other), binding(elsewhere)}) == 3
    assert binding({**diff, "raw_input": {}}) == binding(diff)


def test_a_form_is_the_same_when_it_shows_the_same():
    asked = {"mode": "form", "message": "Which?", "schema": {"properties": {}}}
    assert form_binding({**asked, "elicitation_id": "e2"}) == form_binding({**asked, "elicitation_id": "e1"})
    assert form_binding({**asked, "message": "Who?"}) != form_binding(asked)
    assert form_binding({"mode": "url", "url": "a", "message": ""}) != form_binding(
        {"mode": "url", "url": "b", "message": ""}
    )
