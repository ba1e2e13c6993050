"""Identifiers, cursors and instants: what is valid, what is derived, what comes back as it went."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.clock import SystemClock, parse_rfc3339, rfc3339
from runner.ids import Ids, format_cursor, outside_of, parse_cursor, record_id, valid_id


def test_an_id_is_minted_from_the_chance_that_is_given():
    assert Ids(lambda n: bytes(range(n))).mint("turn") == "turn_000102030405060708090a0b"
    assert len({Ids().mint("turn") for _ in range(1000)}) == 1000
    assert valid_id(Ids().mint("turn"))


@pytest.mark.parametrize("text", ["a", "A-z_09", "x" * 128, "-", "_"])
def test_valid_ids(text: str):
    assert valid_id(text)


@pytest.mark.parametrize("text", ["", "x" * 129, "a b", "a\n", "a/b", "..", "a.b", "ä", "\u0661", "a\0", "é"])
def test_invalid_ids(text: str):
    assert not valid_id(text)


def test_a_record_id_is_a_function_of_session_turn_and_number():
    assert record_id("s", "t", 1) == record_id("s", "t", 1) == "rec_" + record_id("s", "t", 1)[4:]
    ids = {record_id(s, t, n) for s in ("a", "ab") for t in ("b", "bc", "c") for n in (1, 2, 11)}
    assert len(ids) == 18


def test_what_stands_for_no_turn_can_be_no_turn():
    assert not valid_id(outside_of(3))
    assert outside_of(3) != outside_of(4)


@given(st.integers(0, 10**16 - 1), st.integers(0, 10**16 - 1))
def test_a_cursor_comes_back(epoch: int, n: int):
    assert parse_cursor(format_cursor(epoch, n)) == (epoch, n)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "1.",
        ".1",
        "1.2.3",
        "01.2",
        "1.02",
        "-1.2",
        "1.-2",
        "+1.2",
        "1.2 ",
        "1.2\n",
        "\u0661.2",
        "1" * 17 + ".1",
    ],
)
def test_what_is_no_cursor(text: str):
    assert parse_cursor(text) is None


MOMENTS = st.integers(0, 4_102_444_800_000)


@given(MOMENTS)
def test_an_instant_comes_back_to_the_millisecond(ms: int):
    assert parse_rfc3339(rfc3339(ms)) == ms


@given(st.lists(MOMENTS, min_size=2, max_size=5))
def test_instants_sort_as_text_whatever_order_they_were_made_in(moments: list[int]):
    texts = [rfc3339(ms) for ms in moments]
    assert sorted(texts) == [rfc3339(ms) for ms in sorted(moments)]
    assert all(len(text) == 24 and text.endswith("Z") for text in texts)


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("2026-01-01T00:00:00.001Z", 1_767_225_600_001),
        ("2026-01-01T02:00:00+02:00", 1_767_225_600_000),
        ("2026-01-01T00:00:00.123999Z", 1_767_225_600_123),
    ],
)
def test_instants_of_others(text: str, ms: int):
    assert parse_rfc3339(text) == ms


@pytest.mark.parametrize("text", ["", "yesterday", "2026-01-01", "2026-01-01T00:00:00", "2026-13-01T00:00:00Z"])
def test_what_is_no_instant(text: str):
    with pytest.raises(ValueError, match=r".+"):
        parse_rfc3339(text)


async def test_the_real_clock_reads_the_loops_time_and_the_wall():
    clock = SystemClock()
    assert clock.monotonic() == pytest.approx(asyncio.get_running_loop().time(), abs=5)
    assert clock.now_ms() == pytest.approx(time.time() * 1000, abs=5000)
    assert rfc3339(clock.now_ms())[:2] == str(datetime.now(UTC).year)[:2]
