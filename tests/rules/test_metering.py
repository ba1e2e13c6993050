"""Tokens, read from answers of three protocols while they pass."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.rules.metering import MOST_BYTES, BodyMeter, tokens_of

SSE = "text/event-stream; charset=utf-8"


def events(*payloads: Any, end: str = "\n") -> bytes:
    return b"".join(f"event: e{end}data: {json.dumps(one)}{end}{end}".encode() for one in payloads)


ANTHROPIC = events(
    {
        "type": "message_start",
        "message": {"usage": {"input_tokens": 11, "output_tokens": 1, "cache_read_input_tokens": 5}},
    },
    {"type": "content_block_delta", "delta": {"text": 'she said "usage"'}},
    {"type": "message_delta", "delta": {}, "usage": {"input_tokens": 0, "output_tokens": 7}},
    {"type": "message_stop"},
)
CHAT = (
    events(
        {"choices": [{"delta": {"content": "hi"}}], "usage": None},
        {
            "choices": [],
            "usage": {"prompt_tokens": 11, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}},
        },
    )
    + b"data: [DONE]\n\n"
)
RESPONSES = events(
    {"type": "response.created", "response": {"usage": None}},
    {
        "type": "response.completed",
        "response": {
            "usage": {
                "input_tokens": 11,
                "input_tokens_details": {"cached_tokens": 4},
                "output_tokens": 7,
                "output_tokens_details": {"reasoning_tokens": 2},
            }
        },
    },
    end="\r\n",
)
STREAMS = {
    "anthropic": (ANTHROPIC, {"input": 11, "output": 7, "cached_read": 5}),
    "chat": (CHAT, {"input": 7, "output": 7, "cached_read": 4}),
    "responses": (RESPONSES, {"input": 7, "output": 5, "cached_read": 4, "thought": 2}),
}


@pytest.mark.parametrize("name", STREAMS)
@given(data=st.data())
def test_a_stream_counts_the_same_wherever_it_is_cut(name: str, data: st.DataObject) -> None:
    body, expected = STREAMS[name]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=6)))
    meter = BodyMeter(SSE)
    for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
        meter.feed(body[start:end])
    assert meter.end() == expected


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (
            {"input_tokens": 1, "output_tokens": 2, "cache_creation_input_tokens": 3},
            {"input": 1, "output": 2, "cached_write": 3},
        ),
        ({"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}, {"input": 5, "output": 2}),
        ({"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 9}}, {"input": 0, "cached_read": 9}),
        ({"prompt_tokens": 5, "prompt_tokens_details": None}, {"input": 5}),
        ({"input_tokens": -1, "output_tokens": "7"}, {}),
        ({"input_tokens": True, "output_tokens": 2**60}, {}),
        ({}, {}),
        (None, {}),
        ([1], {}),
        ("text", {}),
    ],
)
def test_one_usage_object(usage: Any, expected: dict[str, int]) -> None:
    assert tokens_of(usage) == expected


def test_a_whole_object() -> None:
    meter = BodyMeter("application/json")
    body = json.dumps({"id": "x", "usage": {"input_tokens": 11, "output_tokens": 7}}).encode()
    meter.feed(body[:9])
    meter.feed(body[9:])
    assert meter.end() == {"input": 11, "output": 7}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/json", b"{"),
        ("application/json", b"[]"),
        ("application/json", b"\xff"),
        ("application/json", b"[" * 100_000),
        (SSE, b'data: {"usage": \n\n'),
        (SSE, b'data: {"usage": "x"}\n\n'),
        (SSE, b'event: {"usage": {"output_tokens": 1}}\n\n'),
        ("text/plain", b'{"usage": {"output_tokens": 1}}'),
        ("", b'{"usage": {"output_tokens": 1}}'),
    ],
)
def test_what_is_not_understood_counts_nothing(kind: str, body: bytes) -> None:
    meter = BodyMeter(kind)
    meter.feed(body)
    assert meter.end() == {}


@pytest.mark.parametrize("kind", [SSE, "application/json"])
def test_no_more_is_kept_than_its_bound(kind: str) -> None:
    """Of a stream the next line counts again."""
    meter = BodyMeter(kind)
    meter.feed(b'data: {"usage": {"output_tokens": 1}, "text": "')
    for _ in range(9):
        meter.feed(b"x" * (MOST_BYTES // 8))
        assert len(meter._kept) <= MOST_BYTES
    meter.feed(b'"}\n\ndata: {"usage": {"output_tokens": 2}}\n')
    assert meter.end() == ({"output": 2} if kind == SSE else {})


def test_the_last_line_needs_no_end() -> None:
    meter = BodyMeter(SSE)
    meter.feed(b'data: {"usage": {"output_tokens": 1}}')
    assert meter.end() == {"output": 1}
