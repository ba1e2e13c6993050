"""What may be deleted because it is old (DESIGN 3.9)."""

from __future__ import annotations

import pytest

from runner.rules.retention import DAY_MS, GOING_ON, cutoff, expired, misses
from runner.terms import PromptState


def test_the_cutoff_counts_days_and_none_keeps_everything():
    assert cutoff(100 * DAY_MS, 30) == 70 * DAY_MS
    assert cutoff(100 * DAY_MS, 0) is None


@pytest.mark.parametrize(
    ("at", "goes_on", "ended_at", "prompt", "may_go"),
    [
        (99, False, 99, "done", True),
        (99, False, None, None, True),
        (99, False, None, "cancelled", True),
        (100, False, None, None, False),
        (99, False, 100, "done", False),
        (99, True, None, "active", False),
        (99, True, None, None, False),
        (99, False, 99, "active", False),
        (99, False, None, "queued", False),
        (99, False, 99, "failed", True),
    ],
)
def test_what_may_go(at, goes_on, ended_at, prompt, may_go):
    assert expired(100, at, turn_goes_on=goes_on, turn_ended_at=ended_at, prompt=prompt) is may_go


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
