"""The faults that the simulation must find are patches of the product: each still applies (``--mutants`` runs them)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = sorted((ROOT / "tests" / "mutants" / "session_control").glob("*.patch"))


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
    ran = subprocess.run(
        ["git", "apply", "--check", str(patch)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=30
    )
    assert ran.returncode == 0, ran.stderr
    changed = [line[6:] for line in patch.read_text().splitlines() if line.startswith("+++ b/")]
    assert changed
    assert all(name.startswith("runner/") for name in changed)
