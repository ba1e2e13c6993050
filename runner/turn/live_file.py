"""What was shown and is not in the store yet survives kill -9 of the process in a local file (DESIGN 3.9).

An entry is in the file before its events are shown. It is a head, the key (project, NUL, session), and a body of event
lines; the file is mapped, so that writing is a copy of bytes: no call that waits, and none that lets another thread in.
A segment that nobody needs any more is used again or deleted; those of a process that was killed stay, for ``read``.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

from runner.ids import Key
from runner.turn.log import Chunk

log = logging.getLogger("runner.turn")
SEGMENT_BYTES: Final = 4 * 1024 * 1024
MOST_BYTES: Final = 512 * 1024 * 1024
"""How much is kept of turns that do not end; of what is older only the frames of open blocks and tool calls matter."""
RETRY_SECONDS: Final = 1.0
MAGIC: Final = b"Lf"
DURABLE: Final = 1
HEAD: Final = Struct("<BxHI2s")
"""Flags, lengths of key and body, and the magic, which is written last: only then is there an entry."""
END: Final = bytes(HEAD.size)
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class Entry(NamedTuple):
    """Events of one session that were shown together; ``durable``: they are records, as the store keeps them.

    Frames may be one line, with ``texts`` in place of ``text``.
    """

    key: Key
    durable: bool
    lines: bytes


class Segment:
    """One mapped file, and the sessions that need it: something in it may be nowhere else.

    Its bytes are reserved when it is made, so that a full disk is met there and not at a write.

    Raises:
        OSError: it cannot be made; then it is not there.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self.used = 0
        self.keys: set[Key] = set()
        fd = os.open(path, _FLAGS, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
            self._bytes = mmap.mmap(fd, size)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    def write(self, key: Key, flags: int, name: bytes, body: bytes) -> None:
        """Add an entry, which must fit."""
        at = self.used
        middle = at + HEAD.size + len(name)
        end = middle + len(body)
        self._bytes[at + HEAD.size : middle] = name
        self._bytes[middle:end] = body
        self._bytes[end : end + HEAD.size] = END
        HEAD.pack_into(self._bytes, at, flags, len(name), len(body), MAGIC)
        self.used = end
        self.keys.add(key)

    def restart(self) -> None:
        """Begin anew: nobody needs what is in it."""
        self._bytes[: HEAD.size] = END
        self.used = 0

    def leave(self) -> None:
        """Nothing is written to it any more."""
        if not self._bytes.closed:
            self._bytes.close()

    def remove(self) -> None:
        """It is needed no longer."""
        self.leave()
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("a segment of the live file stays: %s", error)


class LiveFile:
    """The file of one replica, in segments; used on the event loop only.

    A disk that takes nothing is told once and holds up nobody: what is shown then is as safe as frames always were.

    Args:
        folder: made with mode 0700 when missing.
        replica_id: whose file it is.
        now: seconds that only grow.
    """

    def __init__(
        self,
        folder: Path,
        replica_id: str,
        now: Callable[[], float],
        *,
        segment_bytes: int = SEGMENT_BYTES,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._folder = folder
        self._replica_id = replica_id
        self._segment_bytes = segment_bytes
        self._most_bytes = most_bytes
        self._now = now
        self._segments: list[Segment] = []
        self._made = 0
        self._over = False
        self._again_at = 0.0
        self.at_rest: Callable[[Key], bool] = lambda key: False
        """Whether the store has everything of a session; asked when a segment is full."""
        self.failing: str | None = None
        """Why nothing can be written now."""
        self.unwritten = 0
        """How many entries could not be written."""

    def pen(self, project: str, session_id: str) -> Pen:
        """What one session writes with."""
        return Pen(self, (project, session_id))

    def write(self, key: Key, flags: int, name: bytes, body: bytes) -> None:
        """Append one entry; never raises."""
        segment = self._segments[-1] if self._segments else None
        needed = 2 * HEAD.size + len(name) + len(body)
        if segment is None or segment.size - segment.used < needed:
            segment = self._next(needed)
            if segment is None:
                self.unwritten += 1
                return
        segment.write(key, flags, name, body)

    def _next(self, needed: int) -> Segment | None:
        if self._over or (self.failing is not None and self._now() < self._again_at):
            return None
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self._folder / f"{self._replica_id}.{self._made + 1:06d}"
            segment = Segment(path, max(self._segment_bytes, needed))
        except OSError as error:
            if self.failing is None:
                log.error("the live file cannot grow: a kill of this runner would lose what it shows now: %s", error)
            self.failing, self._again_at = str(error), self._now() + RETRY_SECONDS
            return None
        if self.failing is not None:
            log.warning("the live file is written again; %d entries were not", self.unwritten)
            self.failing = None
        self._made += 1
        if self._segments:
            self._segments[-1].leave()
        for old in self._segments:
            old.keys = {key for key in old.keys if not self.at_rest(key)}
        self._segments.append(segment)
        self._drop_unneeded()
        while len(self._segments) > 1 and sum(part.size for part in self._segments) > self._most_bytes:
            log.error("the live file is larger than %d bytes; its oldest segment is dropped", self._most_bytes)
            self._segments.pop(0).remove()
        return segment

    def settled(self, key: Key) -> None:
        """Everything that a session showed is in the store."""
        for segment in self._segments:
            segment.keys.discard(key)
        self._drop_unneeded()

    def _drop_unneeded(self) -> None:
        if len(self._segments) > 1 and not all(segment.keys for segment in self._segments[:-1]):
            for segment in self._segments[:-1]:
                if not segment.keys:
                    segment.remove()
            self._segments = [*(part for part in self._segments[:-1] if part.keys), self._segments[-1]]
        if self._segments and not self._segments[-1].keys:
            self._segments[-1].restart()

    @property
    def bytes(self) -> int:
        """What its segments take on disk."""
        return sum(segment.size for segment in self._segments)

    @property
    def paths(self) -> list[Path]:
        """Its segments, oldest first."""
        return [segment.path for segment in self._segments]

    def close(self) -> None:
        """Give the file back: segments that somebody needs stay for the next start. Idempotent."""
        self._over = True
        for segment in self._segments:
            if segment.keys:
                segment.leave()
                log.warning("what %d sessions showed waits for the next start", len(segment.keys))
            else:
                segment.remove()
        self._segments = []


class Pen:
    """Writes the chunks of one session."""

    __slots__ = ("_file", "_name", "key")

    def __init__(self, file: LiveFile, key: Key) -> None:
        self.key = key
        self._file = file
        self._name = "\0".join(key).encode()

    def write(self, chunk: Chunk, short: bytes = b"") -> None:
        """Keep a chunk that is about to be shown; of an update that has a record, that. Never raises.

        ``short``: the same in fewer bytes, as ``EventFormatter.deltas`` makes it.
        """
        self._file.write(self.key, DURABLE * chunk.durable, self._name, short or chunk.whole or chunk.lines)

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

    A segment ends at what is no entry: where nothing was written yet, or a kill tore one. One that is gone was somebody
    else's to read.

    Raises:
        OSError: it cannot be read.
    """
    for path in paths:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            continue
        at = 0
        while (found := _entry(data, at)) is not None:
            at, entry = found
            yield entry


def _entry(data: bytes, at: int) -> tuple[int, Entry] | None:
    """The entry at a place, and where it ends."""
    start = at + HEAD.size
    if start > len(data):
        return None
    flags, named, size, magic = HEAD.unpack_from(data, at)
    middle, end = start + named, start + named + size
    if magic != MAGIC or end > len(data) or data[end - 1 : end] != b"\n":
        return None
    project, _, session_id = data[start:middle].decode(errors="replace").partition("\0")
    return end, Entry((project, session_id), bool(flags & DURABLE), data[middle:end])
