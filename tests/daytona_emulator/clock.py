"""Time that a test can move: the wall clock plus what was added to it."""

from __future__ import annotations

import datetime
import time


def iso(seconds: float) -> str:
    """``2026-01-02T03:04:05.678Z``."""
    text = datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


class MovableClock:
    """Seconds since the epoch, never backwards."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def now(self) -> float:
        return time.time() + self._ahead

    def advance(self, seconds: float) -> None:
        self._ahead += max(0.0, seconds)
