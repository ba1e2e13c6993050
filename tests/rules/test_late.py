"""Which records come too late (DESIGN 3.9)."""

from __future__ import annotations

import pytest

from runner.rules.late import Late, Standing, asked_late, late

GOES_ON, OVER = Standing(3, ended=False), Standing(3, ended=True)


@pytest.mark.parametrize(
    ("turn_id", "epoch", "turn", "newest", "head", "verdict"),
    [
        ("t", 3, GOES_ON, 3, 3, None),
        ("t", 3, GOES_ON, 3, 9, None),
        ("t", 3, OVER, 3, 3, Late.TURN_ENDED),
        ("t", 4, OVER, 3, 3, Late.TURN_ENDED),
        ("t", 3, None, 3, 3, Late.TURN_UNKNOWN),
        ("t", 1, None, 0, 0, Late.TURN_UNKNOWN),
        ("t", 3, GOES_ON, 4, 4, Late.STALE_EPOCH),
        ("t", 2, GOES_ON, 3, 3, Late.STALE_EPOCH),
        ("t", 4, GOES_ON, 3, 3, Late.STALE_EPOCH),
        (None, 0, None, 0, 0, None),
        (None, 3, None, 3, 3, None),
        (None, 4, None, 3, 3, None),
        (None, 2, None, 3, 0, Late.STALE_EPOCH),
        (None, 3, None, 3, 4, Late.STALE_EPOCH),
    ],
)
def test_what_is_late(turn_id, epoch, turn, newest, head, verdict):
    assert late(turn_id, epoch, turn, newest, head) is verdict


@pytest.mark.parametrize(
    ("turn_id", "turn", "newest", "head", "verdict"),
    [
        ("t", None, 0, 3, Late.SESSION_DELETED),
        (None, None, 0, 3, Late.SESSION_DELETED),
        (None, None, 0, 0, Late.SESSION_DELETED),
        ("t", None, 3, 3, Late.TURN_UNKNOWN),
        ("t", OVER, 3, 3, Late.TURN_ENDED),
        ("t", GOES_ON, 3, 3, None),
        (None, None, 3, 3, None),
    ],
)
def test_a_session_that_ended_is_deleted_once_it_has_no_turn(turn_id, turn, newest, head, verdict):
    assert late(turn_id, 3, turn, newest, head, ended=True) is verdict


@pytest.mark.parametrize(
    ("turn", "newest", "too_late"),
    [
        (GOES_ON, 3, False),
        (Standing(3, ended=True, paused=True), 3, False),
        (Standing(3, ended=True, paused=True), 4, True),
        (OVER, 3, True),
        (GOES_ON, 4, True),
        (None, 3, True),
        (None, 0, True),
    ],
)
def test_who_may_still_ask(turn, newest, too_late):
    assert asked_late(turn, newest) is too_late
