"""A private ``redis-server`` of the test run: fast to start, and it can be killed, frozen, thawed and restarted.

``redis_server`` is a fixture of every test (``tests/conftest.py``): one process for the whole run, awake and empty at
the start of each test, whatever the test before did to it. Tests that use it run on the real loop.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator

import pytest

from tests.private_server import PrivateServer

INSTALL = "redis-server is missing; install it:  apt-get install redis-server"
START_SECONDS = 10.0


class RedisServer(PrivateServer):
    """One ``redis-server``, without persistence: it is empty after a restart."""

    name = "redis-server"
    start_seconds = START_SECONDS

    def __init__(self) -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.fail(INSTALL, pytrace=False)
        super().__init__()
        self._program = program

    @property
    def url(self) -> str:
        """``redis://127.0.0.1:<port>/0``."""
        return f"redis://127.0.0.1:{self.port}/0"

    def kill(self) -> None:
        """SIGKILL: the port is closed, everything is forgotten."""
        assert self._process is not None, "the server is not started"
        self._process.kill()
        self._process.wait(self.start_seconds)
        self._process = None

    def stop(self) -> None:
        """SIGSTOP: connections stay open and take bytes, nobody answers (a black hole)."""
        os.kill(self.pid, signal.SIGSTOP)

    def cont(self) -> None:
        """SIGCONT: what was sent meanwhile is answered now."""
        os.kill(self.pid, signal.SIGCONT)

    def command(self, *words: str | float) -> bytes:
        """Send one command on a connection of its own; the raw reply with its type byte."""
        return _ask(self.port, *words)

    def flush(self) -> None:
        """Forget every key, as a plane that lost its memory does; scripts too."""
        assert self.command("FLUSHALL") == b"+OK\r\n"
        assert self.command("SCRIPT", "FLUSH") == b"+OK\r\n"

    def ready(self) -> None:
        """Awake and empty, whatever happened to it before."""
        super().ready()
        self.flush()

    def _spawn(self, port: int) -> subprocess.Popen[bytes]:
        options = {
            "port": str(port),
            "bind": "127.0.0.1",
            "dir": str(self._directory),
            "logfile": str(self._directory / "log"),
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        return self._guarded([self._program, *words], stdout=subprocess.DEVNULL)

    def _answers(self, port: int) -> bool:
        try:
            return _ask(port, "PING") == b"+PONG\r\n"
        except OSError:
            return False


def _ask(port: int, *words: str | float) -> bytes:
    parts = [str(word).encode() for word in words]
    frame = b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
    with socket.create_connection(("127.0.0.1", port), timeout=START_SECONDS) as link:
        link.sendall(frame)
        return link.recv(65536)


@pytest.fixture(scope="session")
def redis_process() -> Iterator[RedisServer]:
    """The one server of the run; take ``redis_server`` instead."""
    server = RedisServer()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def redis_server(redis_process: RedisServer) -> RedisServer:
    """The server, awake and empty; a test may do to it what it wants."""
    redis_process.ready()
    return redis_process
