"""Bounded JSON lines over the control socket."""

from __future__ import annotations

import json
import select
import socket
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_LINE = 4 * 1024 * 1024
MAX_UNSENT = 1024 * 1024
HAND_OVER_SECONDS = 1.0
_CHUNK = 65536


class Channel:
    """Bounded line framing over a non-blocking socket; a peer that does not read cannot block the init."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self._unread = bytearray()
        self._unsent = bytearray()
        self._skipping = False
        self.ended = False

    @property
    def events(self) -> int:
        """What to poll for; no new requests while the peer leaves replies unread."""
        reading = select.POLLIN if not self.ended and len(self._unsent) < MAX_UNSENT else 0
        return reading | (select.POLLOUT if self._unsent else 0)

    def receive(self) -> list[bytes | None]:
        """Complete lines that arrived; None stands for one that was too long."""
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.ended = True
            return []
        *lines, rest = (bytes(self._unread) + data).split(b"\n") if b"\n" in data else (data,)
        found: list[bytes | None] = []
        if not lines:
            self._unread += rest
        else:
            found = [line for line in lines[1:] if line.strip()]
            if not self._skipping and lines[0].strip():
                found.insert(0, lines[0])
            self._skipping = False
            self._unread = bytearray(rest)
        if len(self._unread) > MAX_LINE:
            if not self._skipping:
                found.append(None)
            self._skipping = True
        if self._skipping:
            self._unread.clear()
        return found

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message; when the peer has left too much unread it is dropped."""
        if not self.ended and len(self._unsent) < 2 * MAX_UNSENT:
            self._unsent += json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"
            self.flush()

    def flush(self) -> None:
        """Write what the socket takes now."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent[: 4 * _CHUNK])]
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True
            self._unsent.clear()

    def flush_within(self, seconds: float) -> None:
        """Write what is queued, at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while self._unsent and (left := deadline - time.monotonic()) > 0:
            select.select([], [self._socket], [], left)
            self.flush()

    def hand_over(self, descriptors: list[int]) -> bool:
        """Pass descriptors to the peer ahead of the next message; False when it does not take them."""
        self.flush_within(HAND_OVER_SECONDS)
        try:
            # Whitespace before a JSON line: descriptors travel with a byte.
            return not self._unsent and socket.send_fds(self._socket, [b" "], descriptors) == 1
        except OSError:
            return False

    def fileno(self) -> int:
        return self._socket.fileno()
