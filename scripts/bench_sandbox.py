"""What isolation costs: a start, and a turn's kill and a teardown with fork loops, at each level that works here."""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from runner.clock import SystemClock
from runner.resources import resource_path
from runner.rules.isolation import LEVELS, Choice, choose
from runner.sandbox.isolation import Found, Isolation, probe_now
from runner.sandbox.local import LocalProvider
from runner.sandbox.port import Sandbox, SandboxSpec
from scripts.bench_server import percentile, since_ms

ROUNDS: Final = 40
LOOP: Final = (
    "import os, time\n"
    "if os.fork() == 0:\n"
    " while True:\n"
    "  if os.fork() > 0: os._exit(0)\n"
    "  os.setsid(); time.sleep(0.01)\n"
)

GATES: dict[str, tuple[str, float]] = {
    "cell_over_bare_ms_p50": ("<=", 60),
    "cell_kill_ms_p99": ("<=", 100),
    "cell_teardown_ms_p99": ("<=", 100),
}


class Bed:
    """Sandboxes of one level, and how long each step took, in milliseconds."""

    def __init__(self, folder: Path, bounds: Isolation) -> None:
        name = f"bench-{bounds.level}"
        self._provider = LocalProvider(folder / name, name, "rep", clock=SystemClock(), bounds=bounds)
        self.starts: list[float] = []
        self.kills: list[float] = []
        self.teardowns: list[float] = []

    async def round(self, number: int) -> None:
        """One sandbox: a turn with a fork loop is killed, another one runs at the teardown."""
        agent = (sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read()")
        spec = SandboxSpec("bench", f"s{number}", f"seat{number}", agent, {})
        began = time.perf_counter()
        sandbox = await self._provider.start(spec)
        self.starts.append(since_ms(began))
        await sandbox.mark("turn").set(5)
        await self._loop(sandbox, "first")
        began = time.perf_counter()
        reaped = await sandbox.kill_turn("turn", 1)
        self.kills.append(since_ms(began))
        await self._loop(sandbox, "second")
        began = time.perf_counter()
        gone = await sandbox.destroy(0.0)
        self.teardowns.append(since_ms(began))
        if reaped.survivors or not gone.proven:
            raise SystemExit(f"survivors: {reaped.survivors}, {gone}")

    async def _loop(self, sandbox: Sandbox, name: str) -> None:
        await sandbox.run(name, (sys.executable, "-I", "-S", "-c", LOOP), lambda data: None)

    async def close(self) -> None:
        await self._provider.close()


async def _bare() -> float:
    """A bare start of the init's interpreter: what any start costs; milliseconds."""
    init = str(resource_path("sandboxes", "inside", "init.py"))
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(sys.executable, "-I", "-S", init, stderr=asyncio.subprocess.PIPE)
    await process.communicate()
    return since_ms(began)


async def _measure(found: Found) -> dict[str, float]:
    figures: dict[str, float] = {}
    bare = statistics.median([await _bare() for _ in range(ROUNDS)])
    figures["bare_start_ms_p50"] = round(bare, 1)
    with tempfile.TemporaryDirectory(prefix="acp-runner-bench-") as folder:
        for level in reversed(LEVELS):
            chosen = choose(level, "shared", found.probed)
            if not isinstance(chosen, Choice):
                continue
            bed = Bed(Path(folder), found.isolation(chosen))
            try:
                for number in range(ROUNDS):
                    await bed.round(number)
            finally:
                await bed.close()
            start = statistics.median(bed.starts)
            figures[f"{level}_start_ms_p50"] = round(start, 1)
            figures[f"{level}_over_bare_ms_p50"] = round(start - bare, 1)
            figures[f"{level}_kill_ms_p99"] = round(percentile(bed.kills, 0.99), 1)
            figures[f"{level}_teardown_ms_p99"] = round(percentile(bed.teardowns, 0.99), 1)
    return figures


def measure() -> dict[str, float]:
    """Figures by name."""
    return asyncio.run(_measure(probe_now()))
