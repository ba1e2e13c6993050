"""Who is alive: an independent look at all of /proc, by what a process has in its environment."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def alive_with(variable: str) -> dict[int, str]:
    """Live processes with ``NAME=value`` in their environment, pid to command line with a blank after each argument."""
    found: dict[int, str] = {}
    wanted = variable.encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if wanted not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX":
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def until(condition: Callable[[], Any], seconds: float = 10.0, what: str = "the condition") -> Any:
    """Poll until ``condition`` is true and return its value; fails the test after ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what} did not come true in {seconds} s"
        time.sleep(0.005)


def kill_all(variable: str, seconds: float = 10.0) -> None:
    """Kill every process with ``NAME=value`` in its environment; fails the test when some will not die."""
    deadline = time.monotonic() + seconds
    while left := alive_with(variable):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        assert time.monotonic() < deadline, f"still alive: {left}"
        time.sleep(0.002)
