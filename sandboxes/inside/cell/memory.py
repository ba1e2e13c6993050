"""A bound on the memory of all processes of the cell together, where no control group keeps it."""

from __future__ import annotations

import os
import signal

from cell.kill import kill_everybody
from cell.processes import ZOMBIE, descendants, send

EVERY_SECONDS = 0.5
_PAGE = os.sysconf("SC_PAGE_SIZE")


class MemoryWatch:
    """Looks twice a second; what is over the bound is killed whole, for nobody knows which process is to blame."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._next = 0.0
        self._told = False

    def wait_ms(self, now: float) -> int:
        """How long until the next look."""
        return max(0, int((self._next - now) * 1000) + 1)

    def step(self, now: float) -> dict[str, object] | None:
        """Look when it is time; the event of the first look that showed too much."""
        if now < self._next:
            return None
        self._next = now + EVERY_SECONDS
        entries = [entry for entry in descendants(os.getpid()) if entry.state != ZOMBIE]
        if sum(resident(entry.pid) for entry in entries) <= self._limit:
            return None
        used = sum(proportional(entry.pid) for entry in entries)
        if used <= self._limit:
            return None
        kill_everybody()
        for entry in entries:
            send(entry, signal.SIGKILL)
        self._next = now
        told, self._told = self._told, True
        return None if told else {"event": "limit", "memory_bytes": used}


def resident(pid: int) -> int:
    """Bytes in memory, pages that others share counted in full: cheap, never too low."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def proportional(pid: int) -> int:
    """Bytes in memory, its share of shared pages; where that is not told, as ``resident``."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            lines = [line.split() for line in file if line.startswith("Pss:")]
        return int(lines[0][1]) * 1024
    except (OSError, IndexError):
        return resident(pid)
