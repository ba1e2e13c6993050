"""The emulator in a process of its own, as a fixture of every test (``tests/conftest.py``)."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from runner.sandbox.census import kill_all, scan
from tests.daytona_emulator.contract import openapi_violations, sdk_violations
from tests.daytona_emulator.recording import Exchange

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 20.0


class EmulatorProcess:
    """``python -m tests.daytona_emulator`` and its controls; they block, and loopback answers in milliseconds.

    Attributes:
        api_url: for ``DaytonaConfig.api_url``.
        api_key: for ``DaytonaConfig.api_key``.
        marker: what begins the census marker of every process of every sandbox.
    """

    def __init__(self, *options: str) -> None:
        # A test run that is killed closes the pipe, and the emulator ends all it started.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.daytona_emulator", *options],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the emulator did not start"
        ready = json.loads(line)
        self.origin = str(ready["origin"])
        self.api_url = str(ready["api_url"])
        self.api_key = str(ready["api_key"])
        self.marker = str(ready["marker"])
        self._root = str(ready["root"])

    def fault(self, match: str, **fields: Any) -> None:
        """Add a rule; see ``faults.Fault``."""
        self._call("POST", "/__emu/fault", {"match": match, **fields})

    def clear_faults(self) -> None:
        """Drop every rule."""
        self._call("DELETE", "/__emu/fault")

    def scenario(self, name: str, **asked: Any) -> None:
        """Make something happen; see ``scenarios``."""
        self._call("POST", "/__emu/scenario", {"name": name, **asked})

    def advance(self, seconds: float) -> None:
        """Move the service's clock; what is due then is done when this returns."""
        self._call("POST", "/__emu/clock", {"advance": seconds})

    def bake(self, snapshot: str, files: Mapping[str, bytes]) -> None:
        """A snapshot whose sandboxes have these executable files in their home from the start."""
        packed = {name: base64.b64encode(data).decode() for name, data in files.items()}
        self._call("POST", "/__emu/bake", {"snapshot": snapshot, "files": packed})

    def state(self) -> dict[str, Any]:
        """``{"sandboxes": [{id, name, state, labels, home}], "processes": [pid], "faults": [...], "listeners": n}``."""
        found: dict[str, Any] = self._call("GET", "/__emu/state")
        return found

    def exchanges(self) -> list[dict[str, Any]]:
        """Every exchange so far; see ``recording.Exchange``."""
        found: list[dict[str, Any]] = self._call("GET", "/__emu/exchanges")
        return found

    @property
    def alive(self) -> bool:
        """It runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL, as a service that goes away; what ran in its sandboxes runs on until ``close``."""
        self._process.kill()
        self._process.wait(SECONDS)

    def close(self) -> None:
        """End it; every process of every sandbox is gone afterwards, proved by a census."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(SECONDS)
        self._process.stdout.close()
        kill_all(self.marker, SECONDS)
        shutil.rmtree(self._root, ignore_errors=True)
        assert scan(self.marker) == []

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = json.dumps(body or {}).encode()
        asked = urllib.request.Request(self.origin + path, data, {"Content-Type": "application/json"}, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(asked, timeout=SECONDS) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(error.read().decode()) from None


@pytest.fixture
def daytona_emulator() -> Iterator[EmulatorProcess]:
    """A fresh Daytona on loopback; what was said to it and by it is judged in the end (``contract.py``)."""
    emulator = EmulatorProcess()
    try:
        yield emulator
        exchanges = [Exchange(**one) for one in emulator.exchanges()] if emulator.alive else []
    finally:
        emulator.close()
    assert sdk_violations(exchanges) == []
    assert openapi_violations(exchanges) == []
