"""The agent's end of each kind of transport, for the one contract that all of them keep."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import orjson

from runner.acp.link import STDERR, STREAM, Link
from runner.acp.memory import MemoryTransport
from runner.acp.remote import RemoteTransport
from runner.acp.stdio import StdioTransport
from runner.acp.transport import ExitInfo, Transport
from runner.acp.websocket import Address


class Recorder:
    """A receiver that keeps the story of its calls."""

    def __init__(self) -> None:
        self.story: list[str] = []
        self.data = b""
        self.stderr = b""
        self.exit: ExitInfo | None = None
        self.pause_after: int | None = None
        self.transport: Transport | None = None

    def _tell(self, what: str) -> None:
        if not self.story or self.story[-1] != what:
            self.story.append(what)

    def data_received(self, data: bytes) -> None:
        assert data
        self._tell("data")
        self.data += data
        if self.pause_after is not None and len(self.data) >= self.pause_after:
            assert self.transport is not None
            self.transport.pause_reading()

    def stderr_received(self, data: bytes) -> None:
        self.stderr += data

    def eof_received(self) -> None:
        assert "eof" not in self.story
        self._tell("eof")

    def exited(self, info: ExitInfo) -> None:
        assert self.exit is None
        self._tell("exited")
        self.exit = info

    def writable(self) -> None:
        self._tell("writable")


class MemoryEnd:
    """An agent that reads only when it is told to."""

    def __init__(self) -> None:
        self.transport: Any = MemoryTransport()
        self._agent = self.transport.agent
        self._agent.reading_stopped = True

    def write(self, data: bytes) -> None:
        self._agent.chunk_bytes = 1000
        self._agent.send_bytes(data)

    def write_stderr(self, data: bytes) -> None:
        self._agent.send_stderr(data)

    async def read(self) -> list[Any]:
        """All frames that were sent, up to the end of stdin or of what is there."""
        self._agent.read_again()
        self._agent.reading_stopped = True
        received = list(self._agent.received)
        self._agent.received.clear()
        return received

    def exit(self, info: ExitInfo) -> None:
        self._agent.exit(info)

    def end(self) -> None:
        pass


class PipeEnd:
    """The agent's descriptors of three pipes; the exit is reported as by whoever waits for the process."""

    def __init__(self) -> None:
        stdin_read, stdin_write = os.pipe()
        stdout_read, stdout_write = os.pipe()
        stderr_read, stderr_write = os.pipe()
        self.stdin, self.stdout, self.stderr = stdin_read, stdout_write, stderr_write
        for fd in (stdin_read, stdout_write, stderr_write):
            os.set_blocking(fd, False)
        self.transport: Any = StdioTransport(
            stdin_write, stdout_read, stderr_read, exit_wait_seconds=0.05, high_mark=100_000, low_mark=10_000
        )

    def write(self, data: bytes) -> None:
        assert os.write(self.stdout, data) == len(data)

    def write_stderr(self, data: bytes) -> None:
        assert os.write(self.stderr, data) == len(data)

    async def read(self) -> list[Any]:
        """All frames that were sent, up to the end of stdin or of what is there."""
        got = b""
        idle = 0
        while idle < 10:
            try:
                data = os.read(self.stdin, 65_536)
            except BlockingIOError:
                idle += 1
                await asyncio.sleep(0.001)
                continue
            if not data:
                break
            idle = 0
            got += data
        return [orjson.loads(line) for line in got.splitlines()]

    def exit(self, info: ExitInfo) -> None:
        self.end()
        self.transport.process_exited(info)

    def end(self) -> None:
        """All descriptors are closed, as by the kernel at an exit."""
        for fd in (self.stdin, self.stdout, self.stderr):
            if fd >= 0:
                os.close(fd)
        self.stdin = self.stdout = self.stderr = -1


class BridgeEnd:
    """The other end of a link without a network: both ends know each other, and frames cross on the loop."""

    def __init__(self) -> None:
        self.transport: Any = RemoteTransport(
            self._nowhere,
            "",
            resume_seconds=1.0,
            on_control=lambda line: None,
            on_over=lambda code, why: None,
            exit_wait_seconds=0.05,
            high_mark=100_000,
            low_mark=10_000,
        )
        self._ours, self._theirs = Link(), self.transport.connection.link
        self._ours.resume(0)
        self._theirs.resume(0)
        self._stdin = b""
        self.transport.connection.flush = self._cross  # type: ignore[method-assign]

    async def _nowhere(self, refused: bool) -> Address:
        raise AssertionError("there is no network")

    def _cross(self) -> None:
        """Let everything that may go reach the other end; it is consumed only when the agent reads."""
        while (frame := self._theirs.next_frame()) is not None:
            taken = self._ours.take(frame)
            if taken is not None and taken[0] == STREAM:
                self._stdin += taken[1]
        asyncio.get_running_loop().call_soon(self._arrive)

    def _arrive(self) -> None:
        while (frame := self._ours.next_frame()) is not None:
            self.transport.connection._take(frame)

    def write(self, data: bytes) -> None:
        self._ours.send_stream(data)
        self._cross()

    def write_stderr(self, data: bytes) -> None:
        self._ours.send(STDERR, data)
        self._cross()

    async def read(self) -> list[Any]:
        """All frames that were sent."""
        got = b""
        while self._stdin or self._theirs.unconsumed:
            got += self._stdin
            self._ours.consume(len(self._stdin))
            self._stdin = b""
            self._cross()
            await asyncio.sleep(0)
        return [orjson.loads(line) for line in got.splitlines()]

    def exit(self, info: ExitInfo) -> None:
        self._cross()
        asyncio.get_running_loop().call_soon(self.transport.process_exited, info)

    def end(self) -> None:
        """Nothing is held."""


FarEnd = MemoryEnd | PipeEnd | BridgeEnd
