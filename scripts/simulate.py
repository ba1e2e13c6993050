"""Runs the session-control simulation: seeds, one seed's story, or the mutants that it must find."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(os.environ.get("ACP_RUNNER_SIMULATED_TREE", Path(__file__).resolve().parent.parent))
ENOUGH: Final = 2000
"""Seeds after which every transition of every table has to be visited."""
MUTANT_SEEDS: Final = 2000
CHUNK: Final = 50
sys.path.insert(0, str(ROOT))

from tests.mutants.patches import copied, patches  # noqa: E402
from tests.simulation.run import Run, run_seed  # noqa: E402
from tests.simulation.visited import Visited  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, metavar="N", help="how many seeds (2000)")
    parser.add_argument("--from", type=int, default=0, dest="first", metavar="K", help="the first seed (0)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (1)")
    parser.add_argument("--mutants", action="store_true", help="break the product on purpose: each must be found")
    parser.add_argument("--story", type=Path, metavar="FILE", help="where a failing seed's story goes, for a replay")
    options = parser.parse_args()
    return mutants() if options.mutants else seeds(options)


def seeds(options: argparse.Namespace) -> int:
    """Run the seeds in order; the first that fails ends it."""
    visited, began, done = Visited(), time.monotonic(), 0
    last = options.first + options.seeds
    chunks = [range(first, min(first + CHUNK, last)) for first in range(options.first, last, CHUNK)]
    with ProcessPoolExecutor(options.jobs) as pool:
        for fault, tables, count in pool.map(run_chunk, chunks):
            for table in tables:
                visited.add(table)
            done += count
            if fault is not None:
                return show(fault, options.story)
            if done % 500 < CHUNK or done == options.seeds:
                print(f"{done} seeds in {time.monotonic() - began:.0f} s", flush=True)
    for line in visited.summary():
        print(line)
    missing = visited.missing() if options.seeds >= ENOUGH else {}
    if missing:
        for name, transitions in missing.items():
            print(f"{name}: never visited: {', '.join(transitions)}")
        return 1
    return 0


def run_chunk(chunk: range) -> tuple[Run | None, list[dict[str, set[Any]]], int]:
    """The first fault of a range of seeds, what was visited, and how many ran."""
    visited = Visited()
    for seed in chunk:
        run = run_seed(seed)
        visited.add(run.visited)
        if run.fault is not None:
            return run, [visited.tables], seed - chunk.start + 1
    return None, [visited.tables], len(chunk)


def show(run: Run, file: Path | None) -> int:
    """A failing seed: what does not hold, what happened, and how to see it again."""
    print(run.story())
    if file is not None:
        file.write_text(run.story())
    print(f"seed {run.seed}: {run.fault}")
    print(f"again: scripts/simulate --seeds 1 --from {run.seed}")
    return 1


def mutants() -> int:
    """Apply each patch to a copy of the tree; the simulation has to find a fault in it."""
    survivors = []
    for patch in patches("session_control"):
        with tempfile.TemporaryDirectory() as folder:
            tree = copied(Path(folder), patch)
            command = [sys.executable, str(Path(__file__).resolve()), "--seeds", str(MUTANT_SEEDS)]
            environment = {**os.environ, "ACP_RUNNER_SIMULATED_TREE": str(tree), "PYTHONPATH": str(tree)}
            ran = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        fault = next((line for line in ran.stdout.splitlines() if line.startswith("seed ")), None)
        print(f"{patch.stem}: {fault or 'NOT FOUND ' + ran.stderr[-500:]}", flush=True)
        if fault is None:
            survivors.append(patch.stem)
    if survivors:
        print(f"not found in {MUTANT_SEEDS} seeds: {', '.join(survivors)}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
