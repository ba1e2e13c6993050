"""What was shown and is not in the store yet survives kill -9 of the process in a local file (DESIGN 3.9).

An entry is written with one system call before its events are shown. It is a head, the key (project, NUL, session), and
a body of event lines. A segment that nobody needs any more is deleted; those of a process that was killed stay, for
``read``.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

from runner.turn.log import Chunk

log = logging.getLogger("runner.turn")
SEGMENT_BYTES: Final = 8 * 1024 * 1024
MOST_BYTES: Final = 512 * 1024 * 1024
"""How much is kept of turns that do not end; of what is older only the frames of open blocks and tool calls matter."""
SMALL_BYTES: Final = 1024 * 1024
"""A segment that nobody needs is emptied when it is larger."""
JOINED_BYTES: Final = 64 * 1024
MAGIC: Final = b"Lf"
DURABLE: Final = 1
HEAD: Final = Struct("<2sBBHII")
_FLAGS: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW

Key = tuple[str, str]


class Entry(NamedTuple):
    """Events of one session that were shown together; ``durable``: they are records, as the store keeps them."""

    key: Key
    durable: bool
    lines: bytes


class Segment:
    """One file, and the sessions that need it: something in it may be nowhere else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, _FLAGS, 0o600)
        self.size = 0
        self.keys: set[Key] = set()


class LiveFile:
    """The file of one replica, in segments; used on the event loop only.

    A disk that takes nothing is told once and holds up nobody: what is shown then is as safe as frames always were.

    Args:
        folder: made with mode 0700 when missing.
        replica_id: whose file it is.
    """

    def __init__(
        self, folder: Path, replica_id: str, *, segment_bytes: int = SEGMENT_BYTES, most_bytes: int = MOST_BYTES
    ) -> None:
        self._folder = folder
        self._replica_id = replica_id
        self._segment_bytes = segment_bytes
        self._most_bytes = most_bytes
        self._segments: list[Segment] = []
        self._made = 0
        self._over = False
        self.failing: str | None = None
        """Why the last write failed, None when it did not."""
        self.unwritten = 0
        """How many entries could not be written."""

    def pen(self, project: str, session_id: str) -> Pen:
        """What one session writes with."""
        return Pen(self, (project, session_id))

    def write(self, key: Key, head: bytes, name: bytes, body: bytes) -> None:
        """Append one entry; never raises."""
        size = len(head) + len(name) + len(body)
        done = 0
        try:
            segment = self._segments[-1] if self._segments else self._next()
            if segment.size >= self._segment_bytes:
                segment = self._next()
            if size < JOINED_BYTES:
                done = os.write(segment.fd, head + name + body)
            else:
                done = os.writev(segment.fd, (head, name, body))
            if done != size:
                raise OSError(f"{done} of {size} bytes were written")
        except OSError as error:
            self._failed(error, torn=done > 0)
            return
        segment.size += size
        segment.keys.add(key)
        if self.failing is not None:
            log.warning("the live file is written again; %d entries were not", self.unwritten)
            self.failing = None

    def _next(self) -> Segment:
        if self._over:
            raise OSError("the live file is closed")
        if not self._made:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._made += 1
        segment = Segment(self._folder / f"{self._replica_id}.{self._made:06d}")
        if self._segments:
            last = self._segments[-1]
            os.close(last.fd)
            last.fd = -1
        self._segments.append(segment)
        self._drop_unneeded()
        while len(self._segments) > 1 and sum(part.size for part in self._segments) > self._most_bytes:
            log.error("the live file is larger than %d bytes; its oldest segment is dropped", self._most_bytes)
            self._remove(self._segments.pop(0))
        return segment

    def _failed(self, error: OSError, *, torn: bool) -> None:
        if self._over:
            return
        self.unwritten += 1
        if self.failing is None:
            log.error("the live file cannot be written: a kill of this runner would lose what it shows now: %s", error)
        self.failing = str(error)
        if torn:
            segment = self._segments[-1]
            try:
                os.ftruncate(segment.fd, segment.size)
            except OSError:
                # Behind half an entry nothing can be read: what follows begins a segment of its own.
                segment.size = self._segment_bytes

    def settled(self, key: Key) -> None:
        """Everything that a session showed is in the store."""
        for segment in self._segments:
            segment.keys.discard(key)
        self._drop_unneeded()

    def _drop_unneeded(self) -> None:
        if any(not segment.keys for segment in self._segments[:-1]):
            for segment in self._segments[:-1]:
                if not segment.keys:
                    self._remove(segment)
            self._segments = [*(part for part in self._segments[:-1] if part.keys), self._segments[-1]]
        last = self._segments[-1] if self._segments else None
        if last is not None and not last.keys and last.size >= SMALL_BYTES:
            try:
                os.ftruncate(last.fd, 0)
                last.size = 0
            except OSError as error:
                log.debug("a segment of the live file was not emptied: %s", error)

    def _remove(self, segment: Segment) -> None:
        if segment.fd >= 0:
            os.close(segment.fd)
        try:
            segment.path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("a segment of the live file stays: %s", error)

    @property
    def paths(self) -> list[Path]:
        """Its segments, oldest first."""
        return [segment.path for segment in self._segments]

    def close(self) -> None:
        """Give the file back: segments that somebody needs stay for the next start. Idempotent."""
        self._over = True
        for segment in self._segments:
            if segment.keys:
                if segment.fd >= 0:
                    os.close(segment.fd)
                log.warning("what %d sessions showed waits for the next start", len(segment.keys))
            else:
                self._remove(segment)
        self._segments = []


