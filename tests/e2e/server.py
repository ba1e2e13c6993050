"""A real ``acp-runner serve`` child with a state directory of its own, and what must hold when it is gone."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from runner.client import Client
from runner.sandbox.census import ProcessInfo, scan
from runner.sandbox.namespace import inner_pid
from tests.agents import SCRIPTED

COMMAND = [sys.executable, "-m", "runner.cli.main", "serve", "--port", "0"]
SECONDS = 40.0
"""How long anything may take on a machine that does other things too; no bound of the product."""
LINE_MIB = 21
CONFIG = f"""
[turn]
drain_seconds = 1
[acp]
max_line_bytes = {LINE_MIB * 1024 * 1024}
[harness.scripted]
command = [{json.dumps(sys.executable)}, {json.dumps(str(SCRIPTED))}]
read = [{json.dumps(str(SCRIPTED.parent))}]
"""


class Server:
    """One state directory and the server process on it; ``start`` and ``stop`` may alternate.

    Args:
        folder: where the configuration, the log and the state directory are kept.
        config: TOML behind ``CONFIG``'s; a table of it must not be named again, so ``instead`` replaces lines of it.
        env: more variables of the server process.
        gates: what scripted agents may write to beside their own; None: all beside ``folder``.
    """

    command = COMMAND

    def __init__(
        self,
        folder: Path,
        config: str = "",
        *,
        instead: dict[str, str] | None = None,
        env: dict[str, str] | None = None,
        gates: Path | None = None,
    ) -> None:
        text = CONFIG
        for old, new in (instead or {}).items():
            assert old in text
            text = text.replace(old, new)
        folder.mkdir(parents=True, exist_ok=True)
        text += f"write = [{json.dumps(str(gates or folder.parent))}]\n"
        self.folder = folder
        self.state_dir = folder / "state"
        self.config = folder / "acp-runner.toml"
        self.config.write_text(text + config)
        self._env = env or {}
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.replica_id = ""

    def start(self) -> None:
        """Start the process and wait for its ready line; blocks."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("ACP_RUNNER_")}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self.command, "--state-dir", str(self.state_dir), "--config", str(self.config)],
                env={**own, "TERM": "dumb", **self._env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], SECONDS)[0]:
            raise AssertionError(f"no ready line in {SECONDS} s\n{self.said()}")
        line = self._process.stdout.readline()
        assert line, self.said()
        ready = json.loads(line)
        assert ready["ready"] is True
        self.url, self.replica_id = ready["url"], ready["replica_id"]

    @property
    def log(self) -> Path:
        """The server's stderr."""
        return self.folder / "server.log"

    def said(self) -> str:
        """The end of the log, for a failing test."""
        return self.log.read_text(errors="replace")[-6000:] if self.log.exists() else ""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    @property
    def token(self) -> str:
        return (self.state_dir / "token").read_text().strip()

    @property
    def store_id(self) -> str:
        """Names this state directory in every marker."""
        store = sqlite3.connect(f"file:{self.state_dir / 'store.sqlite3'}?mode=ro", uri=True)
        try:
            return str(store.execute("SELECT value FROM meta WHERE name = 'store_id'").fetchone()[0])
        finally:
            store.close()

    def client(self) -> Client:
        return Client(self.url, self.token)

    def workspace(self, session: str) -> Path:
        return self.state_dir / "workspaces" / "default" / session

    def census(self) -> list[ProcessInfo]:
        """Everybody who carries a marker of this state directory, with all they started."""
        return scan(f"{self.store_id}:")

    def outside(self, session: str, inner: int) -> int:
        """The number on this machine of a live process of a session, from the one that it told inside its cell."""
        return next(pid for pid in self.processes(session) if inner_pid(pid) == inner)

    def processes(self, session: str) -> list[int]:
        """Live processes of a session, by its home in their environment or arguments; zombies tell neither."""
        home = f"{self.state_dir}/homes/default/{session}/home\0".encode()
        return [pid for pid in _pids() if home in _told(pid)]

    def seats(self) -> set[str]:
        """Seats that have live processes."""
        return {info.marker.rpartition(":")[2] for info in self.census() if info.marker}

    def everybody(self) -> list[int]:
        """The census by another mark, for who lost the marker: the state directory, as HOME, TMPDIR or argument."""
        mark = str(self.state_dir).encode()
        return [pid for pid in _pids() if pid != os.getpid() and mark in _told(pid)]

    def environ(self) -> bytes:
        """The server's own variables."""
        return Path(f"/proc/{self.pid}/environ").read_bytes()

    def rss_peak(self) -> int:
        """Most bytes that were resident since ``forget_peak``."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        return int(next(line for line in text.splitlines() if line.startswith("VmHWM:")).split()[1]) * 1024

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def kill(self) -> None:
        """SIGKILL, and only of the server."""
        assert self._process is not None
        self._process.kill()
        self._reaped()

    def terminate(self) -> None:
        """SIGTERM: the drain begins."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)

    def exit_code(self) -> int:
        """Wait for the process to end; blocks."""
        return self._reaped()

    def _reaped(self) -> int:
        assert self._process is not None
        code = self._process.wait(SECONDS)
        if self._process.stdout is not None:
            self._process.stdout.close()
        return code

    def stop(self) -> None:
        """End it by SIGTERM and assert that nothing is left: exit 0, port closed, nobody, no address file; blocks."""
        if not self.running:
            self.assert_nobody()
            return
        self.terminate()
        try:
            code = self._reaped()
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the server did not end in {SECONDS} s\n{self.said()}") from None
        assert code == 0, self.said()
        assert self.port_closed()
        assert not (self.state_dir / "server.json").exists()
        left = self.census()
        assert not left, left
        assert not self.everybody()
        assert "Traceback" not in self.log.read_text(errors="replace"), self.said()

    def port_closed(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(self.address) != 0

    def assert_nobody(self, seconds: float = SECONDS) -> None:
        """Wait until nobody of this state directory lives; blocks."""
        deadline = time.monotonic() + seconds
        while (left := self.census()) or self.everybody():
            assert time.monotonic() < deadline, left
            time.sleep(0.02)


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _told(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


async def until(done: Callable[[], Any], what: str, seconds: float = SECONDS) -> Any:
    """Poll until ``done()`` is true; its value."""
    deadline = time.monotonic() + seconds
    while not (value := done()):
        assert time.monotonic() < deadline, f"not in {seconds:g} s: {what}"
        await asyncio.sleep(0.01)
    return value
