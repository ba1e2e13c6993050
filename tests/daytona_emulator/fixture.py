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
SECRET = "marker-5ecret"
"""The value of every secret in the tests of what goes to the service."""


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
        self._begun()

    def _begun(self) -> None:
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

    def snapshots(self) -> dict[str, str]:
        """Name to state of every snapshot."""
        found: dict[str, str] = self._call("GET", "/__emu/snapshots")
        return found

    def sandboxes(self) -> list[dict[str, Any]]:
        """``state()["sandboxes"]``, at once."""
        found: list[dict[str, Any]] = self._call("GET", "/__emu/sandboxes")
        return found

    def exchanges(self) -> list[dict[str, Any]]:
        """Every exchange so far; see ``recording.Exchange``."""
        found: list[dict[str, Any]] = self._call("GET", "/__emu/exchanges")
        return found

    def renew(self) -> None:
        """End what it is with all it started, proved by a census, and be another one at another address."""
        assert self._process.stdin is not None
        marker, root = self.marker, self._root
        self._process.stdin.write(b"next\n")
        self._process.stdin.flush()
        self._begun()
        assert scan(marker) == []
        assert not Path(root).exists()

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


class Emulators:
    """One process for many tests; a test that kills it gets the next one a new one."""

    def __init__(self) -> None:
        self._process: EmulatorProcess | None = None

    def next(self) -> EmulatorProcess:
        """A fresh one."""
        if self._process is None:
            self._process = EmulatorProcess()
        return self._process

    def over(self, emulator: EmulatorProcess) -> None:
        """A test is done with it."""
        if emulator.alive:
            emulator.renew()
        else:
            self.close()

    def close(self) -> None:
        """The last test is over."""
        if self._process is not None:
            self._process.close()
            self._process = None


@pytest.fixture(scope="session")
def daytona_emulators() -> Iterator[Emulators]:
    """Starts with the first test that needs it."""
    emulators = Emulators()
    yield emulators
    emulators.close()


@pytest.fixture
def daytona_emulator(daytona_emulators: Emulators) -> Iterator[EmulatorProcess]:
    """A fresh Daytona on loopback; what was said to it and by it is judged in the end (``contract.py``)."""
    emulator = daytona_emulators.next()
    try:
        yield emulator
        exchanges = [Exchange(**one) for one in emulator.exchanges()] if emulator.alive else []
    finally:
        daytona_emulators.over(emulator)
    assert sdk_violations(exchanges) == []
    assert openapi_violations(exchanges) == []
    assert careless(exchanges) == []


def careless(exchanges: list[Exchange]) -> list[str]:
    """Where this runner forgot a net of the service's, or let a secret out; one line each.

    Every creation has an auto-stop, an auto-delete and a time to live (case C3); ``SECRET`` is only in what stores it
    (case K3).
    """
    found = []
    for one in exchanges:
        asked = one.asked if isinstance(one.asked, dict) else {}
        if (one.method, one.template) == ("POST", "/api/sandbox") and "acp-runner-store" in asked.get("labels", {}):
            nets = [asked.get(name) or 0 for name in ("autoStopInterval", "autoDeleteInterval", "ttlMinutes")]
            if min(nets) <= 0 or asked.get("public"):
                found.append(f"created without a net: {asked}")
        stores = one.template in ("/api/secret", "/api/secret/{id}") and one.method in ("POST", "PATCH")
        if SECRET in json.dumps(one.answered) or (SECRET in json.dumps([one.path, one.asked]) and not stores):
            found.append(f"{one.method} {one.path} holds a secret")
    return found
