"""A cell's own pid namespace as the runner sees it: its init and agent by the numbers of this machine."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time
from pathlib import Path
from typing import Final

PROBE_SECONDS: Final = 0.005


class Namespace:
    """Process 1 of a namespace, held by a descriptor: when it is gone, the kernel has killed and reaped all others.

    Attributes:
        pid: its number on this machine.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    @staticmethod
    def below(wrapper: int) -> Namespace | None:
        """The namespace whose init this wrapper started; None when it is gone, or pids cannot be held here."""
        for pid in children(wrapper):
            try:
                found = Namespace(pid)
            except OSError:
                continue
            if inner_pid(pid) == 1:
                return found
            found.close()
        return None

    def outer_pid(self, inner: int) -> int | None:
        """The number on this machine of a child of the init; None when it is gone."""
        return next((pid for pid in children(self.pid) if inner_pid(pid) == inner), None)

    def gone(self) -> bool:
        """Whether the init, and so everybody, is gone."""
        return bool(select.select([self._fd], [], [], 0)[0])

    async def wait_gone(self, seconds: float) -> bool:
        """Wait at most ``seconds`` until it is gone."""
        deadline = time.monotonic() + seconds
        while not self.gone():
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(PROBE_SECONDS)
        return True

    def signal(self, number: int) -> None:
        """Signal the init, never a stranger that was given its number."""
        try:
            signal.pidfd_send_signal(self._fd, number)
        except ProcessLookupError:
            pass

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._fd)


def children(pid: int) -> list[int]:
    """Children of a process's main thread."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return _children_by_stat(pid)
    except OSError:
        return []


def _children_by_stat(pid: int) -> list[int]:
    """For kernels without ``children`` files."""
    found = []
    for name in os.listdir("/proc") if os.path.exists(f"/proc/{pid}") else ():
        try:
            stat = Path(f"/proc/{name}/stat").read_text() if name.isdigit() else ""
        except OSError:
            continue
        if stat and int(stat.rpartition(")")[2].split()[1]) == pid:
            found.append(int(name))
    return found


def inner_pid(pid: int) -> int | None:
    """The number of a process in its own namespace; None when it is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    except OSError:
        pass
    return None
