"""Who lives in the cell: the descendants of a process, read from /proc, and signals that cannot hit a stranger."""

from __future__ import annotations

import os
import signal
import time
from errno import EPERM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import NamedTuple

    Identity = tuple[int, int]

    class Entry(NamedTuple):
        """One process of a scan: ``parent`` is the process under which the scan met it."""

        pid: int
        parent: int
        state: str
        start: int
        threads: int
else:
    from collections import namedtuple

    Entry = namedtuple("Entry", "pid parent state start threads")

_BLOCK = 65536
ZOMBIE = "Z"


def _read(path: bytes) -> bytes:
    """The whole of a /proc file; empty when the process is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        data = block = os.read(fd, _BLOCK)
        while len(block) == _BLOCK or (block and len(data) > 1024):
            block = os.read(fd, _BLOCK)
            data += block
        return data
    except OSError:
        return b""
    finally:
        os.close(fd)


def read_stat(pid: int) -> tuple[str, int, int, int] | None:
    """``(state, ppid, threads, start)`` of a process, ``start`` in clock ticks since boot; None when it is gone."""
    data = _read(b"/proc/%d/stat" % pid)
    end = data.rfind(b")")
    if end < 0:
        return None
    fields = data[end + 2 :].split(b" ", 20)
    return fields[0].decode("ascii"), int(fields[1]), int(fields[17]), int(fields[19])


def boot_ticks() -> int:
    """Now, on the scale of a process's ``start``."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def command_line(pid: int) -> str:
    """The command line with blanks between the arguments; empty for a zombie or a stranger's."""
    return _read(b"/proc/%d/cmdline" % pid).rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")


def _children(pid: int, threads: int) -> list[int]:
    if threads == 1:
        return [int(child) for child in _read(b"/proc/%d/task/%d/children" % (pid, pid)).split()]
    found: list[int] = []
    try:
        tids = os.listdir(b"/proc/%d/task" % pid)
    except OSError:
        return found
    for tid in tids:
        found += [int(child) for child in _read(b"/proc/%d/task/%s/children" % (pid, tid)).split()]
    return found


def _children_of_all() -> dict[int, list[int]]:
    """Parent to children of every process, for kernels without ``children`` files."""
    found: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            stat = read_stat(int(name))
            if stat is not None:
                found.setdefault(stat[1], []).append(int(name))
    return found


_HAS_CHILDREN_FILES = os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def descendants(root: int) -> list[Entry]:
    """Every descendant of ``root``, parents before children, zombies included.

    One scan can miss a process that is handed to a new parent while it runs; callers scan again.
    """
    table = None if _HAS_CHILDREN_FILES else _children_of_all()
    found: dict[int, Entry] = {}
    queue = [(root, 1)]
    for parent, threads in queue:
        for pid in _children(parent, threads) if table is None else table.get(parent, []):
            stat = None if pid in found else read_stat(pid)
            if stat is not None:
                found[pid] = Entry(pid, parent, stat[0], stat[3], stat[2])
                queue.append((pid, stat[2]))
    return list(found.values())


def living(root: int) -> set[Identity]:
    """Identities (pid, start) of all live descendants, scanned until a scan shows nobody new."""
    known: set[Identity] = set()
    while True:
        seen = {(entry.pid, entry.start) for entry in descendants(root) if entry.state != ZOMBIE}
        if seen <= known:
            return known
        known |= seen


def of_turn(
    entries: Iterable[Entry],
    kept: set[Identity],
    agent: Identity | None,
    keep: tuple[str, ...] = (),
    helpers: tuple[str, ...] = (),
) -> list[Entry]:
    """The live processes that a turn started (DESIGN 3.3.7).

    Args:
        entries: one scan, parents before children.
        kept: identities alive at the turn's mark.
        agent: never the turn's; None gives the agent up too.
        keep: parts of command lines of processes that are the agent's own even when it starts them during a turn.
        helpers: parts of command lines of processes that are spared together with all that they start.
    """
    sheltered: set[int] = set()
    turn: list[Entry] = []
    for entry in entries:
        identity = (entry.pid, entry.start)
        line = command_line(entry.pid) if keep or helpers else ""
        if entry.parent in sheltered or any(part in line for part in helpers):
            sheltered.add(entry.pid)
        elif entry.state == ZOMBIE or identity == agent or any(part in line for part in keep):
            continue
        elif identity not in kept:
            turn.append(entry)
    return turn


def send(entry: Entry, number: int) -> bool:
    """Signal exactly this process, even when its pid was given to another one meanwhile.

    Returns:
        False when it may not be signalled; True when the signal was sent or the process is already gone.
    """
    try:
        fd = os.pidfd_open(entry.pid)
    except ProcessLookupError:
        return True
    except (OSError, AttributeError):
        return _send_by_pid(entry, number)
    try:
        stat = read_stat(entry.pid)
        if stat is not None and stat[3] == entry.start:
            signal.pidfd_send_signal(fd, number)
        return True
    except ProcessLookupError:
        return True
    except OSError as error:
        return error.errno != EPERM
    finally:
        os.close(fd)


def _send_by_pid(entry: Entry, number: int) -> bool:
    stat = read_stat(entry.pid)
    try:
        if stat is not None and stat[3] == entry.start:
            os.kill(entry.pid, number)
    except PermissionError:
        return False
    except ProcessLookupError:
        pass
    return True
