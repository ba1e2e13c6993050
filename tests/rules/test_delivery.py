"""What becomes of an entry, and what a stream may forget: the tables (DESIGN 3.9)."""

from __future__ import annotations

import pytest

from runner.rules.delivery import (
    LAST_NUMBER,
    START,
    Delivery,
    Move,
    Quota,
    before,
    entry_id,
    floor,
    has_room,
    may_forget_consumer,
    may_trim,
    move,
)

MAX = 5


@pytest.mark.parametrize(
    ("delivery", "expected"),
    [
        (Delivery(), Move.WRITE),
        (Delivery(deliveries=99), Move.WRITE),
        (Delivery(body=False), Move.COUNT_LOST),
        (Delivery(body=False, quota=Quota.UNKNOWN, refused=True), Move.COUNT_LOST),
        (Delivery(quota=Quota.OVER), Move.DROP),
        (Delivery(quota=Quota.UNKNOWN), Move.DEFER),
        (Delivery(quota=Quota.UNKNOWN, deliveries=99, others_commit=True), Move.DEFER),
        (Delivery(refused=True, deliveries=MAX - 1, others_commit=True), Move.DEFER),
        (Delivery(refused=True, deliveries=MAX, others_commit=False), Move.DEFER),
        (Delivery(refused=True, deliveries=99, others_commit=False), Move.DEFER),
        (Delivery(refused=True, deliveries=MAX, others_commit=True), Move.QUARANTINE),
    ],
)
def test_moves(delivery: Delivery, expected: Move) -> None:
    """Cases G7 and G8: what is given up, and when."""
    assert move(delivery, MAX) is expected


def test_ids() -> None:
    assert entry_id("12-3") == (12, 3) > entry_id("12-2") > entry_id("11-18446744073709551615")
    assert before((12, 3)) == (12, 2)
    assert before((12, 0)) == (11, LAST_NUMBER)
    assert before(START) == START
    with pytest.raises(ValueError, match="invalid literal"):
        entry_id("nothing")


@pytest.mark.parametrize(
    ("last", "pending", "expected"),
    [
        (START, [], START),
        ((9, 4), [], (9, 4)),
        ((9, 4), [(9, 4)], (9, 3)),
        ((9, 4), [(8, 0), (9, 1)], (7, LAST_NUMBER)),
    ],
)
def test_the_floor_is_below_whatever_is_pending(
    last: tuple[int, int], pending: list[tuple[int, int]], expected: tuple[int, int]
) -> None:
    assert floor(last, pending) == expected
    assert not any(may_trim(entry, expected) for entry in pending)


def test_a_full_stream_takes_nothing_more() -> None:
    assert has_room(0, 1, 10)
    assert has_room(9, 1, 10)
    assert not has_room(9, 2, 10)
    assert has_room(0, 11, 10)


def test_a_consumer_goes_only_with_empty_hands() -> None:
    """Case G9."""
    assert may_forget_consumer(0, 60, 60)
    assert not may_forget_consumer(0, 59, 60)
    assert not may_forget_consumer(1, 1e9, 60)
