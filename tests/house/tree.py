"""The files of the checkout, as the tests of the house see them."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = {".git", ".venv", ".cache", "__pycache__", "node_modules", "build", "dist", ".hypothesis"}


@cache
def files() -> tuple[Path, ...]:
    """Every file that is or will be committed; without git (an unpacked archive) every file that is not a cache."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0:
        found = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    else:
        found = [path for path in ROOT.rglob("*") if not SKIPPED & set(path.relative_to(ROOT).parts)]
    return tuple(sorted(path for path in found if path.is_file()))


def below(*folders: str, suffix: str = "") -> list[Path]:
    """The files below some top-level folders, by the end of their name."""
    return [path for path in files() if path.relative_to(ROOT).parts[0] in folders and path.name.endswith(suffix)]
