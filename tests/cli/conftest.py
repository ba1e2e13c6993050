"""The command line against the server with the double, which runs on a loop and thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from runner.cli.main import app
from runner.config import Settings
from runner.server.app import build_app, start_site, stop_site
from tests.server.double import TOKENS, FakeSessions

Invoke = Callable[..., Result]


@dataclass
class Served:
    """A running server and its sessions; ``do`` runs on its loop."""

    url: str
    sessions: FakeSessions
    loop: asyncio.AbstractEventLoop

    def do(self, work: Callable[..., Any], *arguments: Any) -> None:
        self.loop.call_soon_threadsafe(work, *arguments)


@pytest.fixture
def served() -> Iterator[Served]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> Any:
        sessions = FakeSessions()
        settings = Settings.model_validate({"server": {"ping_seconds": 0.05}})
        return sessions, *await start_site(build_app(sessions, settings, TOKENS), "127.0.0.1", 0, close_seconds=1)

    try:
        sessions, site, url = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
        yield Served(url, sessions, loop)
        asyncio.run_coroutine_threadsafe(stop_site(site), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Runs a command with a state directory of its own and no server."""
    monkeypatch.setenv("ACP_RUNNER_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    for name in ("ACP_RUNNER_URL", "ACP_RUNNER_TOKEN", "ACP_RUNNER_CONFIG"):
        monkeypatch.delenv(name, raising=False)

    def invoke(*arguments: str, answers: str = "") -> Result:
        return CliRunner().invoke(app, arguments, input=answers)

    return invoke


@pytest.fixture
def invoke(bare: Invoke, served: Served, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Runs a command that finds the server by its environment."""
    monkeypatch.setenv("ACP_RUNNER_URL", served.url)
    monkeypatch.setenv("ACP_RUNNER_TOKEN", "all")
    return bare
