"""A private PostgreSQL of the test run: made once, and it can be killed, frozen, thawed and restarted.

``postgres_server`` is a fixture of every test (``tests/conftest.py``): one server for the whole run, awake at the start
of each test, whatever the test before did to it. ``postgres_url`` is an empty database on it, for one test. Tests that
use them run on the real loop.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.private_server import PrivateServer

INSTALL = "PostgreSQL is missing; install it:  apt-get install postgresql"
START_SECONDS = 30.0
DATABASE = "acp"
OPTIONS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "fsync": "off",
    "full_page_writes": "off",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "max_connections": "200",
    "shared_buffers": "32MB",
    "jit": "off",
}


class PostgresServer(PrivateServer):
    """One PostgreSQL cluster, without fsync; it keeps its data over a restart."""

    name = "PostgreSQL"
    start_seconds = START_SECONDS

    def __init__(self) -> None:
        self._programs = _programs()
        super().__init__()
        self._data = self._directory / "data"
        self.password = secrets.token_hex(8)
        self._made = 0
        self._initialise()

    @property
    def database(self) -> str:
        """The name of the newest database."""
        return f"{DATABASE}{self._made}"

    def url(self, database: str | None = None) -> str:
        """``postgresql://postgres:<password>@127.0.0.1:<port>/<database>``, by default the newest one."""
        return f"postgresql://postgres:{self.password}@127.0.0.1:{self.port}/{database or self.database}"

    def fresh(self) -> str:
        """The URL of an empty database; the one before it is gone, with everybody who was connected."""
        if self._made:
            self.sql(f"DROP DATABASE IF EXISTS {self.database} WITH (FORCE)")
        self._made += 1
        # Its order of text is not the bytes': what relies on that must say so.
        order = "LOCALE_PROVIDER icu ICU_LOCALE 'en-US'"
        self.sql(f"CREATE DATABASE {self.database} TEMPLATE template0 {order}")
        return self.url()

    def sql(self, text: str, database: str = "postgres") -> str:
        """Run statements; their rows, one a line, columns between ``|``."""
        options = ["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-c", text]
        return _run([self._program("psql"), *options, self.url(database)]).strip()

    def kill(self) -> None:
        """SIGKILL of every process: connections break, the port is closed; what was committed is there afterwards."""
        family = self._family()
        os.kill(self.pid, signal.SIGSTOP)
        for pid in family:
            _send(pid, signal.SIGKILL)
        assert self._process is not None
        self._process.wait(START_SECONDS)
        self._process = None
        deadline = time.monotonic() + START_SECONDS
        while any(_lives(pid) for pid in family):
            assert time.monotonic() < deadline, "a process of the server does not die"
            time.sleep(0.005)

    def stop(self) -> None:
        """SIGSTOP of every process: connections stay open and take bytes, nobody answers (a black hole)."""
        for pid in self._family():
            _send(pid, signal.SIGSTOP)

    def cont(self) -> None:
        """SIGCONT: what was sent meanwhile is answered now."""
        for pid in self._family():
            _send(pid, signal.SIGCONT)

    def disconnect(self) -> None:
        """End every connection from the server's side, as an administrator does."""
        self.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname LIKE 'acp%'")

    def _initialise(self) -> None:
        secret = self._directory / "password"
        secret.write_text(self.password)
        if os.geteuid() == 0:
            for path in (self._directory, secret):
                shutil.chown(path, _user().pw_uid)
        options = ["-U", "postgres", "--auth=md5", f"--pwfile={secret}", "--encoding=UTF8", "--locale=C", "--no-sync"]
        _run([self._program("initdb"), "-D", str(self._data), *options], **self._as_nobody())

    def _program(self, name: str) -> str:
        return str(self._programs / name)

    def _spawn(self, port: int) -> subprocess.Popen[bytes]:
        words = [word for name, value in {**OPTIONS, "port": str(port)}.items() for word in ("-c", f"{name}={value}")]
        command = [self._program("postgres"), "-D", str(self._data), *words]
        with (self._directory / "log").open("ab") as log:
            return self._guarded(command, stdout=log, stderr=log, start_new_session=True, **self._as_nobody())

    def _answers(self, port: int) -> bool:
        command = [self._program("pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(port)]
        return subprocess.run(command, check=False).returncode == 0

    def _as_nobody(self) -> dict[str, Any]:
        """PostgreSQL refuses to run as root."""
        inside = {"cwd": self._directory}
        if os.geteuid() != 0:
            return inside
        return {**inside, "user": _user().pw_uid, "group": _user().pw_gid, "extra_groups": []}

    def _family(self) -> list[int]:
        """The server's processes, the first one first."""
        processes = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
        return [self.pid, *(pid for pid in processes if _stat(pid)[1:2] == [str(self.pid)])]


def _programs() -> Path:
    """The folder of the newest PostgreSQL's programs."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    if found:
        return found[-1].parent
    program = shutil.which("initdb")
    if program is None:
        pytest.fail(INSTALL, pytrace=False)
    return Path(program).resolve().parent


def _run(command: list[str], **more: Any) -> str:
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=START_SECONDS, **more)
    assert ran.returncode == 0, ran.stderr
    return str(ran.stdout)


def _user() -> pwd.struct_passwd:
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    return names.get("postgres", names["nobody"])


def _stat(pid: int) -> list[str]:
    """State, parent, … of a process; nothing when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _lives(pid: int) -> bool:
    return _stat(pid)[:1] not in ([], ["Z"])


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


@pytest.fixture(scope="session")
def postgres_process() -> Iterator[PostgresServer]:
    """The one server of the run; take ``postgres_server`` instead."""
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def postgres_server(postgres_process: PostgresServer) -> PostgresServer:
    """The server, awake; a test may do to it what it wants."""
    postgres_process.ready()
    return postgres_process


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> str:
    """An empty database of this test's own."""
    return postgres_server.fresh()
