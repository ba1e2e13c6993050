"""Applies each mutant of the prompts to a copy of the tree; a scenario has to fail in it, else the mutant survives."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.mutants.patches import copied, patches

SCENARIOS: Final = ("-p", "no:cacheprovider", "-x", "-q", "-k", "prompt_abort", "tests/session/prompt_abort")
SECONDS: Final = 300
FAILED: Final = re.compile(r"^FAILED \S+::(\S+)", re.MULTILINE)
TESTS_FAILED: Final = 1
"""pytest's exit code for that; any other one says nothing about the mutant."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these (all)")
    names = parser.parse_args().names
    mutants = [patch for patch in patches("prompts") if not names or patch.stem in names]
    if scenario := killer(None):
        print(f"the scenarios fail without any mutant: {scenario}")
        return 1
    killed = 0
    for patch in mutants:
        scenario = killer(patch)
        killed += scenario is not None
        print(f"{patch.stem}: {f'killed by {scenario}' if scenario else 'SURVIVES'}", flush=True)
    print(f"{killed} of {len(mutants)} killed")
    return 0 if killed == len(mutants) else 1


def killer(patch: Path | None) -> str | None:
    """The first scenario that fails with the patch applied; None when all are green."""
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(Path(folder), patch)
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


if __name__ == "__main__":
    sys.exit(main())
