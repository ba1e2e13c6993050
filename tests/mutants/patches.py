"""Patches of the product that a suite must find."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
COPIED: Final = ("runner", "sandboxes", "patches", "tests")


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


def copied(folder: Path, patch: Path | None) -> Path:
    """A copy of what the suites import, with a patch applied; ``folder`` is empty."""
    tree = folder / "tree"
    for name in COPIED:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(ROOT / "pyproject.toml", tree)
    if patch is not None:
        subprocess.run(["git", "apply", str(patch)], cwd=tree, check=True)
    return tree
