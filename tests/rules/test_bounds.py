"""What is too large is cut, and says so; what fits is left as it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.redaction import Redactor
from runner.rules.bounds import TITLE_CHARS, VALUE_BYTES, WORD_CHARS, bounded, cut, word

ROOM = VALUE_BYTES * 5 // 4 + 1000


def dumped(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def fit(value: Any) -> Any:
    return bounded(value, dumped(value), lambda whole: whole)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("short", "short"),
        ("x" * TITLE_CHARS, "x" * TITLE_CHARS),
        ("x" * 1_000_000, "x" * TITLE_CHARS + "…[truncated: 1000000 characters]"),
    ],
)
def test_a_title(text: str, expected: str):
    assert cut(text, TITLE_CHARS) == expected


def test_an_id_is_short_and_two_stay_two():
    assert word("call_1") == "call_1"
    assert word("a\0b") == "a\ufffdb"
    long = [word("x" * 1_000_000 + end) for end in "ab"]
    assert [len(each) for each in long] == [WORD_CHARS] * 2
    assert long[0] != long[1]
    assert word(long[0]) == long[0], "what is cut is not cut again"


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ({"output": "x" * 10_000_000, "exit_code": 1}, {"exit_code": 1}),
        ({"a": "x" * 600_000, "b": "y" * 600_000, "path": "f"}, {"path": "f"}),
        ({"deep": [{"text": "é" * 2_000_000}], "n": None}, {"n": None}),
    ],
)
def test_an_object_keeps_its_shape_and_its_small_members(value: dict[str, Any], kept: dict[str, Any]):
    fitted = fit(value)
    assert len(dumped(fitted)) <= ROOM
    assert fitted["truncated"] is True
    assert fitted["bytes"] == len(dumped(value))
    assert fitted | kept == fitted
    assert next(iter(fitted)) == "truncated", "the marker is not what is left out when it is cut again"
    long = next(iter(value.values()))
    if isinstance(long, str):
        text = fitted[next(iter(value))]
        assert text.endswith(f"…[truncated: {len(long)} characters]")
        assert long.startswith(text.partition("…")[0])


def test_a_list_says_what_is_left_out():
    value = [{"type": "content", "content": {"type": "text", "text": str(n) * 50_000}} for n in range(100)]
    fitted = fit(value)
    assert len(dumped(fitted)) <= ROOM
    assert fitted[0] == value[0]
    assert fitted[-1]["type"] == "truncated"
    assert fitted[-1]["truncated"] is True
    kept = len(fitted) - 2
    assert fitted[-2] == {"type": "left_out", "left_out": len(value) - kept}


def test_a_text_ends_with_its_marker():
    fitted = fit("x" * 5_000_000)
    assert len(fitted) < VALUE_BYTES
    assert "…[truncated: 5000002 bytes, sha256 " in fitted


def test_values_that_begin_alike_stay_different():
    """An approval covers the exact arguments, also those that are not shown."""
    for make in (
        lambda end: "x" * 5_000_000 + end,
        lambda end: {"a": "x" * 5_000_000 + end},
        lambda end: ["x"] * 900_000 + [end],
    ):
        assert fit(make("a")) != fit(make("b"))


def test_half_of_a_secret_is_never_what_is_left():
    """What a cut leaves of it could not be recognised any more."""
    secret = "sk-live-12345"
    redactor = Redactor([secret])
    for value in (
        "x" * (VALUE_BYTES // 4 - 205) + secret * 100_000,
        {"a": "x" * (VALUE_BYTES // 4 - 5) + secret * 100_000, "k" * 195 + secret: 1},
        ["x" * (VALUE_BYTES // 4 - n) + secret * 20_000 for n in range(13)],
    ):
        fitted = dumped(bounded(value, redactor.text(dumped(value).decode()).encode(), redactor.tree)).decode()
        assert "sk-" not in fitted


def test_what_is_nested_too_deep_ends():
    value: Any = "x" * 2_000_000
    for _ in range(500):
        value = {"a": value}
    assert len(dumped(fit(value))) < 2000


CHARACTERS = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(CHARACTERS, max_size=50),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(CHARACTERS, max_size=20), inner, max_size=8),
    max_leaves=40,
)


@given(JSON)
def test_whatever_it_is_the_answer_is_json_with_a_marker(value: Any):
    """Small values too: what has room is kept whole beside the marker."""
    fitted = fit(value)
    assert b"truncated" in dumped(fitted)
    if isinstance(value, list):
        assert fitted[:-1] == value
