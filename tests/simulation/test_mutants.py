"""The faults that the simulation must find are patches of the product: each still applies (``--mutants`` runs them)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.patches import changed_by, patches

MUTANTS = patches("session_control")


def test_there_is_one_for_each_promise() -> None:
    assert [patch.stem for patch in MUTANTS] == [
        "act_by_session_key",
        "beat_resurrects_settled_turn",
        "evict_busy",
        "release_by_session_key",
        "terminal_not_compare_and_set",
        "unlabelled_park",
    ]


@pytest.mark.parametrize("patch", MUTANTS, ids=lambda patch: patch.stem)
def test_a_mutant_applies_to_the_product(patch: Path) -> None:
    changed = changed_by(patch)
    assert changed
    assert all(name.startswith("runner/") for name in changed)
