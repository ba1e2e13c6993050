"""The runner's end of a cell init's control channel: JSON lines over a socket, replies matched by id."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any, Final

from runner.sandbox.init_calls import Replies, Reply, message_of

MAX_LINE: Final = 4 * 1024 * 1024
_CHUNK: Final = 65536
_MOST_PASSED: Final = 128


class ControlChannel:
    """Sends requests at once, without waiting; all methods are called on the event loop's thread.

    Args:
        end: a connected stream socket; it belongs to the channel from here on.
        on_event: called with every message that has no id.
        on_end: called once when the init closed its end or said what no init says, not after ``close``.
    """

    def __init__(self, end: socket.socket, on_event: Callable[[Reply], None], on_end: Callable[[], None]) -> None:
        end.setblocking(False)
        self._socket = end
        self._on_event = on_event
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._replies = Replies()
        self._unread = b""
        self._unsent = bytearray()
        self._passed: list[int] = []
        self.ended = False
        self._loop.add_reader(end, self._read)

    def request(self, op: str, **members: Any) -> asyncio.Future[Reply | None]:
        """Write a request to the socket before this returns, as far as the kernel takes it.

        Returns:
            A future of the reply, of None when the channel ends first; it never holds an exception.
        """
        line, future = self._replies.asked(op, members)
        if self.ended:
            self._replies.end()
            return future
        idle = not self._unsent
        self._unsent += line + b"\n"
        if idle:
            self._send()
            if self._unsent:
                self._loop.add_writer(self._socket, self._write)
        return future

    def _send(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent[: 4 * _CHUNK])]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._unsent.clear()

    def _write(self) -> None:
        self._send()
        if not self._unsent:
            self._loop.remove_writer(self._socket)

    def _read(self) -> bool:
        """Take one chunk; False when there was none or the channel ended."""
        try:
            data, passed, _, _ = socket.recv_fds(self._socket, _CHUNK, _MOST_PASSED, socket.MSG_CMSG_CLOEXEC)
            self._passed += passed
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        *lines, self._unread = (self._unread + data).split(b"\n")
        if not data or not all(map(self._take, lines)) or len(self._unread) > MAX_LINE:
            self._end()
        return not self.ended

    def passed(self) -> list[int]:
        """Descriptors that came with the messages so far; the caller owns them."""
        passed, self._passed = self._passed, []
        return passed

    def _take(self, line: bytes) -> bool:
        message = message_of(line)
        if message is None:
            return False
        if "event" in message:
            self._on_event(message)
        else:
            self._replies.take(message)
        return True

    def drain(self) -> None:
        """Take what the init wrote before it ended; for when its exit was learnt from the system."""
        while not self.ended and self._read():
            pass
        self._end()

    def _end(self) -> None:
        if not self.ended:
            self.close()
            self._on_end()

    def close(self) -> None:
        """End the channel, which tears the cell down; pending requests get None; idempotent."""
        if self.ended:
            return
        self.ended = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        for fd in self.passed():
            os.close(fd)
        self._replies.end()
