"""The live event log of a session: one writer, a bounded ring, any number of readers (DESIGN 3.9)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

READ_BYTES: Final = 256 * 1024
LARGE_TIMES: Final = 3
AGES: Final = 100
CROWD: Final = 8
CROWD_SECONDS: Final = 0.002
GATHER_SECONDS: Final = 0.25


class LogEnded(Exception):
    """The reader has delivered everything there will be."""


class LogCut(Exception):
    """The reader fell behind what is kept; the argument says so."""


class Chunk(NamedTuple):
    """Consecutive events of one epoch and one prompt: NDJSON lines, each ending in a newline.

    ``whole``: the line for a reader who may have missed what an update changes (the record in place of the update).
    ``durable``: it is a record.
    """

    epoch: int
    first: int
    last: int
    prompt_id: str | None
    lines: bytes
    whole: bytes = b""
    durable: bool = False


class SessionLog:
    """Ring of chunks. ``append`` never waits; a reader that falls behind ``buffer_bytes`` is cut, nobody else notices.

    Args:
        ring_bytes: how much is kept for readers who come later.
        buffer_bytes: how much is kept for the slowest reader before it is cut; at least ``ring_bytes``, and more
            while so much came at once that a reader of any pace would be cut by it (case E1).
        ring_seconds: how long it is kept for readers who come later, to about a hundredth; None: as long as it fits.
    """

    def __init__(self, ring_bytes: int, buffer_bytes: int, ring_seconds: float | None = None) -> None:
        self._ring_bytes = ring_bytes
        self._ring_seconds = ring_seconds
        self._ages: deque[tuple[float, int]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._buffer_bytes = max(ring_bytes, buffer_bytes)
        self._chunks: deque[Chunk] = deque()
        self._base = self._bytes = self._burst = 0
        self._large: deque[tuple[int, int]] = deque()
        self._readers: set[LogReader] = set()
        self._dropped = False
        self._gathering: asyncio.TimerHandle | None = None
        self._gathered = 0
        self._shared: tuple[int, bool, int, bytes] | None = None

    def append(self, chunk: Chunk) -> None:
        """Add events and wake whoever waits for them."""
        self._chunks.append(chunk)
        self._bytes += len(chunk.lines) + len(chunk.whole)
        if self._bytes > self._ring_bytes:
            self._trim(len(chunk.lines))
        if self._ring_seconds is not None:
            self._note_age(self._ring_seconds)
        if len(self._readers) > CROWD:
            self._gather(len(chunk.lines))
        else:
            self.wake()

    def _note_age(self, keep: float) -> None:
        """From time to time, note which events are how old; the oldest note sets the timer."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if not self._ages or now - self._ages[-1][0] >= keep / AGES:
            self._ages.append((now, self.end - 1))
        if self._timer is None:
            self._timer = loop.call_at(self._ages[0][0] + keep * (1 + 1 / AGES), self._expire, keep)

    def _expire(self, keep: float) -> None:
        """Drop what is too old and what no reader waits for."""
        loop = asyncio.get_running_loop()
        self._timer = None
        until = self._base
        while self._ages and self._ages[0][0] <= loop.time() - keep:
            self._ages.popleft()
            until = self._ages[0][1] if self._ages else self.end
        until = min([until, *(reader.position for reader in self._readers if reader.position >= self._base)])
        while self._base < until and self._chunks:
            self._drop_oldest()
        if self._chunks:
            self._ages = self._ages or deque([(loop.time(), self._base)])
            self._timer = loop.call_at(self._ages[0][0] + keep * (1 + 1 / AGES), self._expire, keep)

    def _drop_oldest(self) -> None:
        chunk = self._chunks.popleft()
        self._bytes -= len(chunk.lines) + len(chunk.whole)
        self._base += 1
        self._dropped = True
        while self._large and self._large[0][0] < self._base:
            self._large.popleft()

    def wake(self) -> None:
        """Let every reader look again: something came, or nothing will any more."""
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        self._gathered = 0
        for reader in self._readers:
            reader.wake()

    def _gather(self, size: int) -> None:
        """A crowd is woken less often, and long before what it has not read is much: the writer hardly notices it.

        Whoever dispatched the prompt is not of the crowd.
        """
        self._gathered += size
        for reader in [reader for reader in self._readers if reader.prompt_id is not None]:
            reader.wake()
        if not any(reader.waits for reader in self._readers):
            return
        if self._gathered * 4 > self._buffer_bytes:
            self.wake()
        elif self._gathering is None:
            seconds = min(GATHER_SECONDS, CROWD_SECONDS * len(self._readers))
            self._gathering = asyncio.get_running_loop().call_later(seconds, self.wake)

    def shared(self, position: int, whole: bool) -> tuple[int, bytes]:
        """What a reader of everything at ``position`` takes, and the position behind it; joined once for a crowd."""
        if self._shared is not None and self._shared[:2] == (position, whole):
            end, lines = self._shared[2:]
            if end == self.end or len(lines) >= READ_BYTES:
                return end, lines
        parts: list[bytes] = []
        end, size = position, 0
        while size < READ_BYTES and (chunk := self.chunk(end)) is not None:
            parts.append(chunk.whole if whole and chunk.whole else chunk.lines)
            size += len(parts[-1])
            end += 1
        lines = parts[0] if len(parts) == 1 else b"".join(parts)
        if len(self._readers) > CROWD and lines:
            self._shared = (position, whole, end, lines)
        return end, lines

    def _trim(self, size: int) -> None:
        # What comes at once, until a reader that was woken for it has run, cuts nobody.
        self._burst = size + (self._burst if any(reader.due for reader in self._readers) else 0)
        if self._burst * LARGE_TIMES > self._buffer_bytes:
            self._large.append((self.end - 1, self._burst))
        # A reader that was cut already waits for nothing: it must not keep the ring at its largest.
        places = (reader.position for reader in self._readers if reader.position >= self._base)
        needed = min(places, default=self.end)
        while self._bytes > self._ring_bytes and len(self._chunks) > 1:
            if self._base >= needed and self._bytes <= self._allowed():
                break
            self._drop_oldest()

    def _allowed(self) -> int:
        """What the slowest reader may have unread: a large text is there as frames, as its record, and has an end."""
        return max(self._buffer_bytes, LARGE_TIMES * max((size for _, size in self._large), default=0))

    def shrink(self) -> None:
        """Drop the ring of a session that nobody reads, when its memory is wanted elsewhere."""
        if not self._readers:
            self._dropped = self._dropped or bool(self._chunks)
            self._clear()

    def restart(self) -> None:
        """Begin anew: the past went on elsewhere, so every reader is cut and comes back by its cursor."""
        self._clear()
        self._base += 1
        self._shared = None
        self._dropped = False
        self.wake()

    def _clear(self) -> None:
        self._base += len(self._chunks)
        self._chunks.clear()
        self._large.clear()
        self._bytes = 0

    @property
    def end(self) -> int:
        """Position behind the newest chunk."""
        return self._base + len(self._chunks)

    @property
    def start(self) -> int:
        """Position of the oldest chunk kept."""
        return self._base

    @property
    def base_cursor(self) -> tuple[int, int] | None:
        """Cursor of the oldest event kept, None when nothing is."""
        return (self._chunks[0].epoch, self._chunks[0].first) if self._chunks else None

    def covers(self, after: tuple[int, int], since: tuple[int, int]) -> bool:
        """Whether every event behind ``after`` is still in the ring, given that the ring began behind ``since``."""
        if not self._dropped and since <= after:
            return True
        base = self.base_cursor
        return base is not None and base <= (after[0], after[1] + 1)

    def recent(self, size: int) -> int:
        """Position from which on at most ``size`` bytes are kept; the end when the newest chunk is larger."""
        position = self.end
        for chunk in reversed(self._chunks):
            size -= len(chunk.lines) + len(chunk.whole)
            if size < 0:
                break
            position -= 1
        return position

    def reader(
        self,
        *,
        at: int | None = None,
        prompt_id: str | None = None,
        linger_seconds: float = 0.0,
        whole: bool = False,
    ) -> LogReader:
        """A reader from position ``at`` (default: what is kept), of one prompt's events or of all.

        ``linger_seconds``: how long it gathers behind the first event that is due, so that a short turn is one write.
        ``whole``: it did not see what came before, so an update that has a record is told as that.
        """
        reader = LogReader(self, self._base if at is None else at, prompt_id, linger_seconds, whole)
        self._readers.add(reader)
        return reader

    def detach(self, reader: LogReader) -> None:
        """Forget a reader; idempotent."""
        self._readers.discard(reader)
        if len(self._readers) <= CROWD:
            self._shared = None

    def chunk(self, position: int) -> Chunk | None:
        """The chunk at a position; None when it is still to come. ``LogCut`` when it is gone."""
        if position < self._base:
            raise LogCut("What comes next is not kept here; read on from your last cursor.")
        index = position - self._base
        return self._chunks[index] if index < len(self._chunks) else None


