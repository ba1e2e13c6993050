"""The processes of the sandboxes: each carries a marker, and all of a sandbox can be killed."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from runner.sandbox.census import MARKER, kill_all, scan, signal_exactly
from tests.daytona_emulator.box import Box
from tests.daytona_emulator.building import READ_ONLY

SANDBOX_ID = "DAYTONA_SANDBOX_ID"
SHELL = shutil.which("bash") or "/bin/sh"
KILL_SECONDS = 10.0


class Processes:
    """Starts and ends what runs in the sandboxes of one emulator.

    Every process carries ``ACP_RUNNER_CELL=daytona-emulator:<instance>:<sandbox id>``; who gave it another one is found
    by its sandbox id, its parent or its working directory.
    """

    def __init__(self, path: str = "") -> None:
        self.prefix = f"daytona-emulator:{secrets.token_hex(4)}:"
        self._path = path or os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"])
        self._used: set[str] = set()
        self._ever = False
        # Not the loop's default pool: the SDK in the same loop reads netrc there on every request.
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="daytona-emulator")

    def environment(self, box: Box, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Of a process in the sandbox: nothing of the emulator's own."""
        return {
            "PATH": self._path,
            "HOME": str(box.home),
            "USER": box.user,
            "LANG": "C.UTF-8",
            "TMPDIR": str(box.root / "tmp"),
            SANDBOX_ID: box.id,
            MARKER: self.prefix + box.id,
            **box.env,
            **box.secrets,
            **(extra or {}),
        }

    async def shell(
        self,
        box: Box,
        *words: str,
        cwd: Path | None = None,
        extra: Mapping[str, str] | None = None,
        merged: bool = False,
    ) -> asyncio.subprocess.Process:
        """A shell in its own process group. ``merged``: one pipe for both outputs; otherwise they are thrown away."""
        self._used.add(box.id)
        process = await asyncio.create_subprocess_exec(
            *_unprivileged(box),
            SHELL,
            *words,
            cwd=cwd or box.home,
            env=self.environment(box, extra),
            stdin=asyncio.subprocess.DEVNULL if merged else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE if merged else asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.STDOUT if merged else asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        # Once more: it may have been cleaned up between the two.
        self._used.add(box.id)
        self._ever = True
        return process

    async def kill(self, box: Box) -> None:
        """All processes of one sandbox."""
        if box.id in self._used:
            await asyncio.get_running_loop().run_in_executor(self._pool, self._kill, box)
            self._used.discard(box.id)

    def alive(self) -> list[int]:
        """Pids of every process of every sandbox; blocks."""
        return [info.pid for info in scan(self.prefix)]

    async def look(self) -> list[int]:
        """As ``alive``, beside the loop: a look at every process of a busy machine takes its time."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self.alive)

    async def close(self) -> None:
        """Kill whatever is left."""
        if self._ever:
            await asyncio.get_running_loop().run_in_executor(self._pool, kill_all, self.prefix, KILL_SECONDS)
        self._pool.shutdown(wait=False)

    def _kill(self, box: Box) -> None:
        kill_all(self.prefix + box.id, KILL_SECONDS)
        for _ in range(50):
            strays = [(pid, start) for pid in _pids() if _strayed(pid, box) and (start := _start(pid))]
            if not strays:
                return
            for number in (19, 9):
                for pid, start in strays:
                    signal_exactly(pid, start, number)


def _unprivileged(box: Box) -> tuple[str, ...]:
    """What makes a process one of the user of the sandbox's image; nothing where no image was made."""
    root = str(box.root)
    as_user = ("--unshare-user", "--uid", "1000", "--gid", "1000", "--bind", root, root)
    return (*READ_ONLY, *as_user) if box.runs_as not in ("", "root") else ()


def _pids() -> list[int]:
    own = {os.getpid(), os.getppid()}
    return [pid for name in os.listdir("/proc") if name.isdigit() and (pid := int(name)) not in own]


def _strayed(pid: int, box: Box) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            if f"{SANDBOX_ID}={box.id}".encode() in file.read().split(b"\0"):
                return True
        cwd = os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return False
    return cwd == str(box.root) or cwd.startswith(f"{box.root}/")


def _start(pid: int) -> int:
    """The process's start time in ticks; 0 when it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            data = file.read()
    except OSError:
        return 0
    fields = data[data.rfind(b")") + 2 :].split()
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])
