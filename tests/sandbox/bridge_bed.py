"""A bridge as a process on this machine, and a proxy in front of it that cuts, refuses and moves."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from pathlib import Path
from typing import Any

from runner.acp.websocket import Address
from runner.sandbox.bridge_files import bridge_files
from runner.sandbox.port import Gone
from runner.sandbox.remote import RemoteSandbox

SECONDS = 10.0
MARKER = "ACP_RUNNER_CELL"


def unpack(folder: Path) -> Path:
    """The files of a bridge, in ``folder``."""
    for name, content in bridge_files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


class BridgeProcess:
    """One bridge; ``find`` is its address."""

    def __init__(self, folder: Path, marker: str = "bridge", orphan_seconds: float = 5.0) -> None:
        self.secret = secrets.token_hex(16)
        self.port = 0
        self.boot_id = ""
        self.asked: list[bool] = []
        self._folder, self._marker, self._orphan_seconds = folder, marker, orphan_seconds
        self.process: Any = None

    async def start(self) -> BridgeProcess:
        file = self._folder / f"secret-{self.secret[:6]}"
        file.write_text(self.secret)
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            str(self._folder / "bridge.py"),
            "--secret-file",
            str(file),
            "--orphan-seconds",
            str(self._orphan_seconds),
            stdout=asyncio.subprocess.PIPE,
            env={"PATH": "/usr/bin:/bin", MARKER: self._marker},
        )
        async with asyncio.timeout(SECONDS):
            ready = json.loads(await self.process.stdout.readline())
        assert not file.exists()
        self.port, self.boot_id = ready["port"], ready["boot_id"]
        return self

    async def find(self, refused: bool) -> Address:
        self.asked.append(refused)
        return Address(f"ws://127.0.0.1:{self.port}/")

    async def gone(self) -> int:
        """Its exit code, when it left by itself."""
        async with asyncio.timeout(SECONDS):
            return int(await self.process.wait())

    async def stop(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.terminate()
            await self.gone()
        if self.process is not None:
            self.process._transport.close()


async def asleep(said: Gone | None) -> Gone:
    """An end of the place that adds nothing to what the init said."""
    return said or Gone(True, "stopped")


def sandbox(bridge: BridgeProcess, workspace: Path, **changes: Any) -> RemoteSandbox:
    members: dict[str, Any] = {"resume_seconds": 5.0, "end": asleep, "find": bridge.find, "secret": bridge.secret}
    return RemoteSandbox("place", str(workspace), **{**members, **changes})
