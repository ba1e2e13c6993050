"""The agent's end of each kind of transport, for the one contract that all of them keep."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import orjson

from runner.acp.memory import MemoryTransport
from runner.acp.stdio import StdioTransport
from runner.acp.transport import ExitInfo, Transport


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


FarEnd = MemoryEnd | PipeEnd
