"""ACP updates to our events (DESIGN 4.1): nothing raises, nothing is lost without a notice."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.acp.updates import NOTICE_BYTES, grouped, tool_of
from runner.terms import EventType


def message(text: str, message_id: Any = None, kind: str = "agent_message_chunk") -> dict[str, Any]:
    update: dict[str, Any] = {"sessionUpdate": kind, "content": {"type": "text", "text": text}}
    if message_id is not None:
        update["messageId"] = message_id
    return update


def one(update: dict[str, Any]) -> tuple[str, str | None, Any]:
    [group] = grouped([update])
    return group


def test_runs_of_text_are_one_group() -> None:
    batch = [
        message("a"),
        message("b"),
        message("t", kind="agent_thought_chunk"),
        message("c", "m1"),
        message("d", "m1"),
        message("e", "m2"),
        message("f"),
        {"sessionUpdate": "tool_call", "toolCallId": "t1", "title": "run"},
        message(""),
    ]
    assert list(grouped(batch)) == [
        ("message", None, ["a", "b"]),
        ("thought", None, ["t"]),
        ("message", "m1", ["c", "d"]),
        ("message", "m2", ["e"]),
        ("message", None, ["f"]),
        ("tool", None, {"tool_call_id": "t1", "title": "run"}),
        ("message", None, [""]),
    ]


@pytest.mark.parametrize("message_id", [5, {"a": 1}, True])
def test_a_senseless_message_id_is_none(message_id: Any) -> None:
    assert list(grouped([message("a", message_id), message("b"), message("c", message_id)])) == [
        ("message", None, ["a", "b", "c"])
    ]


def test_a_tool_call_has_our_names_and_only_what_was_given() -> None:
    whole = {
        "sessionUpdate": "tool_call",
        "toolCallId": "t1",
        "title": "ls",
        "kind": "execute",
        "status": "pending",
        "rawInput": {"command": "ls"},
        "rawOutput": "x",
        "content": [{"type": "content", "content": {"type": "text", "text": "x"}}],
        "locations": [{"path": "/a", "line": 1}],
        "_meta": {"vendor": 1},
    }
    assert one(whole) == (
        "tool",
        None,
        {
            "tool_call_id": "t1",
            "title": "ls",
            "kind": "execute",
            "status": "pending",
            "raw_input": {"command": "ls"},
            "content": whole["content"],
            "locations": whole["locations"],
            "raw_output": "x",
        },
    )
    patch = {"sessionUpdate": "tool_call_update", "toolCallId": "t1", "status": "completed", "title": None}
    assert one(patch)[2] == {"tool_call_id": "t1", "status": "completed"}


@pytest.mark.parametrize("given_call", [None, [], "t1", {}, {"toolCallId": 5}])
def test_a_tool_call_without_an_id_is_none(given_call: Any) -> None:
    assert tool_of(given_call) is None


@pytest.mark.parametrize(
    ("update", "event", "data"),
    [
        ({"sessionUpdate": "plan", "entries": [{"content": "a"}]}, "plan", {"entries": [{"content": "a"}]}),
        (
            {"sessionUpdate": "usage_update", "used": 1, "size": 2, "cost": {"amount": 1}, "x": 1},
            "usage",
            {"used": 1, "size": 2, "cost": {"amount": 1}},
        ),
        ({"sessionUpdate": "usage_update", "used": 0, "cost": None}, "usage", {"used": 0}),
        ({"sessionUpdate": "current_mode_update", "currentModeId": "plan"}, "session_info", {"mode": "plan"}),
        ({"sessionUpdate": "config_option_update", "configOptions": []}, "session_info", {"config_options": []}),
        (
            {"sessionUpdate": "available_commands_update", "availableCommands": []},
            "session_info",
            {"available_commands": []},
        ),
        ({"sessionUpdate": "session_info_update", "title": "T", "_meta": {}}, "session_info", {"title": "T"}),
    ],
)
def test_the_other_kinds(update: dict[str, Any], event: str, data: dict[str, Any]) -> None:
    assert one(update) == (event, None, data)


def test_what_the_user_said_is_ours_already() -> None:
    """Case G13, the live half: an echo of the prompt is no answer."""
    assert list(grouped([message("hi", kind="user_message_chunk")])) == []


@pytest.mark.parametrize(
    "update",
    [
        {"sessionUpdate": "compaction_update", "x": 1},
        {"sessionUpdate": "oversized_line", "bytes": 5},
        {"sessionUpdate": "agent_message_chunk", "content": {"type": "image", "data": "aGk=", "mimeType": "image/png"}},
        {"sessionUpdate": "agent_message_chunk", "content": {"type": "resource_link", "uri": "file:///x", "name": "x"}},
        {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": 5}},
        {"sessionUpdate": "agent_message_chunk", "content": {"text": "no type"}},
        {"sessionUpdate": "agent_message_chunk", "content": "text"},
        {"sessionUpdate": "agent_message_chunk"},
        {"sessionUpdate": "tool_call", "title": "no id"},
        {"sessionUpdate": "plan", "entries": "x"},
        {"sessionUpdate": "usage_update"},
        {"sessionUpdate": "current_mode_update"},
        {"sessionUpdate": "config_option_update", "configOptions": None},
        {"sessionUpdate": "available_commands_update", "availableCommands": 5},
        {"sessionUpdate": ["tool_call"]},
        {"sessionUpdate": {}},
        {"sessionUpdate": None},
        {},
    ],
    ids=repr,
)
def test_what_we_cannot_use_is_a_notice(update: dict[str, Any]) -> None:
    """Case E10: unknown kinds, other content than text, and malformed updates."""
    name = update.get("sessionUpdate")
    kind = name if isinstance(name, str) else "unknown"
    assert one(update) == ("notice", None, {"kind": kind, "update": update})


def test_a_notice_is_bounded() -> None:
    update = {"sessionUpdate": "x" * 1000, "data": "y" * NOTICE_BYTES}
    assert one(update) == ("notice", None, {"kind": "x" * 100, "truncated": True})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
kinds = st.sampled_from(
    [
        "agent_message_chunk",
        "agent_thought_chunk",
        "user_message_chunk",
        "tool_call",
        "tool_call_update",
        "plan",
        "usage_update",
        "current_mode_update",
        "config_option_update",
        "available_commands_update",
        "session_info_update",
    ]
)
names = ["content", "messageId", "toolCallId", "title", "status", "entries", "used", "currentModeId", "_meta", "type"]
any_updates = st.builds(
    lambda kind, members: {"sessionUpdate": kind, **members},
    kinds | json_values,
    st.dictionaries(st.sampled_from(names), json_values, max_size=4),
)
texts = st.builds(message, st.text(max_size=4), st.none() | st.sampled_from(["m1", "m2"]))


@settings(max_examples=200)
@given(st.lists(any_updates | texts, max_size=8))
def test_nothing_raises_and_text_is_exact(batch: list[dict[str, Any]]) -> None:
    before = repr(batch)
    groups = list(grouped(batch))
    assert repr(batch) == before
    said = [
        update["content"]["text"]
        for update in batch
        if update.get("sessionUpdate") == "agent_message_chunk"
        and isinstance(update.get("content"), dict)
        and update["content"].get("type") == "text"
        and isinstance(update["content"].get("text"), str)
    ]
    assert [text for kind, _, payload in groups if kind == "message" for text in payload] == said
    for kind, message_id, payload in groups:
        assert kind in ("message", "thought", "tool") or EventType(kind)
        assert message_id is None or isinstance(message_id, str)
        if kind == "notice":
            assert len(orjson.dumps(payload["kind"])) < 500
