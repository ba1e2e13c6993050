"""What the private servers of a test run share: a folder, a port that is kept, a start that is waited for, an end."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

from tests.ports import free_port

# A server is told of the end of the thread that started it: this one is there as long as the test run.
_SPAWNER = ThreadPoolExecutor(1)


class PrivateServer(ABC):
    """One server on a free port of 127.0.0.1; it keeps its port over a restart.

    Attributes:
        name: for people, and in the name of its folder.
        start_seconds: how long it may take to start and to die.
    """

    name: ClassVar[str]
    start_seconds: ClassVar[float]

    def __init__(self) -> None:
        self.port = 0
        self._directory = Path(tempfile.mkdtemp(prefix=f"acp-{self.name}-"))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the running server's first process."""
        assert self._process is not None, "the server is not started"
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until it answers; on another free port when somebody was faster, unless it had one."""
        assert self._process is None, "the server runs already"
        deadline = time.monotonic() + self.start_seconds
        while True:
            port = self.port or free_port()
            self._process = self._spawn(port)
            while self._process.poll() is None:
                if self._answers(port):
                    self.port = port
                    return
                assert time.monotonic() < deadline, self._log()
                time.sleep(0.01)
            self._process = None
            assert time.monotonic() < deadline, self._log()

    @abstractmethod
    def kill(self) -> None:
        """SIGKILL of all of it; the port is closed."""

    @abstractmethod
    def cont(self) -> None:
        """SIGCONT: what was sent meanwhile is answered now."""

    def restart(self) -> None:
        """Kill it if it runs and start it on the same port."""
        if self._process is not None:
            self.kill()
        self.start()

    def ready(self) -> None:
        """Awake, whatever happened to it before."""
        if self._process is None or self._process.poll() is not None:
            self._process = None
            self.start()
        self.cont()

    def close(self) -> None:
        """Kill it and remove its directory."""
        if self._process is not None:
            self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    @abstractmethod
    def _spawn(self, port: int) -> subprocess.Popen[bytes]: ...

    @abstractmethod
    def _answers(self, port: int) -> bool: ...

    def _guarded(self, command: list[str], **inside: Any) -> subprocess.Popen[bytes]:
        """A test run that is killed leaves no server behind."""
        guard = [setpriv, "--pdeathsig", "KILL"] if (setpriv := shutil.which("setpriv")) else []
        made = _SPAWNER.submit(lambda: subprocess.Popen([*guard, *command], stdin=subprocess.DEVNULL, **inside))
        return made.result()

    def _log(self) -> str:
        log = self._directory / "log"
        return f"{self.name} does not answer:\n{log.read_text() if log.exists() else '(no log)'}"
