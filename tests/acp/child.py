"""An agent in a child process over real pipes, and whoever waits for it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from runner.acp.connection import AgentConnection
from runner.acp.stdio import StdioTransport
from runner.acp.transport import ExitInfo
from tests.acp.oracle import Oracle

PRELUDE = """
import json, os, sys, time
def send(frame):
    os.write(1, json.dumps({"jsonrpc": "2.0", **frame}).encode() + b"\\n")
def write(data):
    view = memoryview(data)
    while view:
        view = view[os.write(1, view):]
def read():
    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit(0)
    return json.loads(line)
def answer(method, result):
    frame = read()
    assert frame.get("method") == method, frame
    send({"id": frame["id"], "result": result})
    return frame
def handshake():
    answer("initialize", {"protocolVersion": 1})
    answer("session/new", {"sessionId": "s1"})
def chunk(text):
    update = {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": text}}
    return json.dumps({"jsonrpc": "2.0", "method": "session/update",
                       "params": {"sessionId": "s1", "update": update}}).encode() + b"\\n"
"""


class Child:
    """``async with Child(script)``: its connection; the process is gone and waited for afterwards."""

    def __init__(self, script: str = "", *, program: Path | None = None, **limits: Any) -> None:
        self._argv = [sys.executable, "-I", "-c", PRELUDE + script]
        if program is not None:
            self._argv = [sys.executable, str(program)]
        self._limits = limits
        self.oracle = Oracle()

    async def __aenter__(self) -> Child:
        self.process = subprocess.Popen(  # noqa: ASYNC220 - the transport wants bare descriptors
            self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
        stdin, stdout, stderr = map(_owned, (self.process.stdin, self.process.stdout, self.process.stderr))
        self.transport = StdioTransport(stdin, stdout, stderr, self.process.pid)
        self._watch_frames()
        self.connection = AgentConnection(self.transport, **self._limits)
        self._waiting = asyncio.get_running_loop().create_task(self._wait())
        return self

    def _watch_frames(self) -> None:
        """Every frame is judged as it is sent."""
        send = self.transport.send

        def judged(data: bytes) -> bool:
            frame = orjson.loads(data)
            if "method" in frame:
                self.oracle.judge(frame)
            return send(data)

        self.transport.send = judged  # type: ignore[method-assign]

    async def _wait(self) -> None:
        status = await asyncio.get_running_loop().run_in_executor(None, self.process.wait)
        self.transport.process_exited(ExitInfo(code=status) if status >= 0 else ExitInfo(signal=-status))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.transport.close_stdin()
        if self.process.poll() is None:
            self.process.kill()
        await self._waiting
        self.transport.close()

    async def handshake(self) -> None:
        await self.connection.initialize(seconds=20)
        await self.connection.new_session("/", [], seconds=20)


def _owned(pipe: Any) -> int:
    """A descriptor of our own in place of a file object's."""
    fd = os.dup(pipe.fileno())
    pipe.close()
    return fd
