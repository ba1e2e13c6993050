"""A transport without processes: both ends in memory, for tests of everything above it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import orjson

from runner.acp.transport import ExitInfo, Receiver


class MemoryTransport:
    """The client's end. ``MemoryAgent`` is the other.

    Bytes arrive on the next turn of the loop, as they do from a pipe.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid
        self._receiver: Receiver | None = None
        self._inbound: deque[bytes | ExitInfo] = deque()
        self._stderr: deque[bytes] = deque()
        self._paused = False
        self._scheduled = False
        self.agent = MemoryAgent(self)
        self.stdin_closed = False
        self.gone = False

    @property
    def pid(self) -> int | None:
        """Process id, when the agent pretends to have one."""
        return self._pid

    @property
    def unsent(self) -> int:
        """What the agent refuses to read."""
        return self.agent.unread

    def connect(self, receiver: Receiver) -> None:
        """Attach the receiver."""
        self._receiver = receiver
        self._schedule()

    def send(self, data: bytes) -> bool:
        """See ``transport.Transport.send``."""
        if self.stdin_closed or self.gone:
            raise ConnectionError("the agent's stdin is closed")
        self.agent.receive(data)
        return not self.agent.reading_stopped

    def pause_reading(self) -> None:
        """Hold back what the agent writes."""
        self._paused = True

    def resume_reading(self) -> None:
        """Deliver again."""
        self._paused = False
        self._schedule()

    def close_stdin(self) -> None:
        """The agent reads EOF."""
        if not self.stdin_closed:
            self.stdin_closed = True
            self.agent.eof()

    def close(self) -> None:
        """Drop both ends; the receiver is told ``exited`` all the same."""
        self.close_stdin()
        if not self.gone:
            self._inbound.clear()
            self.push(ExitInfo(reason="its streams were closed"))

    def push(self, item: bytes | ExitInfo) -> None:
        """The agent wrote, or exited."""
        self._inbound.append(item)
        self._schedule()

    def push_stderr(self, data: bytes) -> None:
        """The agent wrote to stderr; no pause holds it back."""
        self._stderr.append(data)
        self._schedule()

    def drained(self) -> None:
        """The agent read everything that was sent."""
        if self._receiver is not None:
            self._receiver.writable()

    def _schedule(self) -> None:
        if not self._scheduled and self._receiver is not None:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        """At the agent's exit what is left is delivered even when reading is paused, as by ``stdio``."""
        self._scheduled = False
        assert self._receiver is not None
        while self._stderr and not self.gone:
            self._receiver.stderr_received(self._stderr.popleft())
        exiting = any(isinstance(item, ExitInfo) for item in self._inbound)
        while self._inbound and not self.gone and (exiting or not self._paused):
            item = self._inbound.popleft()
            if isinstance(item, bytes):
                self._receiver.data_received(item)
            else:
                self.gone = True
                self._receiver.eof_received()
                self._receiver.exited(item)


class MemoryAgent:
    """The agent's end: frames in, frames out, and switches for bad manners."""

    def __init__(self, transport: MemoryTransport) -> None:
        self._transport = transport
        self._frames: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._buffer = bytearray()
        self._held: list[bytes] = []
        self.reading_stopped = False
        self.chunk_bytes: int | None = None
        self.received: list[dict[str, Any]] = []

    @property
    def unread(self) -> int:
        """Bytes that were sent while the agent did not read."""
        return sum(map(len, self._held))

    def receive(self, data: bytes) -> None:
        """Bytes from the client."""
        if self.reading_stopped:
            self._held.append(data)
            return
        self._buffer += data
        *lines, rest = bytes(self._buffer).split(b"\n")
        self._buffer = bytearray(rest)
        for line in lines:
            frame = orjson.loads(line)
            self.received.append(frame)
            self._frames.put_nowait(frame)

    def read_again(self) -> None:
        """Read on after ``reading_stopped``."""
        self.reading_stopped = False
        held, self._held = self._held, []
        for data in held:
            self.receive(data)
        self._transport.drained()

    def eof(self) -> None:
        """The client closed our stdin."""
        self._frames.put_nowait(None)

    async def read_frame(self) -> dict[str, Any] | None:
        """The next frame; None at EOF."""
        return await self._frames.get()

    def send(self, *frames: dict[str, Any]) -> None:
        """Write frames, in chunks of ``chunk_bytes`` when that is set."""
        self.send_bytes(b"".join(orjson.dumps(frame) + b"\n" for frame in frames))

    def send_bytes(self, data: bytes) -> None:
        """Write raw bytes."""
        size = self.chunk_bytes or max(1, len(data))
        for start in range(0, len(data), size):
            self._transport.push(data[start : start + size])

    def send_stderr(self, data: bytes) -> None:
        """Write to stderr."""
        self._transport.push_stderr(data)

    def exit(self, info: ExitInfo | None = None) -> None:
        """Exit; what was written before arrives first."""
        self._transport.push(info or ExitInfo(code=0))
        self._frames.put_nowait(None)