class LogReader:
    """One reader's place in a log."""

    def __init__(
        self,
        log: SessionLog,
        position: int,
        prompt_id: str | None,
        linger_seconds: float = 0.0,
        whole: bool = False,
    ) -> None:
        self._log = log
        self._whole = whole
        self._linger_seconds = linger_seconds
        self.position = position
        self.prompt_id = prompt_id
        self._after: tuple[int, int] = (-1, -1)
        self._waiter: asyncio.Future[None] | None = None
        self._finished: Callable[[], bool] = lambda: False

    def skip_to(self, after: tuple[int, int]) -> None:
        """Deliver only events behind this cursor."""
        self._after = after

    def end_when(self, finished: Callable[[], bool]) -> None:
        """End once ``finished`` says so and everything up to then was delivered."""
        self._finished = finished
        self.wake()

    @property
    def ended(self) -> bool:
        """Whether everything was delivered and nothing will follow."""
        return self._finished() and self.position >= self._log.end

    @property
    def waits(self) -> bool:
        """Whether somebody waits for it to be woken."""
        return self._waiter is not None

    @property
    def due(self) -> bool:
        """Whether whoever waited was woken and has not run since."""
        return self._waiter is not None and self._waiter.done()

    def wake(self) -> None:
        """Something changed; look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self) -> bytes:
        """What is due now, at most about 256 KiB; empty when nothing is.

        Raises:
            LogCut: the reader is behind what is kept.
        """
        if self.prompt_id is None:
            chunk = self._log.chunk(self.position)
            if chunk is None or (chunk.epoch, chunk.first) > self._after:
                self.position, lines = self._log.shared(self.position, self._whole)
                return lines
        parts: list[bytes] = []
        size = 0
        while size < READ_BYTES:
            chunk = self._log.chunk(self.position)
            if chunk is None:
                break
            self.position += 1
            if self.prompt_id is not None and chunk.prompt_id != self.prompt_id:
                continue
            lines = self._unseen(chunk)
            if lines:
                parts.append(lines)
                size += len(lines)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def chunks(self) -> list[Chunk]:
        """As ``take``, for who passes them on as they are.

        Raises:
            LogCut: the reader is behind what is kept.
        """
        found: list[Chunk] = []
        size = 0
        while size < READ_BYTES and (chunk := self._log.chunk(self.position)) is not None:
            self.position += 1
            found.append(chunk)
            size += len(chunk.lines) + len(chunk.whole)
        return found

    async def woken(self, seconds: float) -> bool:
        """Wait until something is new; False after ``seconds``."""
        return await self._wait(asyncio.get_running_loop().time() + seconds)

    def _unseen(self, chunk: Chunk) -> bytes:
        if (chunk.epoch, chunk.first) > self._after:
            return chunk.whole if self._whole and chunk.whole else chunk.lines
        if (chunk.epoch, chunk.last) <= self._after:
            return b""
        return b"".join(chunk.lines.splitlines(keepends=True)[self._after[1] - chunk.first + 1 :])

    async def next(self, seconds: float) -> bytes | None:
        """Lines that are due, or None after ``seconds`` without any, however often it was woken for others' events.

        Raises:
            LogEnded: nothing will follow.
            LogCut: the reader fell behind.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            if self._linger_seconds and self._log.chunk(self.position) is not None:
                await self._linger()
            lines = self.take()
            if lines:
                return lines
            if self._finished():
                raise LogEnded
            if not await self._wait(deadline):
                return None

    async def _linger(self) -> None:
        """Gather for a moment, but never past the end of what there will be."""
        until = asyncio.get_running_loop().time() + self._linger_seconds
        while not self._finished() and await self._wait(until):
            pass

    async def _wait(self, deadline: float) -> bool:
        """True when woken, False at the loop time ``deadline``."""
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        timer = loop.call_at(deadline, self._time_out, waiter)
        try:
            await waiter
        except TimeoutError:
            return False
        finally:
            timer.cancel()
            self._waiter = None
        return True

    @staticmethod
    def _time_out(waiter: asyncio.Future[None]) -> None:
        if not waiter.done():
            waiter.set_exception(TimeoutError())

    def close(self) -> None:
        """Detach; idempotent."""
        self._log.detach(self)
