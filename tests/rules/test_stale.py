"""What is made of a prompt frame whose fate the agent does not tell."""

from __future__ import annotations

from itertools import product

import pytest

from runner.errors import RunnerError
from runner.rules.stale import gone, stale


@pytest.mark.parametrize("facts", list(product([True, False], repeat=5)))
def test_only_a_bare_answer_behind_a_cancel_is_stale(facts: tuple[bool, ...]) -> None:
    behind, *others = facts
    stopping, updated, usage, error = others
    found = stale(behind_cancel=behind, stopping=stopping, updated=updated, usage=usage, error=error)
    assert found == (behind and not any(others))


@pytest.mark.parametrize(
    ("code", "cut", "updated", "found"),
    [
        ("harness_exited", True, False, "delivery_unknown"),
        ("sandbox_lost", True, False, "delivery_unknown"),
        ("sandbox_lost", False, False, "sandbox_lost"),
        ("harness_exited", True, True, "harness_exited"),
        ("harness_exited", False, False, "harness_exited"),
        ("harness_unresponsive", True, False, "harness_unresponsive"),
    ],
)
def test_a_frame_that_was_cut_off_may_have_been_read(code: str, cut: bool, updated: bool, found: str) -> None:
    assert gone(RunnerError(code, "It ended."), cut=cut, updated=updated).code == found
