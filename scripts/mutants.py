"""Applies each mutant of the prompts to a copy of the tree; a scenario has to fail in it, else the mutant survives."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
MUTANTS: Final = ROOT / "tests" / "mutants" / "prompts"
COPIED: Final = ("runner", "sandboxes", "tests", "pyproject.toml")
SCENARIOS: Final = ("-p", "no:cacheprovider", "-x", "-q", "-k", "prompt_abort", "tests/session/prompt_abort")
SECONDS: Final = 300
FAILED: Final = re.compile(r"^FAILED \S+::(\S+)", re.MULTILINE)
TESTS_FAILED: Final = 1
"""pytest's exit code for that; any other one says nothing about the mutant."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these (all)")
    names = parser.parse_args().names
    patches = [patch for patch in sorted(MUTANTS.glob("*.patch")) if not names or patch.stem in names]
    if scenario := killer(None):
        print(f"the scenarios fail without any mutant: {scenario}")
        return 1
    killed = 0
    for patch in patches:
        scenario = killer(patch)
        killed += scenario is not None
        print(f"{patch.stem}: {f'killed by {scenario}' if scenario else 'SURVIVES'}", flush=True)
    print(f"{killed} of {len(patches)} killed")
    return 0 if killed == len(patches) else 1


def killer(patch: Path | None) -> str | None:
    """The first scenario that fails with the patch applied; None when all are green."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        copy_tree(tree)
        if patch is not None:
            subprocess.run(["git", "apply", str(patch)], cwd=tree, check=True)
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", *SCENARIOS],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
    if ran.returncode == 0:
        return None
    found = FAILED.search(ran.stdout)
    if ran.returncode != TESTS_FAILED or found is None:
        raise SystemExit(f"{patch.stem if patch else 'no mutant'}: pytest did not run\n{ran.stdout}{ran.stderr}")
    return found[1]


def copy_tree(tree: Path) -> None:
    """What the scenarios need of the product."""
    ignored = shutil.ignore_patterns("__pycache__", "*.patch")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=ignored)
        else:
            tree.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


if __name__ == "__main__":
    sys.exit(main())
