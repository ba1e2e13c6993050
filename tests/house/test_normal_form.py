"""The tests' own measure: equal conversations have equal normal forms, different ones do not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.normal_form import Final, normal_form


def event(cursor: str | None, type: str, turn: str | None = "t", /, **data: Any) -> dict[str, Any]:
    return {"kind": "event", "cursor": cursor, "turn_id": turn, "type": type, "data": data}


def delta(cursor: str, text: str, message_id: str = "m") -> dict[str, Any]:
    return event(cursor, "message_delta", message_id=message_id, text=text)


def block(cursor: str, text: str, start: str, message_id: str = "m") -> dict[str, Any]:
    return event(cursor, "message", message_id=message_id, text=text, supersedes_from=start)


FRAMES = [delta("1.1", "a"), event("1.2", "notice", None, kind="x"), delta("1.3", "b")]
BLOCK = block("1.4", "ab", "1.1")
TEXT = Final("t", "message", {"message_id": "m", "text": "ab"})
NOTICE = Final(None, "notice", {"kind": "x"})


@pytest.mark.parametrize(
    "told",
    [
        pytest.param([*FRAMES, BLOCK], id="live"),
        pytest.param([FRAMES[1], BLOCK], id="stored"),
        pytest.param(FRAMES, id="never closed"),
        pytest.param([*FRAMES[:2], BLOCK], id="came back in between"),
        pytest.param([*FRAMES, block("1.3", "ab", "1.1")], id="one cursor told twice"),
        pytest.param([*reversed(FRAMES), BLOCK], id="out of order"),
        pytest.param([delta("1.9", "old"), event(None, "resync", **{"from": "0.0"}), *FRAMES, BLOCK], id="resync"),
        pytest.param([FRAMES[0], event(None, "resync", **{"from": "1.1", "reason": "slow"}), *FRAMES[1:]], id="cut"),
    ],
)
def test_a_block_stands_for_its_frames(told: list[dict[str, Any]]) -> None:
    assert normal_form(told) == [NOTICE, TEXT]
    assert normal_form([json.dumps(item) for item in told]) == [NOTICE, TEXT]
    assert normal_form(b"".join(json.dumps(item).encode() + b"\n" for item in told)) == [NOTICE, TEXT]


def test_blocks_of_one_message_stay_apart() -> None:
    told = [delta("1.1", "a"), block("1.2", "a", "1.1"), event("1.3", "plan"), delta("1.4", "b"), delta("1.5", "c")]
    assert [(item.type, item.data.get("text")) for item in normal_form(told)] == [
        ("message", "a"),
        ("plan", None),
        ("message", "bc"),
    ]


def test_frames_that_their_block_does_not_have_show() -> None:
    told = [delta("1.1", "a"), delta("1.2", "b"), block("1.3", "b", "1.2")]
    assert [item.data["text"] for item in normal_form(told)] == ["b", "a"]


def tool(cursor: str, status: str | None = None, type: str = "tool_call_update", /, **fields: Any) -> dict[str, Any]:
    said = {"tool_call_id": "c", **fields}
    return event(cursor, type, "t", **(said if status is None else {**said, "status": status}))


def test_a_tool_call_is_what_was_told_of_it_at_its_ending() -> None:
    live = [
        tool("1.1", "pending", "tool_call", title="ls"),
        tool("1.2", "in_progress"),
        tool("1.3", "completed", out=1),
    ]
    stored = [tool("1.3", "completed", "tool_call", title="ls", out=1)]
    whole = [Final("t", "tool_call", {"tool_call_id": "c", "title": "ls", "status": "completed", "out": 1})]
    assert normal_form(live) == normal_form(stored) == whole
    late = tool("1.4", None, out=2)
    assert normal_form([*live, late]) == normal_form([*stored, late]) != whole
    assert normal_form(live[:2])[0].data["status"] == "in_progress"


def test_a_deferred_call_goes_on_in_the_turn_that_resumes() -> None:
    live = [
        tool("1.1", "in_progress", "tool_call", title="ls"),
        tool("1.2", "deferred"),
        tool("2.1", None, out=1),
        tool("2.2", "completed"),
    ]
    stored = [
        tool("1.2", "deferred", "tool_call", title="ls"),
        tool("2.2", "completed", "tool_call", title="ls", out=1),
    ]
    assert normal_form(live) == normal_form(stored)
    assert [item.data["status"] for item in normal_form(live)] == ["deferred", "completed"]


@given(st.lists(st.text(min_size=1), min_size=1), st.data())
def test_whoever_leaves_and_comes_back_by_its_cursor_saw_the_same(texts: list[str], data: st.DataObject) -> None:
    frames = [delta(f"1.{n}", text) for n, text in enumerate(texts, 1)]
    closed = block(f"1.{len(texts) + 1}", "".join(texts), "1.1")
    seen = data.draw(st.integers(0, len(texts)))
    assert normal_form([*frames[:seen], closed]) == normal_form([*frames, closed]) == normal_form([closed])
    assert normal_form(frames[:seen]) == normal_form([block("1.99", "".join(texts[:seen]), "1.1")][: bool(seen)])
