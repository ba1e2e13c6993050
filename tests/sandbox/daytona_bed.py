"""The Daytona provider on an emulator of its service."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from runner.clock import SystemClock
from runner.sandbox.daytona.provider import DaytonaProvider
from runner.sandbox.daytona.service import DaytonaService
from runner.sandbox.daytona.terms import Terms
from runner.sandbox.port import SandboxSpec
from tests.daytona_emulator.fixture import EmulatorProcess

ECHO = (
    sys.executable,
    "-I",
    "-c",
    "import os, sys\nfor line in sys.stdin:\n    print(os.getcwd() if line == 'cwd\\n' else line.strip(), flush=True)",
)


def provider(emulator: EmulatorProcess, store_id: str = "store_1", **terms: Any) -> DaytonaProvider:
    async def opened() -> DaytonaService:
        return DaytonaService(emulator.api_url, emulator.api_key, "us")

    members = {"orphan_seconds": 4.0, "python": sys.executable, **terms}
    return DaytonaProvider(opened, Terms(**members), store_id, "rep_1", clock=SystemClock())


def spec(session: str = "ses_1", *argv: str, seconds: float = 30.0, **changes: Any) -> SandboxSpec:
    members: dict[str, Any] = {
        "project": "default",
        "session_id": session,
        "seat_id": f"seat_{session}",
        "argv": argv or ECHO,
        "env": {},
        "deadline": asyncio.get_running_loop().time() + seconds,
    }
    return SandboxSpec(**{**members, **changes})


def states(emulator: EmulatorProcess) -> dict[str, str]:
    """Name to state of what the service has, but for what it is deleting."""
    boxes = emulator.sandboxes()
    return {box["name"]: box["state"] for box in boxes if box["state"] not in ("destroying", "destroyed")}


def disk(emulator: EmulatorProcess, name: str) -> Path:
    """The home of a sandbox, on this machine."""
    (home,) = (box["home"] for box in emulator.sandboxes() if box["name"] == name)
    return Path(home)
