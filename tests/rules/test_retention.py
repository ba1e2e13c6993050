"""What may be deleted because it is old (DESIGN 3.9)."""

from __future__ import annotations

import pytest

from runner.rules.retention import DAY_MS, GOING_ON, cutoff, expired, misses
from runner.terms import PromptState


def test_the_cutoff_counts_days_and_none_keeps_everything():
    assert cutoff(100 * DAY_MS, 30) == 70 * DAY_MS
    assert cutoff(100 * DAY_MS, 0) is None


@pytest.mark.parametrize(
    ("at", "goes_on", "ended_at", "prompt", "busy", "may_go"),
    [
        (99, False, 99, "done", False, True),
        (99, False, None, None, False, True),
        (99, False, None, "cancelled", False, True),
        (100, False, None, None, False, False),
        (99, False, 100, "done", False, False),
        (99, True, None, "active", False, False),
        (99, True, None, None, False, False),
        (99, False, 99, "active", False, False),
        (99, False, None, "queued", False, False),
        (99, False, 99, "failed", False, True),
        (99, False, None, None, True, False),
    ],
)
def test_what_may_go(at, goes_on, ended_at, prompt, busy, may_go):
    of_turn = {"turn_goes_on": goes_on, "turn_ended_at": ended_at}
    assert expired(100, at, **of_turn, prompt=prompt, outside_of_busy_session=busy) is may_go


def test_a_prompt_goes_on_until_it_is_over():
    assert {PromptState.QUEUED, PromptState.ACTIVE} == GOING_ON


@pytest.mark.parametrize(
    ("after", "pruned_to", "misses_some"),
    [
        ((1, 2), None, False),
        (None, None, False),
        (None, (1, 1), True),
        ((1, 2), (1, 3), True),
        ((1, 3), (1, 3), False),
        ((2, 1), (1, 3), False),
    ],
)
def test_who_misses_something(after, pruned_to, misses_some):
    assert misses(after, pruned_to) is misses_some
