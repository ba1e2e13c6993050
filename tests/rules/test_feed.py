from __future__ import annotations

import pytest

from runner.rules.feed import Span, Start, format_position, parse_position, start

SPAN = Span((0, 4), (7, 2))


@pytest.mark.parametrize(
    ("after", "follow", "expected"),
    [
        (None, True, Start((7, 2))),
        (None, False, Start((0, 4))),
        ((0, 4), True, Start((0, 4))),
        ((3, 9), False, Start((3, 9))),
        ((7, 2), True, Start((7, 2))),
        ((0, 3), True, Start((0, 4), True)),
        ((7, 3), False, Start((0, 4), True)),
        ((8, 0), True, Start((0, 4), True)),
    ],
)
def test_where_a_reader_begins(after, follow: bool, expected: Start) -> None:
    assert start(after, follow, SPAN) == expected


@pytest.mark.parametrize("position", [(0, 0), (0, 17), (2**63 - 1, 2**63 - 1)])
def test_a_position_survives_its_text(position: tuple[int, int]) -> None:
    assert parse_position(format_position(position)) == position


@pytest.mark.parametrize(
    "text", ["", "1", "1.2", "-1-2", "1-", "01-2", "1-2 ", "1-2\n", "a-b", "1-9223372036854775808", "1-2-3", "１-2"]
)
def test_what_is_no_position(text: str) -> None:
    assert parse_position(text) is None
