"""The live bus in Redis: one stream per replica that watches, read by it alone over a connection of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from typing import Any, Final

from runner.errors import RunnerError
from runner.leases.live import KEEP_BYTES, OLDEST, READ_ENTRIES, Arrived
from runner.leases.redis import bounded, connect

LIVE: Final = "acp:live:"
KEPT_SECONDS: Final = 60
BYTES_PER_SECOND: Final = 10 * 1024 * 1024

KEYS: Final = {LIVE: "<replica>, stream: what followers at it see live; 60 s after the last entry"}
"""Every key of the bus by its beginning: what it is, and its time to live."""


class RedisLiveBus:
    """A bus that several replicas share; see ``LiveBus``.

    Nothing living rests on a stream's time to live: whoever misses an entry asks the session's owner for it again.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        timeout_seconds: longest wait for one answer, large entries and the time that a read is asked to wait left out.
        keep_bytes: of Redis's memory that a stream may take; its newest entry stays in any case.

    Raises:
        RunnerError: ``invalid_request``: the package redis is missing, or the URL cannot be read.
    """

    def __init__(self, url: str, *, timeout_seconds: float = 3.0, keep_bytes: int = KEEP_BYTES) -> None:
        self._timeout = timeout_seconds
        self._keep_bytes = keep_bytes
        self._writing = connect(url, timeout_seconds, text=False)
        self._reading = connect(url, timeout_seconds, text=False)
        source = (files("runner.leases") / "lua" / "live.lua").read_text()
        self._count = READ_ENTRIES
        self._publish = self._writing.register_script(source)

    async def publish(self, replica_id: str, entries: Sequence[bytes]) -> None:
        """Append entries to a replica's stream."""
        seconds = self._timeout + sum(map(len, entries)) / BYTES_PER_SECOND
        arguments: list[int | bytes] = [KEPT_SECONDS * 1000, self._keep_bytes, *entries]
        await bounded(seconds, lambda: self._publish(keys=[LIVE + replica_id], args=arguments))

    async def read(self, replica_id: str, place: str, seconds: float) -> Arrived:
        """What came behind ``place``; what was read before is trimmed with the same question."""
        key = LIVE + replica_id
        pipe = self._reading.pipeline(transaction=False)
        if place:
            pipe.xtrim(key, minid=place, approximate=False)
        pipe.xread({key: place or "0"}, count=self._count, block=max(1, round(seconds * 1000)))
        pipe.xlen(key)
        # Behind a failure one by one: what was too much at once is not asked for again and again.
        self._count = 1
        replies: list[Any] = await bounded(seconds + self._timeout, pipe.execute)
        self._count = READ_ENTRIES
        *_, found, length = replies
        if not found:
            # Trimming leaves the entry of the place. Without it the stream began anew, maybe under an earlier clock.
            return Arrived([], place if length else OLDEST)
        _, entries = found[0] if isinstance(found, list) else next(iter(found.items()))
        return Arrived([fields[b"e"] for _, fields in entries], entries[-1][0].decode())

    async def close(self) -> None:
        """Drop connections, at most the time-out."""
        for client in (self._writing, self._reading):
            with suppress(RunnerError):
                await bounded(self._timeout, client.aclose)
