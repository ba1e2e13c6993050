"""``python -m tests.daytona_emulator``: the emulator as a program, until SIGINT, SIGTERM or the end of its input.

Prints ``{"ready":true,"origin":...,"api_url":...,"api_key":...,"marker":...,"root":...}``. The line ``next`` on its
input ends this one with all it started, and begins another, which prints its own line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys

from tests.daytona_emulator.server import DaytonaEmulator


async def _serve(port: int, step: float, path: str) -> None:
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[str] = asyncio.Queue()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lines.put_nowait, "")
    # A regular file or /dev/null as standard input cannot be watched.
    with contextlib.suppress(PermissionError):
        loop.add_reader(sys.stdin, lambda: lines.put_nowait(sys.stdin.readline()))
    while True:
        async with DaytonaEmulator(step, path, port) as emulator:
            ready = {"ready": True, "origin": emulator.origin, "api_url": emulator.api_url, "api_key": emulator.api_key}
            ready |= {"marker": emulator.processes.prefix, "root": str(emulator.root)}
            print(json.dumps(ready, separators=(",", ":")), flush=True)
            line = await lines.get()
        if line.strip() != "next":
            return


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.daytona_emulator", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--step", type=float, default=0.02, help="seconds that each state of a change takes")
    parser.add_argument("--path", default="", help="PATH inside the sandboxes")
    asked = parser.parse_args()
    asyncio.run(_serve(asked.port, asked.step, asked.path))


if __name__ == "__main__":
    main()
