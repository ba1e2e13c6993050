"""The record stream as its sender and its workers see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from runner.rules.delivery import EntryId, Quota
from runner.store.port import Appended, RecordRow

VERSION: Final = "1"
"""Of the codec that payloads are written with."""
MAX_ENTRIES: Final = 100_000
"""How many entries a stream may hold."""
TIMEOUT_SECONDS: Final = 0.5
"""How long a sender waits for an answer; then its records go to the store."""


class GroupGone(Exception):
    """The stream or its group was not there; it is again, from the beginning of what the stream has (case G5)."""


class Entry(NamedTuple):
    """One record in the stream; ``payload`` is None when its body was deleted, ``version`` names its codec."""

    entry_id: EntryId
    payload: bytes | None
    version: str = VERSION
    deliveries: int = 1


class Published(NamedTuple):
    """What became of payloads; no ids: the stream is full.

    ``generation`` changes when the stream began anew, or its server did, or somebody else took entries out of it: what
    was published before may be gone.
    Every entry up to ``floor`` is acknowledged.
    """

    generation: str
    floor: EntryId
    entry_ids: tuple[EntryId, ...]


class Seen(NamedTuple):
    """The stream at a glance: entries kept, and those delivered but not acknowledged."""

    generation: str
    floor: EntryId
    length: int
    pending: int


class Reclaimed(NamedTuple):
    """Entries taken over from silent consumers, and ids of those whose body was deleted: nobody holds these now."""

    entries: tuple[Entry, ...] = ()
    gone: tuple[EntryId, ...] = ()


class RecordStream(Protocol):
    """One stream with one group of workers; bodies stay until the group acknowledged them and all before them.

    Every method ends within a deadline and raises ``RunnerError("store_unavailable")`` when the stream cannot be used.
    A cancelled call may or may not have been carried out. A stream or group that is missing is made from 0 (case G5).
    """

    async def publish(self, payloads: Sequence[bytes]) -> Published:
        """Add one entry for each payload, all or none; none when they would exceed what the stream may hold."""
        ...

    async def look(self) -> Seen:
        """How it stands."""
        ...

    async def scan(self, after: EntryId, limit: int) -> list[Entry]:
        """Entries behind ``after``, in order, acknowledged or not; changes nothing."""
        ...

    async def read(self, consumer: str, limit: int, wait_seconds: float) -> list[Entry]:
        """Entries that no consumer had yet, at most ``limit``; empty after ``wait_seconds`` without one.

        Raises:
            GroupGone: it had to be made; entries that are still there come again.
        """
        ...

    async def again(self, consumer: str, after: EntryId, limit: int) -> list[Entry]:
        """Entries behind ``after`` that this consumer has and did not acknowledge: one more delivery."""
        ...

    async def reclaim(self, consumer: str, idle_seconds: float, limit: int) -> Reclaimed:
        """Take over entries that were delivered to anybody at least ``idle_seconds`` ago: one more delivery."""
        ...

    async def acknowledge(self, entry_ids: Sequence[EntryId]) -> EntryId:
        """Take entries off the group's list and trim the stream to its floor, which is returned."""
        ...

    async def forget_consumers(self, keep: str, idle_seconds: float) -> list[str]:
        """Delete consumers that are silent that long and hold nothing, but ``keep``; their names."""
        ...

    async def close(self) -> None:
        """Drop connections, bounded."""
        ...


class RecordSink(Protocol):
    """Where a worker writes: the part of ``Store`` that it needs."""

    async def write_batch(self, records: Sequence[RecordRow]) -> Appended:
        """See ``Store.write_batch``."""
        ...

    async def quarantine(self, records: Sequence[RecordRow], reason: str, at: int) -> None:
        """See ``Store.quarantine``."""
        ...


class QuotaPort(Protocol):
    """Says whether a project may store more; an error counts as ``unknown``."""

    async def verdict(self, project: str, records: int, size: int) -> Quota:
        """Of ``records`` more of ``size`` bytes altogether."""
        ...


class Unlimited:
    """``QuotaPort`` that allows everything."""

    async def verdict(self, project: str, records: int, size: int) -> Quota:
        return Quota.ALLOWED


def text_of(entry: EntryId) -> str:
    """An id as Redis writes it."""
    return f"{entry[0]}-{entry[1]}"
