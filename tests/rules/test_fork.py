"""What a history that is cut somewhere leaves open, and how that is closed in its fork."""

from __future__ import annotations

from typing import Any

import pytest

from runner.rules.fork import INTERRUPTED, Cut, config_of
from runner.rules.history import Wholeness
from runner.rules.transcript import CUT_OFF, turns
from runner.rules.unfinished import unfinished

Row = tuple[str | None, str | None, str, dict[str, Any]]
BUSY: Row = (None, None, "session_busy", {})
ADMITTED: Row = ("t1", "p1", "turn_admitted", {"turn_id": "t1", "prompt_ids": ["p1"]})
SAID: Row = ("t1", "p1", "user_message", {"content": [{"type": "text", "text": "hello"}]})
ASKED: Row = ("t1", "p1", "interaction_requested", {"interaction_id": "i1"})
DEFERRED: Row = ("t1", "p1", "tool_call", {"tool_call_id": "c1", "title": "ls", "status": "deferred"})
PAUSED: Row = ("t1", "p1", "done", {"turn_id": "t1", "outcome": "paused", "stop_reason": "paused"})
RESUMED: Row = ("t2", "p1", "turn_admitted", {"turn_id": "t2", "prompt_ids": ["p1"], "resumes": "t1"})
CLOSED: Row = ("t2", "p1", "interaction_closed", {"interaction_id": "i1", "status": "consumed"})
RAN: Row = ("t2", "p1", "tool_call", {"tool_call_id": "c1", "status": "completed"})
OVER: Row = ("t2", "p1", "prompt_ended", {"prompt_id": "p1", "state": "done"})
DONE: Row = ("t2", "p1", "done", {"turn_id": "t2", "outcome": "completed"})
IDLE: Row = (None, None, "session_idle", {})
WHOLE = [BUSY, ADMITTED, SAID, ASKED, DEFERRED, PAUSED, RESUMED, CLOSED, RAN, OVER, DONE, IDLE]


def cut(rows: list[Row]) -> Cut:
    found = Cut()
    for row in rows:
        found.see(*row)
    return found


def closed(rows: list[Row]) -> list[tuple[str | None, str, Any]]:
    return [
        (turn, str(kind), data.get("state") or data.get("status") or data.get("outcome"))
        for turn, _, kind, data in cut(rows).closing()
    ]


@pytest.mark.parametrize(
    ("count", "endings"),
    [
        (1, [(None, "session_idle", None)]),
        (2, [("t1", "prompt_ended", "cancelled"), ("t1", "done", "cancelled"), (None, "session_idle", None)]),
        (3, [("t1", "prompt_ended", "aborted"), ("t1", "done", "cancelled"), (None, "session_idle", None)]),
        (
            5,
            [
                ("t1", "interaction_closed", "cancelled"),
                ("t1", "tool_call", "failed"),
                ("t1", "prompt_ended", "aborted"),
                ("t1", "done", "cancelled"),
                (None, "session_idle", None),
            ],
        ),
        (
            6,
            [
                (None, "interaction_closed", "cancelled"),
                (None, "tool_call", "failed"),
                (None, "prompt_ended", "aborted"),
                (None, "session_idle", None),
            ],
        ),
        (9, [("t2", "prompt_ended", "aborted"), ("t2", "done", "cancelled"), (None, "session_idle", None)]),
        (10, [("t2", "done", "cancelled"), (None, "session_idle", None)]),
        (11, [(None, "session_idle", None)]),
        (12, []),
    ],
)
def test_every_cut_is_closed_in_the_order_of_a_turns_end(count: int, endings: list[Any]) -> None:
    assert closed(WHOLE[:count]) == endings


@pytest.mark.parametrize("count", range(1, len(WHOLE) + 1))
def test_behind_its_closing_nothing_is_open_and_the_history_is_whole(count: int) -> None:
    rows = [
        *WHOLE[:count],
        *((turn, prompt, str(kind), data) for turn, prompt, kind, data in cut(WHOLE[:count]).closing()),
    ]
    left = unfinished((kind, data) for _, _, kind, data in rows)
    assert (left.prompts, left.tools, left.busy) == ({}, {}, False)
    seen = Wholeness()
    for n, (turn, _, kind, _) in enumerate(rows, 1):
        seen.see(1, n, turn, kind)
    assert seen.missing() == []
    assert sum(kind == "done" for _, _, kind, _ in rows) == sum(kind == "turn_admitted" for _, _, kind, _ in rows)
    assert cut(rows).closing() == []


def test_a_prompt_that_had_its_end_before_its_turn_began_gets_no_second_one() -> None:
    cancelled: Row = (None, "p0", "prompt_ended", {"prompt_id": "p0", "state": "cancelled"})
    both: Row = ("t1", "p1", "turn_admitted", {"turn_id": "t1", "prompt_ids": ["p0", "p1"]})
    ended = [data["prompt_id"] for _, _, kind, data in cut([BUSY, cancelled, both]).closing() if kind == "prompt_ended"]
    assert ended == ["p1"]


def test_an_interrupted_call_has_a_result_that_says_so() -> None:
    rows = [*WHOLE[:5], *cut(WHOLE[:5]).closing()]
    (told,) = turns((turn, str(kind), data) for turn, _, kind, data in rows)
    assert INTERRUPTED in told
    assert CUT_OFF in told
    assert "The user stopped" not in told


@pytest.mark.parametrize(
    ("count", "context", "unanswered"), [(2, False, False), (3, True, True), (6, True, True), (12, True, False)]
)
def test_what_an_agent_knew_and_owes(count: int, context: bool, unanswered: bool) -> None:
    found = cut(WHOLE[:count])
    assert (found.open.context, found.unanswered) == (context, unanswered)


def test_a_configuration_goes_over_without_what_belongs_to_one_sandbox() -> None:
    config = {"harness": "demo", "secrets": {"A": None, "B": "REF"}, "workspace_files": "x", "secrets_expire_at": "y"}
    assert config_of(config) == {"harness": "demo", "secrets": {"A": None, "B": "REF"}}
