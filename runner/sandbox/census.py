"""Who carries our marker: an independent look at every process, and a kill that needs no cell init (DESIGN 3.10).

A marker is ``<store_id>:<replica_id>:<seat_id>`` in the variable ``ACP_RUNNER_CELL``. Where one is asked for, a text
that ends in ``:`` names all markers that begin with it, any other text exactly one. What a carrier started belongs to
it even without the variable; a process that cleared its environment *and* was orphaned is beyond this look: that is
why a census is the last resort and the cell init's ECHILD the rule.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from runner.sandbox.port import Reaped

MARKER: Final = "ACP_RUNNER_CELL"
CLEAN: Final = 10
SURE: Final = 5
"""A look that shows nobody counts one; ``SURE`` when nothing happened meanwhile that may have hidden somebody."""
ROUNDS: Final = 20
PAUSE_SECONDS: Final = 0.005
_DEAD: Final = ("Z", "X", "x")


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """One live process of a cell.

    Attributes:
        pid: its process id.
        parent: its parent's.
        start: clock ticks between boot and its start; with ``pid`` it names one process for ever.
        marker: the marker it carries, empty for a descendant without one.
        command: its command line, blanks between the arguments.
    """

    pid: int
    parent: int
    start: int
    marker: str
    command: str


def marker(store_id: str, replica_id: str, seat_id: str) -> str:
    """The marker of one seat."""
    return f"{store_id}:{replica_id}:{seat_id}"


def scan(wanted: str) -> list[ProcessInfo]:
    """Live processes that carry the marker (or, with a ``:`` at the end, one that begins so) and all they started.

    This process and its ancestors are never in the list. Processes of other users are not seen.
    """
    return _members(_Look(wanted))


def kill_all(wanted: str, seconds: float) -> Reaped:
    """Kill what ``scan(wanted)`` shows until it surely shows nobody, at most ``seconds``; blocks.

    Returns:
        How many processes were killed, and the pids that were still there when the time was over.
    """
    deadline = time.monotonic() + seconds
    hit: set[tuple[int, int]] = set()
    unread: set[int] = set()
    clean = 0
    while True:
        look = _Look(wanted, signal.SIGSTOP)
        found = _members(look)
        clean = 0 if look.carried else clean + (SURE if look.unread <= unread else 1)
        unread = look.unread
        if clean >= CLEAN or time.monotonic() >= deadline:
            return Reaped(len(hit), tuple(info.pid for info in found))
        _slay(found)
        hit.update((info.pid, info.start) for info in found)
        time.sleep(PAUSE_SECONDS)


class _Look:
    """One look over all processes, repeated for those that appear meanwhile.

    Attributes:
        carried: pid to marker of those that carry it.
        seen: every pid met.
        spared: this process and its ancestors.
        unread: pids without a readable environment: gone, a zombie, in the middle of an exec, or always without one.
            Whoever is new there may have handed on to a child that the look missed.
    """

    def __init__(self, wanted: str, greeting: int | None = None) -> None:
        self.spared = _line_of(os.getpid())
        self.carried: dict[int, str] = {}
        self.unread: set[int] = set()
        self.seen: set[int] = set()
        for _ in range(ROUNDS):
            new = _pids() - self.seen
            if not new:
                break
            for pid in sorted(new, reverse=True):
                self._meet(pid, wanted, greeting)
            self.seen |= new

    def _meet(self, pid: int, wanted: str, greeting: int | None) -> None:
        data = _read(f"/proc/{pid}/environ")
        if not data:
            self.unread.add(pid)
        elif pid not in self.spared and (text := _marker_in(data, wanted)) is not None:
            self.carried[pid] = text
            stat = _stat(pid) if greeting is not None else None
            if greeting is not None and stat is not None:
                signal_exactly(pid, stat[1], greeting)


def _members(look: _Look) -> list[ProcessInfo]:
    """The carriers of a look and their descendants, without the dead."""
    if not look.carried:
        return []
    stats = {pid: stat for pid in look.seen if (stat := _stat(pid)) is not None}
    children: dict[int, list[int]] = {}
    for pid, (parent, _, _) in stats.items():
        children.setdefault(parent, []).append(pid)
    queue, found = list(look.carried), set(look.carried)
    for pid in queue:
        started = [child for child in children.get(pid, ()) if child not in found and child not in look.spared]
        found.update(started)
        queue += started
    return [
        ProcessInfo(pid, stats[pid][0], stats[pid][1], look.carried.get(pid, ""), _command(pid))
        for pid in sorted(found)
        if pid in stats and stats[pid][2] not in _DEAD
    ]


def signal_exactly(pid: int, start: int, number: int) -> bool:
    """Signal the process with this start time, never another that was given its pid; False when it is not there."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        stat = _stat(pid)
        if stat is None or stat[1] != start:
            return False
        signal.pidfd_send_signal(fd, number)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def _slay(targets: Iterable[ProcessInfo]) -> None:
    """Stop all first, so that none can replace another while they are killed one by one."""
    targets = list(targets)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for info in targets:
            signal_exactly(info.pid, info.start, number)


def _pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _stat(pid: int) -> tuple[int, int, str] | None:
    """``(parent, start, state)``; None when the process is gone."""
    data = _read(f"/proc/{pid}/stat")
    end = data.rfind(b")")
    if end < 0:
        return None
    fields = data[end + 2 :].split(b" ", 20)
    return int(fields[1]), int(fields[19]), fields[0].decode("ascii")


def _marker_in(data: bytes, wanted: str) -> str | None:
    lead = f"{MARKER}={wanted}".encode()
    if lead not in data:
        return None
    exact = not wanted.endswith(":")
    for item in data.split(b"\0"):
        if item == lead or (not exact and item.startswith(lead)):
            return item.partition(b"=")[2].decode("utf-8", "replace")
    return None


def _command(pid: int) -> str:
    return _read(f"/proc/{pid}/cmdline").rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")


def _line_of(pid: int) -> set[int]:
    """The process and its ancestors."""
    line: set[int] = set()
    while pid not in line and (stat := _stat(pid)) is not None:
        line.add(pid)
        pid = stat[0]
    return line
