"""What records leave open, record by record (DESIGN 3.9, case M10)."""

from __future__ import annotations

from typing import Any

import pytest

from runner.rules.unfinished import READ, Unfinished, unfinished

BUSY: tuple[str, Any] = ("session_busy", {})
IDLE: tuple[str, Any] = ("session_idle", {})


def admitted(*prompt_ids: str) -> tuple[str, Any]:
    return "turn_admitted", {"turn_id": "t", "prompt_ids": list(prompt_ids)}


def resumes() -> tuple[str, Any]:
    return "turn_admitted", {"turn_id": "t2", "prompt_ids": ["a"], "resumes": "t"}


STARTING: tuple[str, Any] = ("environment", {"phase": "starting"})
SENT: tuple[str, Any] = ("notice", {"kind": "chain_resumed"})


def ended(prompt_id: str) -> tuple[str, Any]:
    return "prompt_ended", {"prompt_id": prompt_id, "state": "done"}


def tool(name: str, status: str, **more: str) -> tuple[str, Any]:
    return "tool_call", {"tool_call_id": name, "status": status, **more}


@pytest.mark.parametrize(
    ("records", "left"),
    [
        ([], Unfinished()),
        ([BUSY], Unfinished(busy=True)),
        ([admitted("a", "b"), ended("a"), admitted("a", "b")], Unfinished(prompts={"b": None})),
        ([BUSY, IDLE, BUSY], Unfinished(busy=True)),
        ([BUSY, admitted("a"), ended("a"), IDLE], Unfinished()),
        ([BUSY, admitted("a")], Unfinished({"a": None}, busy=True)),
        ([BUSY, admitted("a"), admitted("a"), ended("a"), IDLE], Unfinished()),
        ([BUSY, admitted("a"), admitted("b")], Unfinished({"a": None, "b": None}, busy=True)),
        ([("user_message", {"content": []})], Unfinished(context=True)),
        ([resumes()], Unfinished({"a": None})),
        ([resumes(), STARTING], Unfinished({"a": None}, unsent=True)),
        ([resumes(), STARTING, ("notice", {"kind": "context_lost"})], Unfinished({"a": None}, unsent=True)),
        ([resumes(), STARTING, SENT], Unfinished({"a": None})),
        ([resumes(), STARTING, SENT, STARTING], Unfinished({"a": None})),
        ([resumes(), STARTING, admitted("b")], Unfinished({"a": None, "b": None})),
        ([admitted("a"), STARTING], Unfinished({"a": None})),
        ([tool("x", "completed")], Unfinished()),
        ([tool("x", "deferred", title="ls")], Unfinished(tools={"x": dict(tool("x", "deferred", title="ls")[1])})),
        ([tool("x", "deferred"), tool("x", "cancelled")], Unfinished()),
        ([tool("x", "deferred", title="ls"), ("tool_call_update", tool("x", "failed")[1])], Unfinished()),
        ([("message", {"text": "x"}), ("done", {"outcome": "completed"})], Unfinished()),
    ],
)
def test_what_is_left_open(records: list[tuple[str, Any]], left: Unfinished) -> None:
    assert unfinished(records) == left


def test_only_what_says_something_must_be_read() -> None:
    assert all(unfinished([(kind, {})]) == Unfinished() for kind in ("done", "error", "message", "interaction_closed"))
    assert {BUSY[0], IDLE[0], "turn_admitted", "prompt_ended", "tool_call", "user_message"} <= READ
