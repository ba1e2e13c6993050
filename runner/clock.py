"""Time is given: shells take a ``Clock``, rules take ``now`` as a number."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """Two readings of one time: seconds that only grow, and milliseconds since 1970 in UTC."""

    def monotonic(self) -> float:
        """Seconds on the scale of the running event loop."""
        ...

    def now_ms(self) -> int:
        """Wall clock, whole milliseconds since the epoch."""
        ...


class SystemClock:
    """The real clock."""

    def monotonic(self) -> float:
        """``time.monotonic()``: the scale that asyncio's default loop uses too."""
        return time.monotonic()

    def now_ms(self) -> int:
        """``time.time()`` in milliseconds."""
        return time.time_ns() // 1_000_000


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_second = -1
_prefix = ""


def rfc3339(ms: int) -> str:
    """``2026-11-29T16:09:53.123Z``: RFC 3339, UTC, milliseconds (DESIGN 4.1)."""
    global _second, _prefix
    second, rest = divmod(ms, 1000)
    if second != _second:
        _prefix = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        _second = second
    return f"{_prefix}.{rest:03d}Z"


def parse_rfc3339(text: str) -> int:
    """Milliseconds since the epoch of an RFC 3339 instant; ``ValueError`` without an offset or when malformed."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError("an instant needs a UTC offset")
    return (moment - _EPOCH) // timedelta(milliseconds=1)
