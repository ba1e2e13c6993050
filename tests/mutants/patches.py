"""Patches of the product that a suite must find."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def patches(folder: str) -> list[Path]:
    """The mutants of one suite, by name."""
    return sorted((ROOT / "tests" / "mutants" / folder).glob("*.patch"))


def changed_by(patch: Path) -> list[str]:
    """The files that a mutant changes; it has to apply to the tree as it is."""
    ran = subprocess.run(
        ["git", "apply", "--check", str(patch)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=30
    )
    assert ran.returncode == 0, ran.stderr
    return [line[6:] for line in patch.read_text().splitlines() if line.startswith("+++ b/")]
