from __future__ import annotations

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from runner.wire.codec import (
    PING,
    EventFormatter,
    clean_text,
    event_line,
    last_cursor,
    result_line,
    to_json,
    to_sse,
)

AT = "2026-11-29T16:09:53.123Z"
texts = st.lists(st.text(alphabet=st.sampled_from(list('",\\[]\na\x00é\u2028😀\ud800\udc00')), max_size=6), max_size=6)


def test_an_event_line_is_the_object_of_the_contract() -> None:
    line = event_line("3.17", "t", None, AT, "done", b'{"x":1}')
    assert line.endswith(b"}\n")
    assert orjson.loads(line) == {
        "kind": "event",
        "cursor": "3.17",
        "turn_id": "t",
        "prompt_id": None,
        "at": AT,
        "type": "done",
        "data": {"x": 1},
    }


def test_without_a_cursor_the_member_is_left_out() -> None:
    event = orjson.loads(event_line(None, None, "p", AT, "error", b"{}"))
    assert "cursor" not in event
    assert event["turn_id"] is None


def test_a_formatter_writes_the_same_bytes() -> None:
    formatter = EventFormatter("t", "p")
    assert formatter.line("3.17", AT, "done", b"{}") == event_line("3.17", "t", "p", AT, "done", b"{}")


@given(texts.filter(bool))
def test_deltas_keep_every_text(parts: list[str]) -> None:
    """Many at once are the same bytes as one by one, and fit into one line; no lone surrogate raises."""
    formatter = EventFormatter("t", "p")
    lines, short = formatter.deltas(3, 7, AT, "message_delta", 'm"\\', parts)
    single = [
        event_line(f"3.{n}", "t", "p", AT, "message_delta", to_json({"message_id": 'm"\\', "text": text}))
        for n, text in enumerate(parts, start=7)
    ]
    assert lines == b"".join(single)
    whole = [clean_text(text) for text in parts]
    assert [orjson.loads(line)["data"]["text"] for line in single] == whole
    data = {"message_id": 'm"\\', "texts": parts}
    assert short == event_line("3.7", "t", "p", AT, "message_delta", to_json(data))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    )
)
def test_any_json_value_can_be_written(value: Any) -> None:
    orjson.loads(to_json(value))


def test_what_json_cannot_hold_is_replaced() -> None:
    assert to_json({"a\ud800": 2**70, "b": "\udc00x", "c": float("nan")}) == (
        b'{"a\xef\xbf\xbd":1.1805916207174113e+21,"b":"\xef\xbf\xbdx","c":null}'
    )
    deep: Any = 1
    for _ in range(2000):
        deep = [deep]
    assert b'["\xe2\x80\xa6"]' in to_json(deep)
    assert to_json(10**400) == b"null"


def test_a_result_line() -> None:
    assert (
        result_line({"ok": True, "text": "\ud800"}) == b'{"kind":"result","result":{"ok":true,"text":"\xef\xbf\xbd"}}\n'
    )


def test_server_sent_events_carry_the_same_objects() -> None:
    one = event_line("3.1", "t", "p", AT, "message_delta", b'{"text":"a"}')
    bare = event_line(None, None, "p", AT, "error", b"{}")
    shown = to_sse(one + PING + bare + result_line({"ok": True}))
    frames = shown.split(b"\n\n")
    assert frames[0] == b"id: 3.1\ndata: " + one.rstrip()
    assert frames[1] == b": ping"
    assert frames[2] == b"data: " + bare.rstrip()
    assert frames[3].startswith(b'data: {"kind":"result"')
    assert frames[4] == b""


def test_a_carriage_return_between_tokens_cannot_break_a_frame() -> None:
    assert b"\r" not in to_sse(event_line("1.1", None, None, AT, "plan", b'{\r"x": 1}'))


def test_the_last_cursor_of_a_batch() -> None:
    one = event_line("3.1", "t", "p", AT, "plan", b"{}")
    two = event_line("3.2", "t", "p", AT, "plan", to_json({"text": '{"kind":"event","cursor":"9.9"}'}))
    assert last_cursor(one + two) == "3.2"
    assert last_cursor(PING) is None
    assert last_cursor(one + PING) == "3.1"


def test_a_reader_goes_on_from_what_a_resync_tells() -> None:
    """It was told to forget what it had: the cursor before is none to come back by."""
    seen = event_line("3.1", "t", "p", AT, "plan", b"{}")
    forget = event_line(None, None, None, AT, "resync", b'{"from":"0.0"}')
    assert last_cursor(seen + forget) == "0.0"
    assert last_cursor(forget + seen) == "3.1"
    assert to_sse(forget) == b"id: 0.0\ndata: " + forget + b"\n"
    nowhere = event_line(None, None, None, AT, "resync", b'{"from":null,"reason":"slow"}')
    assert last_cursor(seen + nowhere) == "3.1"
    assert to_sse(nowhere) == b"data: " + nowhere + b"\n"


def test_what_an_agent_nests_is_no_cursor() -> None:
    """Else an agent could move its readers."""
    nested = b'{"raw_input":{"kind":"event","cursor":"9.9"},"kind":{"type":"resync","data":{"from":"8.8"}}}'
    assert last_cursor(event_line("3.1", "t", "p", AT, "tool_call", nested)) == "3.1"
    assert last_cursor(event_line(None, "t", "p", AT, "error", nested)) is None
