"""The link between a runner and the bridge in a remote sandbox, without I/O (DESIGN 3.10).

Both ends run this file: a copy of it lies beside the bridge, so it imports the standard library only.

A connection begins with one text message each way: ``{"secret", "boot_id", "received"}`` from the runner,
``{"boot_id", "received"}`` from the bridge. Then binary frames: one byte kind, eight bytes number, the payload.
Frames are numbered from 1 each way, over all connections. ``a`` is an acknowledgement and has no number of its own:
all frames up to this one were received, so many bytes of the stream were consumed.
"""

from __future__ import annotations

import struct
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

STREAM: Final = b"s"
"""Bytes of the agent's stdin or stdout."""
STREAM_END: Final = b"z"
STDERR: Final = b"e"
CONTROL: Final = b"c"
"""One JSON line of the init's control channel."""
DEAF: Final = b"b"
"""The agent closed its stdin."""
OVER: Final = b"x"
"""The init is gone; the payload is its exit code as text."""
ACK: Final = b"a"

CHUNK_BYTES: Final = 256 * 1024
RING_BYTES: Final = 16 * 1024 * 1024
WINDOW_BYTES: Final = 4 * 1024 * 1024
MAX_FRAME_BYTES: Final = 8 * 1024 * 1024

CLOSE_SECRET: Final = 4401
CLOSE_UNKNOWN: Final = 4404
CLOSE_GAP: Final = 4409
CLOSE_SUPERSEDED: Final = 4410
FATAL: Final = (CLOSE_SECRET, CLOSE_UNKNOWN, CLOSE_GAP)
"""Close codes after which no other connection can resume the link."""

_HEAD = struct.Struct(">cQ")
_ACK = struct.Struct(">cQQ")


class LinkError(Exception):
    """The other end broke the rules of the link; the connection cannot go on."""


