"""Descriptors on an event loop, for the bridge: written without blocking, read while somebody wants to hear."""

from __future__ import annotations

import asyncio
import os
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

READ_BYTES = 256 * 1024
PIPE_BYTES = 1024 * 1024


class Writer:
    """Bytes on their way into a descriptor that does not block."""

    def __init__(self, fd: int, wrote: Callable[[int], None], broken: Callable[[], None]) -> None:
        os.set_blocking(fd, False)
        self._fd: int | None = fd
        self._wrote, self._broken = wrote, broken
        self._queue: deque[memoryview] = deque()
        self._waiting = False
        self._closing = False

    def write(self, data: bytes) -> None:
        """Write in order; dropped when the other side is gone."""
        if self._fd is not None and data:
            self._queue.append(memoryview(data))
            self._flush()

    def _flush(self) -> None:
        while self._queue and self._fd is not None:
            try:
                written = os.write(self._fd, self._queue[0])
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                self._drop()
                self._broken()
                return
            head = self._queue.popleft()
            if written < len(head):
                self._queue.appendleft(head[written:])
            self._wrote(written)
        self._watch()
        if self._closing and not self._queue:
            self._drop()

    def _watch(self) -> None:
        if self._fd is None or self._waiting == bool(self._queue):
            return
        loop = asyncio.get_running_loop()
        self._waiting = bool(self._queue)
        if self._waiting:
            loop.add_writer(self._fd, self._flush)
        else:
            loop.remove_writer(self._fd)

    def close(self) -> None:
        """Close behind what is queued."""
        self._closing = True
        self._flush()

    def _drop(self) -> None:
        if self._fd is not None:
            asyncio.get_running_loop().remove_writer(self._fd)
            os.close(self._fd)
            self._fd = None
        self._queue.clear()


class Reader:
    """Calls ``heard`` with what a descriptor yields while reading is on, and with empty bytes at its end."""

    def __init__(self, fd: int, heard: Callable[[bytes], None]) -> None:
        os.set_blocking(fd, False)
        self._fd: int | None = fd
        self._heard = heard
        self._reading = False

    def set(self, reading: bool) -> None:
        """Read or hold back."""
        if self._fd is None or reading == self._reading:
            return
        loop = asyncio.get_running_loop()
        self._reading = reading
        if reading:
            loop.add_reader(self._fd, self._read)
        else:
            loop.remove_reader(self._fd)

    def _read(self) -> bool:
        if self._fd is None:
            return False
        try:
            data = os.read(self._fd, READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        if not data:
            self.set(False)
            os.close(self._fd)
            self._fd = None
        self._heard(data)
        return bool(data)

    def drain(self) -> None:
        """Take what is there, no more than a pipe holds: who inherited it may write on for ever."""
        for _ in range(PIPE_BYTES // READ_BYTES + 1):
            if not self._read():
                break
