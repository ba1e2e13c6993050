"""What a follower's replica is sent next."""

from __future__ import annotations

import pytest

from runner.rules.following import Place, known_of, sent_next


@pytest.mark.parametrize(
    ("place", "oldest", "expected"),
    [
        (Place("", 0), 0, "begin"),
        (Place("other", 9, lost=True), 0, "begin"),
        (Place("s", 5), 0, "go on"),
        (Place("s", 5), 9, "go on"),
        (Place("s", 5, lost=True), 5, "rewind"),
        (Place("s", 5, lost=True), 0, "rewind"),
        (Place("s", 5, lost=True), 6, "begin"),
    ],
)
def test_what_is_sent_next(place: Place, oldest: int, expected: str) -> None:
    assert sent_next(place, "s", oldest) == expected


@pytest.mark.parametrize(
    ("needed", "first", "count", "known"),
    [(5, 5, 3, 0), (5, 5, 0, 0), (5, 3, 3, 2), (5, 1, 3, 3), (5, 2, 3, 3), (5, 6, 1, None), (5, 6, 0, None)],
)
def test_what_is_known_of_what_arrives(needed: int, first: int, count: int, known: int | None) -> None:
    assert known_of(needed, first, count) == known
