"""The live bus: what a replica shows on its way to the followers at another one (DESIGN 3.9)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

KEEP_BYTES: Final = 64 * 1024 * 1024
READ_ENTRIES: Final = 16
OLDEST: Final = ""
"""The place before everything that is kept."""


class Arrived(NamedTuple):
    """Entries in the order in which they were published, and the place behind them."""

    entries: list[bytes]
    place: str


class LiveBus(Protocol):
    """One line of entries per replica: anybody appends, that replica alone reads.

    A line is bounded in bytes: a reader that falls behind misses the oldest entries and has to notice it by what is in
    them. It may be lost as a whole. Entries are some MiB at most: one has to be read within the bus's time-out.

    Every call raises ``RunnerError("plane_unavailable")`` when the bus gives no answer.
    """

    async def publish(self, replica_id: str, entries: Sequence[bytes]) -> None:
        """Append entries to a replica's line. Behind an error, or cancelled, all or none of them may be there."""
        ...

    async def read(self, replica_id: str, place: str, seconds: float) -> Arrived:
        """What came behind ``place``; waits at most ``seconds`` for it. What is not behind ``place`` is forgotten."""
        ...

    async def close(self) -> None:
        """Drop connections."""
        ...


@dataclass(slots=True)
class _Line:
    entries: deque[tuple[int, bytes]] = field(default_factory=deque)
    bytes: int = 0
    last: int = 0
    came: asyncio.Event = field(default_factory=asyncio.Event)


class MemoryLiveBus:
    """A bus inside one process; see ``LiveBus``.

    Args:
        keep_bytes: of entries that a line holds for its reader; the newest stays in any case.
    """

    def __init__(self, keep_bytes: int = KEEP_BYTES) -> None:
        self._keep_bytes = keep_bytes
        self._lines: dict[str, _Line] = {}

    async def publish(self, replica_id: str, entries: Sequence[bytes]) -> None:
        """Append entries to a replica's line; done at once."""
        line = self._line(replica_id)
        for entry in entries:
            line.last += 1
            line.bytes += len(entry)
            line.entries.append((line.last, entry))
        while line.bytes > self._keep_bytes and len(line.entries) > 1:
            self._drop(line)
        line.came.set()

    async def read(self, replica_id: str, place: str, seconds: float) -> Arrived:
        """What came behind ``place``."""
        line, behind = self._line(replica_id), int(place or 0)
        while line.entries and line.entries[0][0] <= behind:
            self._drop(line)
        if not line.entries:
            line.came.clear()
            try:
                async with asyncio.timeout(seconds):
                    await line.came.wait()
            except TimeoutError:
                return Arrived([], place)
        found = list(line.entries)[:READ_ENTRIES]
        return Arrived([entry for _, entry in found], str(found[-1][0]) if found else place)

    async def close(self) -> None:
        """Nothing to drop."""

    def _line(self, replica_id: str) -> _Line:
        return self._lines.setdefault(replica_id, _Line())

    @staticmethod
    def _drop(line: _Line) -> None:
        _, entry = line.entries.popleft()
        line.bytes -= len(entry)