class Link:
    """One end: what was sent and not acknowledged is kept, bounded; what comes is taken in order, once.

    Args:
        ring_bytes: no more of the stream is numbered while so many bytes are not acknowledged.
        window_bytes: no more of the stream is numbered while so many of its bytes are not consumed.

    Attributes:
        received: number of the last frame that was taken.
        connected: whether ``next_frame`` has a connection to give frames to.
    """

    def __init__(self, ring_bytes: int = RING_BYTES, window_bytes: int = WINDOW_BYTES) -> None:
        self.received = 0
        self.connected = False
        self._ring_bytes, self._window_bytes = ring_bytes, window_bytes
        self._ring: dict[int, bytes] = {}
        self._in_ring = 0
        self._acked = 0
        self._last = 0
        self._cursor = 1
        self._first: deque[tuple[bytes, bytes]] = deque()
        self._stream: deque[memoryview] = deque()
        self._ending = False
        self._first_bytes = 0
        self._stream_queued = 0
        self._stream_sent = 0
        self._stream_consumed = 0
        self._taken = 0
        self._ack_due = False

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(self, kind: bytes, payload: bytes) -> None:
        """Queue a frame ahead of the stream; the window does not hold it back."""
        self._first.append((kind, payload))
        self._first_bytes += len(payload)

    def send_stream(self, data: bytes) -> None:
        """Queue bytes of the stream, any number; they go as the window opens."""
        if data:
            self._stream.append(memoryview(data))
            self._stream_queued += len(data)
            self._stream_sent += len(data)

    def end_stream(self) -> None:
        """The stream ends behind what is queued; idempotent."""
        self._ending = True

    def send_behind(self, kind: bytes, payload: bytes) -> None:
        """Queue a frame behind all of the stream that was handed over; the window holds neither back."""
        while self._stream:
            head = self._stream.popleft()
            self._stream_queued -= len(head)
            for at in range(0, len(head), CHUNK_BYTES):
                self.send(STREAM, bytes(head[at : at + CHUNK_BYTES]))
        self.send(kind, payload)

    @property
    def unconsumed(self) -> int:
        """Bytes of the own stream that the other end has not consumed."""
        return self._stream_sent - self._stream_consumed

    @property
    def backlog(self) -> int:
        """Bytes that are queued or not acknowledged."""
        return self._in_ring + self._first_bytes + self._stream_queued

    @property
    def settled(self) -> bool:
        """Everything that was handed over was acknowledged."""
        return not (self._ring or self._first or self._stream or self._ending)

    def has_room(self) -> bool:
        """Whether a reader may hand over more of the stream without exceeding the bounds."""
        return self.unconsumed < self._window_bytes and self.backlog < self._ring_bytes

    def next_frame(self) -> bytes | None:
        """The frame to write now; None while there is none, no room for it or no connection."""
        if not self.connected:
            return None
        if self._ack_due:
            self._ack_due = False
            return _ACK.pack(ACK, self.received, self._taken)
        if self._cursor <= self._last:
            self._cursor += 1
            return self._ring[self._cursor - 1]
        if self._first:
            kind, payload = self._first.popleft()
            self._first_bytes -= len(payload)
            return self._number(kind, payload)
        if self._stream:
            return self._next_of_stream()
        if self._ending:
            self._ending = False
            return self._number(STREAM_END, b"")
        return None

    def _next_of_stream(self) -> bytes | None:
        flying = self.unconsumed - self._stream_queued
        if flying >= self._window_bytes or self._in_ring >= self._ring_bytes:
            return None
        head = self._stream[0]
        chunk = bytes(head[:CHUNK_BYTES])
        if len(chunk) == len(head):
            self._stream.popleft()
        else:
            self._stream[0] = head[len(chunk) :]
        self._stream_queued -= len(chunk)
        return self._number(STREAM, chunk)

    def _number(self, kind: bytes, payload: bytes) -> bytes:
        self._last += 1
        frame = _HEAD.pack(kind, self._last) + payload
        self._ring[self._last] = frame
        self._in_ring += len(payload)
        self._cursor = self._last + 1
        return frame

    # -- receiving ---------------------------------------------------------------------------------------------------

    def take(self, frame: bytes) -> tuple[bytes, bytes] | None:
        """One frame that arrived: its kind and payload, None when it was known or an acknowledgement.

        Raises:
            LinkError: it is malformed, leaves a gap, or acknowledges what was never sent.
        """
        if len(frame) < _HEAD.size:
            raise LinkError("a frame without a number")
        kind, number = _HEAD.unpack_from(frame)
        if kind == ACK:
            if len(frame) != _ACK.size:
                raise LinkError("an acknowledgement of the wrong size")
            self._acknowledged(number, _ACK.unpack(frame)[2])
            return None
        self._ack_due = True
        if number <= self.received:
            return None
        if number != self.received + 1:
            raise LinkError(f"frame {number} came behind frame {self.received}")
        self.received = number
        return kind, frame[_HEAD.size :]

    def consume(self, count: int) -> None:
        """So many more bytes of the other end's stream were consumed."""
        self._taken += count
        self._ack_due = True

    def _acknowledged(self, number: int, consumed: int) -> None:
        if number >= self._cursor or consumed > self._stream_sent:
            raise LinkError("an acknowledgement of what was not sent")
        self._trim(number)
        self._stream_consumed = max(self._stream_consumed, consumed)

    def _trim(self, number: int) -> None:
        while self._acked < number:
            self._acked += 1
            self._in_ring -= len(self._ring.pop(self._acked)) - _HEAD.size

    # -- connections -------------------------------------------------------------------------------------------------

    def resume(self, received: int) -> None:
        """A connection is there whose other end has taken all frames up to ``received``.

        Raises:
            LinkError: frames behind that one are not kept any more, or were never sent.
        """
        if not self._acked <= received <= self._last:
            raise LinkError(f"cannot go on behind frame {received}: kept are {self._acked} to {self._last}")
        self._trim(received)
        self._cursor = received + 1
        self._ack_due = True
        self.connected = True

    def drop(self) -> None:
        """The connection is gone; what it may have lost is sent again by the next one."""
        self.connected = False
