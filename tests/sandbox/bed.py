"""What the tests of sandboxes share: agents, a conversation with one, and an independent look at what is left."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from runner.acp.transport import ExitInfo
from runner.clock import SystemClock
from runner.rules.isolation import Choice, choose
from runner.sandbox.isolation import Found, Isolation, probe_now
from runner.sandbox.local import LocalProvider
from runner.sandbox.port import Sandbox, SandboxSpec

HOSTILE = (sys.executable, "-I", str(Path(__file__).parents[1] / "inside" / "hostile.py"))
SECONDS = 10.0


class Talk:
    """A receiver that keeps what it is told, in order, and hands out lines."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.transport = sandbox.transport
        self.told: list[Any] = []
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._unread = b""
        self.gone = asyncio.Event()
        self.transport.connect(self)

    def data_received(self, data: bytes) -> None:
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._lines.put_nowait(line.decode())

    def stderr_received(self, data: bytes) -> None:
        self.told.append(("stderr", data))

    def eof_received(self) -> None:
        self.told.append("eof")

    def exited(self, info: ExitInfo) -> None:
        self.told.append(info)
        self.gone.set()
        self._lines.put_nowait(None)

    def writable(self) -> None:
        self.told.append("writable")

    @property
    def exits(self) -> list[ExitInfo]:
        return [item for item in self.told if isinstance(item, ExitInfo)]

    async def line(self) -> str:
        """The next line.

        Raises:
            ConnectionError: the agent went without one.
        """
        async with asyncio.timeout(SECONDS):
            line = await self._lines.get()
        if line is None:
            raise ConnectionError("the agent is gone")
        return line

    async def say(self, text: str) -> str:
        """A line to the agent, and the line that it answers."""
        self.transport.send(text.encode() + b"\n")
        return await self.line()

    async def ended(self) -> ExitInfo:
        async with asyncio.timeout(SECONDS):
            await self.gone.wait()
        return self.exits[0]


def spec(seat: str = "seat_1", *argv: str, **changes: Any) -> SandboxSpec:
    """A start of ``argv``, by default the hostile agent of the init's tests."""
    members: dict[str, Any] = {
        "project": "default",
        "session_id": f"of_{seat}",
        "seat_id": seat,
        "argv": argv or HOSTILE,
        "env": {},
        "read": (Path(HOSTILE[-1]),),
        "deadline": asyncio.get_running_loop().time() + SECONDS,
    }
    return SandboxSpec(**{**members, **changes})


@cache
def found() -> Found:
    """What this machine offers, probed once."""
    return probe_now()


def bounds(level: str, **limits: Any) -> Isolation:
    """A level of isolation, which this machine must offer; ``without``: control groups that are not to be used."""
    taken: dict[str, Any] = dict.fromkeys(limits.pop("without", ()), "not in this test")
    probed = replace(found().probed, **taken)
    chosen = choose(level, limits.pop("network", "shared"), probed, **limits)  # type: ignore[arg-type]
    assert isinstance(chosen, Choice), f"{chosen.message} Try: apt-get install bubblewrap"
    return found().isolation(chosen)


def local(
    state_dir: Path, store_id: str, replica_id: str = "rep_1", level: str = "none", **limits: Any
) -> LocalProvider:
    return LocalProvider(state_dir, store_id, replica_id, clock=SystemClock(), bounds=bounds(level, **limits))


async def until(condition: Callable[[], Any], what: str = "the condition") -> Any:
    """Poll until ``condition`` is true and return its value."""
    deadline = asyncio.get_running_loop().time() + SECONDS
    while True:
        value = condition()
        if value:
            return value
        assert asyncio.get_running_loop().time() < deadline, f"{what} did not come true in {SECONDS} s"
        await asyncio.sleep(0.005)


def carriers(store_id: str) -> dict[int, str]:
    """Live processes whose environment has the store's marker, by a look of the tests' own: pid to command."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if f"ACP_RUNNER_CELL={store_id}:".encode() not in (entry / "environ").read_bytes():
                continue
            if state(int(entry.name)) not in "ZX":
                found[int(entry.name)] = command(int(entry.name))
        except OSError:
            continue
    return found


def command(pid: int) -> str:
    """The command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def state(pid: int) -> str:
    """The state letter of a process; ``X`` when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def environ(pid: int) -> dict[str, str]:
    """The environment that a process was started with."""
    items = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(item.split("=", 1) for item in items if item)


def zombies() -> list[int]:
    """Unreaped children of this process."""
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in pids if state(int(pid)) == "Z"]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
