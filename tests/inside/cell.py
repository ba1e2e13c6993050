"""A cell under test: the real init, its control channel and an independent look at who is alive."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.agents.census import alive_with

INSIDE = Path(__file__).resolve().parents[2] / "sandboxes" / "inside"
INIT = INSIDE / "init.py"
MARKER = "CELL_TEST_MARKER"
# The interpreter may lie in a directory that is root's alone; reading it is the one privilege that is kept.
AS_NOBODY = (
    *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-kill"),
    *("--inh-caps=-all,+dac_override", "--ambient-caps=-all,+dac_override", "--"),
)


class Cell:
    """Starts the init with pipes as the agent's stdio; a context manager that leaves nobody behind."""

    def __init__(self, unprivileged: bool = False, init: Sequence[str] = (str(INIT),)) -> None:
        self.marker = uuid.uuid4().hex
        self.variable = f"{MARKER}={self.marker}"
        self.events: list[dict[str, Any]] = []
        self._next_id = 0
        self._buffer = b""
        self.control, theirs = socket.socketpair()
        self.control.settimeout(20)
        stdin, self.stdin = os.pipe()
        self.stdout, stdout = os.pipe()
        self.stderr, stderr = os.pipe()
        self.process = subprocess.Popen(
            [
                *(AS_NOBODY if unprivileged else ()),
                *(sys.executable, "-I", "-S", *init, "--control-fd", str(theirs.fileno())),
            ],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=[theirs.fileno()],
            env={"PATH": os.environ["PATH"], MARKER: self.marker},
            cwd="/",
            start_new_session=True,
        )
        theirs.close()
        for fd in (stdin, stdout, stderr):
            os.close(fd)
        self._output = b""

    def __enter__(self) -> Cell:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.control.close()
        self.close_stdin()
        os.close(self.stdout)
        os.close(self.stderr)
        self.process.wait(20)
        assert alive_with(self.variable) == {}

    def send(self, **request: Any) -> int:
        """Send a request without waiting; its id."""
        self._next_id += 1
        self.control.sendall(json.dumps({"id": self._next_id, **request}).encode() + b"\n")
        return self._next_id

    def receive(self) -> dict[str, Any]:
        """The next message; ``EOFError`` at the end of the channel."""
        while b"\n" not in self._buffer:
            block = self.control.recv(65536)
            if not block:
                raise EOFError
            self._buffer += block
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def reply(self, identity: Any) -> dict[str, Any]:
        """The reply to a request; events met on the way are kept in ``events``."""
        while True:
            message = self.receive()
            if "event" in message:
                self.events.append(message)
            elif message["id"] == identity:
                return message

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its reply."""
        return self.reply(self.send(**request))

    def ok(self, **request: Any) -> dict[str, Any]:
        """A request that must succeed."""
        reply = self.ask(**request)
        assert reply["ok"], reply
        return reply

    def event(self, name: str) -> dict[str, Any]:
        """The first event of that name, waited for."""
        while True:
            for event in self.events:
                if event["event"] == name:
                    return event
            message = self.receive()
            assert "event" in message, message
            self.events.append(message)

    def spawn(self, *argv: str, env: dict[str, str] | None = None, cwd: str = "/", **more: Any) -> int:
        """Start the agent with the marker in its environment; its pid."""
        environment = {"PATH": os.environ["PATH"], MARKER: self.marker, **(env or {})}
        return int(self.ok(op="spawn", argv=list(argv), env=environment, cwd=cwd, **more)["pid"])

    def line(self) -> str:
        """The next line of the agent's stdout; empty at its end."""
        while b"\n" not in self._output:
            block = os.read(self.stdout, 65536)
            if not block:
                break
            self._output += block
        line, _, self._output = self._output.partition(b"\n")
        return line.decode()

    def write(self, text: str) -> None:
        """A line to the agent's stdin."""
        os.write(self.stdin, text.encode() + b"\n")

    def close_stdin(self) -> None:
        """The end of the agent's stdin; idempotent."""
        fd, self.stdin = self.stdin, -1
        if fd >= 0:
            os.close(fd)

    def say(self, text: str) -> str:
        """A line to the agent, and its answer."""
        self.write(text)
        return self.line()

    def alive(self) -> dict[int, str]:
        """Who is alive in the cell, the init included, seen from outside."""
        return alive_with(self.variable)