class Pen:
    """Writes the chunks of one session."""

    __slots__ = ("_crc", "_file", "_name", "_size", "key")

    def __init__(self, file: LiveFile, key: Key) -> None:
        self.key = key
        self._file = file
        self._name = "\0".join(key).encode()
        self._size = len(self._name)
        self._crc = zlib.crc32(self._name)

    def write(self, chunk: Chunk) -> None:
        """Keep a chunk that is about to be shown; of an update that has a record, that. Never raises."""
        body = chunk.whole or chunk.lines
        head = HEAD.pack(MAGIC, chunk.durable, 0, self._size, len(body), zlib.crc32(body, self._crc))
        self._file.write(self.key, head, self._name, body)

    def settled(self) -> None:
        """Everything that the session showed is in the store."""
        self._file.settled(self.key)


def left_by(folder: Path) -> dict[str, list[Path]]:
    """Segments in a folder by the replica that wrote them, oldest first."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        replica_id, _, number = path.name.rpartition(".")
        if replica_id and number.isdigit():
            found.setdefault(replica_id, []).append(path)
    return found


def read(paths: Iterable[Path]) -> Iterator[Entry]:
    """Every whole entry of these segments, in the order in which they were written; blocks.

    A segment ends where it was torn. One that is gone was somebody else's to read.

    Raises:
        OSError: it cannot be read.
    """
    for path in paths:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            continue
        at = 0
        while (entry := _entry(data, at)) is not None:
            at += HEAD.size + entry[0]
            yield entry[1]
        if at < len(data):
            log.warning("%s is torn: its last %d bytes are no whole entry", path.name, len(data) - at)


def _entry(data: bytes, at: int) -> tuple[int, Entry] | None:
    if at + HEAD.size > len(data):
        return None
    magic, flags, _, named, size, crc = HEAD.unpack_from(data, at)
    start = at + HEAD.size
    whole = data[start : start + named + size]
    if magic != MAGIC or len(whole) != named + size or zlib.crc32(whole) != crc:
        return None
    project, _, session_id = whole[:named].decode().partition("\0")
    return named + size, Entry((project, session_id), bool(flags & DURABLE), whole[named:])
