"""What is missing in a history, by its records alone."""

from __future__ import annotations

import pytest

from runner.rules.history import Missing, Wholeness, overshot

Row = tuple[int, int, str | None, str]
BUSY: Row = (1, 1, None, "session_busy")
FIRST: list[Row] = [BUSY, (1, 2, "t1", "turn_admitted"), (1, 9, "t1", "message"), (1, 10, "t1", "done")]
SECOND: list[Row] = [(3, 1, "t2", "turn_admitted"), (3, 2, "t2", "user_message"), (3, 3, "t2", "done")]


def missing(rows: list[Row], pruned_to: tuple[int, int] | None = None, running: tuple[str, ...] = ()) -> list[str]:
    seen = Wholeness(pruned_to)
    for row in rows:
        seen.see(*row)
    return [str(item) for item in seen.missing(running)]


@pytest.mark.parametrize(
    ("rows", "lacks"),
    [
        ([], []),
        (FIRST + SECOND, []),
        ([(2, 1, "t1", "turn_admitted"), (2, 2, "t1", "done")], []),
        (FIRST[1:], ["begin"]),
        (FIRST + SECOND[1:], ["ending", "records"]),
        (FIRST[:-1], ["ending"]),
        (FIRST[:-1] + SECOND, ["ending"]),
        ([*FIRST[:-1], (2, 1, "t1", "error"), (2, 2, "t1", "done")], []),
        ([BUSY, *FIRST[2:]], ["ending"]),
        ([*FIRST, (1, 11, None, "session_idle")], []),
    ],
)
def test_what_is_missing(rows: list[Row], lacks: list[str]) -> None:
    assert missing(rows) == lacks


def test_what_retention_deleted_is_missing_at_the_begin_only() -> None:
    assert missing(SECOND, (1, 10)) == ["begin"]
    assert missing([(1, 11, None, "session_idle"), *SECOND], (1, 10)) == ["begin"]
    assert missing([(1, 10, "t1", "done"), *SECOND], (1, 9)) == ["begin"]
    assert missing([], (1, 10)) == ["begin"]


def test_a_turn_that_runs_needs_no_ending() -> None:
    assert missing(FIRST[:-1], running=("t1",)) == []
    assert missing(FIRST[:-1] + SECOND[:-1], running=("t2",)) == [Missing.ENDING]


@pytest.mark.parametrize(
    ("cursor", "lacks"), [((1, 9), ["records"]), ((3, 3), ["records"]), ((3, 4), []), ((0, 0), ["records"])]
)
def test_records_that_no_store_could_hold_are_missing_where_they_belong(
    cursor: tuple[int, int], lacks: list[str]
) -> None:
    seen = Wholeness()
    for row in FIRST + SECOND:
        seen.see(*row)
    seen.lost([cursor], (3, 3))
    assert seen.missing() == lacks


def test_what_was_lost_before_what_retention_deleted_is_no_news() -> None:
    seen = Wholeness((1, 10))
    seen.lost([(1, 9)], (3, 3))
    assert seen.missing() == ["begin"]


@pytest.mark.parametrize(
    ("found", "pruned_to", "expected"),
    [
        ((3, 17), None, False),
        ((3, 18), None, False),
        ((4, 1), None, True),
        (None, None, True),
        (None, (3, 16), True),
        (None, (3, 17), False),
        ((4, 1), (4, 0), False),
    ],
)
def test_who_has_seen_more_of_an_epoch_than_counts(found, pruned_to, expected) -> None:
    assert overshot((3, 17), found, pruned_to) is expected
