"""What this machine offers to isolate cells with: tried once, in short-lived children (DESIGN 3.10)."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from runner.resources import resource_path
from runner.rules.cell_view import ETC, CellView, System, bubblewrap, toolchain
from runner.rules.egress import AllowList
from runner.rules.isolation import Choice, Level, Limits, Network, Probed
from runner.sandbox.cgroups import Cgroups
from runner.sandbox.workspace import write_private

PROBE_SECONDS: Final = 5.0
INNER_ID: Final = 1000
ACCOUNTS: Final = ("passwd", "group")
_PR_SET_DUMPABLE: Final = 4
_LANDLOCK_CREATE: Final = 444
_LANDLOCK_VERSION: Final = 1
_MERGED: Final = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts")
_PROC: Final = tuple(
    f"/proc/{name}"
    for name in ("cpuinfo", "filesystems", "loadavg", "meminfo", "self", "stat", "sys", "uptime", "version")
)
_HOPS: Final = 16


@dataclass(frozen=True, slots=True)
class Isolation:
    """How the local provider isolates its cells; the default isolates nothing.

    Attributes:
        level, why, network, limits: see ``rules.isolation.Choice``.
        program: bubblewrap.
        system: what every cell sees.
        allowed: where a cell may connect to, with the network ``proxy``.
        groups: where control groups are made, None where none keeps a limit.
    """

    level: Level = "none"
    why: str = ""
    network: Network = "shared"
    limits: Limits = field(default_factory=Limits)
    program: str = ""
    system: System = field(default_factory=lambda: System(()))
    groups: Cgroups | None = None
    allowed: AllowList = field(default_factory=AllowList)

    def view(self) -> dict[str, object]:
        """For ``/health`` and ``doctor``."""
        return {"level": self.level, "why": self.why, "network": self.network, "limits": self.limits.view()}


NOTHING: Final = Isolation()


@dataclass(frozen=True, slots=True)
class Found:
    """What the probe found: the facts for ``rules.isolation.choose``, and what a chosen level is made with."""

    probed: Probed
    program: str
    system: System
    groups: Cgroups

    def isolation(self, choice: Choice) -> Isolation:
        """The chosen level, ready for a provider."""
        by = (choice.limits.memory_by, choice.limits.pids_by, choice.limits.cpus_by)
        groups = self.groups if "cgroup" in by else None
        return Isolation(choice.level, choice.why, choice.network, choice.limits, self.program, self.system, groups)


async def probe() -> Found:
    """Try everything once; about 0.1 s. Starts children that end at once."""
    return await asyncio.to_thread(probe_now)


def probe_now() -> Found:
    """As ``probe``; blocks."""
    program, system, groups = shutil.which("bwrap") or "", _system(), Cgroups.found()
    probed = Probed(
        _why_no_cell(program, system),
        _why_no_landlock(),
        groups.why_not("memory"),
        groups.why_not("pids"),
        groups.why_not("cpu"),
        os.geteuid() == 0,
    )
    return Found(probed, program, system, groups)


def _why_no_cell(program: str, system: System) -> str:
    if not program:
        return "bubblewrap is not installed (apt-get install bubblewrap)"
    view = CellView((), (), (), "/tmp", ("/dev/null", "/dev/null"))
    argv = bubblewrap(program, system, view, uid=inner_id(), gid=inner_gid(), network="none", init=["/bin/true"])
    try:
        tried = subprocess.run(argv, capture_output=True, timeout=PROBE_SECONDS, check=False, env={}, text=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap: {error}"
    words = tried.stderr.strip().splitlines()
    return "" if tried.returncode == 0 else (words[-1] if words else f"bubblewrap: exit code {tried.returncode}")


def _why_no_landlock() -> str:
    """Looking changes nothing in this process, so no child is needed."""
    libc = ctypes.CDLL(None, use_errno=True)
    abi = int(libc.syscall(_LANDLOCK_CREATE, None, 0, _LANDLOCK_VERSION))
    return "" if abi >= 1 else f"the kernel has no Landlock ({os.strerror(ctypes.get_errno())})"


def _system() -> System:
    links = tuple((path, os.readlink(path)) for path in _MERGED if os.path.islink(path))
    folders = tuple(path for path in ("/usr", *_MERGED) if os.path.isdir(path) and not os.path.islink(path))
    return System(folders, links, tuple(f"/etc/{name}" for name in ETC if os.path.lexists(f"/etc/{name}")))


def inner_id() -> int:
    """The user inside a cell: the runner's own, but never root, whom programs treat in special ways."""
    return os.geteuid() or INNER_ID


def inner_gid() -> int:
    """The group inside a cell."""
    return os.getegid() or INNER_ID


def write_accounts(folder: Path, home: Path) -> tuple[str, str]:
    """Files that stand in for ``/etc/passwd`` and ``/etc/group`` in the cell of this home; their paths."""
    uid, gid = inner_id(), inner_gid()
    people = f"root:x:0:0:root:/:/bin/sh\nagent:x:{uid}:{gid}:agent:{home}:/bin/bash\n"
    people += "nobody:x:65534:65534:nobody:/:/bin/false\n"
    groups = f"root:x:0:\nagent:x:{gid}:\nnogroup:x:65534:\n"
    write_private(folder, {ACCOUNTS[0]: people.encode(), ACCOUNTS[1]: groups.encode()})
    return str(folder / ACCOUNTS[0]), str(folder / ACCOUNTS[1])


def needed_by(programs: Iterable[str], system: System) -> tuple[str, ...]:
    """Read-only paths without which these programs do not run: their toolchains, through every symlink on the way."""
    found: dict[str, None] = {}
    for program in programs:
        for hop in _hops(program):
            if not system.holds(hop):
                found.update(dict.fromkeys(toolchain(hop, _names(Path(hop).parent.parent))))
            interpreter = _interpreter(hop)
            if interpreter:
                found.update(dict.fromkeys(needed_by((interpreter,), system)))
    return tuple(found)


def of_the_init(system: System) -> tuple[str, ...]:
    """What the init itself needs: this interpreter, and the folder that it lies in."""
    return (*needed_by((sys.executable,), system), str(resource_path("sandboxes", "inside")))


def _hops(program: str) -> list[str]:
    """An absolute path, what it is a link to, and so on; last its real path."""
    hops: list[str] = []
    path = os.path.normpath(program)
    while os.path.isabs(path) and path not in hops and len(hops) < _HOPS:
        hops.append(path)
        if not os.path.islink(path):
            break
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
    real = os.path.realpath(hops[-1]) if hops else ""
    return hops if not real or real in hops else [*hops, real]


def _interpreter(program: str) -> str:
    """The absolute program of a script's first line."""
    try:
        with open(program, "rb") as file:
            line = file.readline(256)
    except OSError:
        return ""
    words = line[2:].decode("utf-8", "replace").split() if line.startswith(b"#!") else []
    return words[0] if words and words[0].startswith("/") and words[0] != program else ""


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def landlock_paths(system: System, read: Iterable[str], write: Iterable[str]) -> dict[str, list[str]]:
    """The paths for the init's ``confine``: about what a cell shows, without ``/tmp``, which is everybody's.

    Of ``/proc`` only the agent's own entry and what is no process: the environment of any other of the same user, a
    neighbour's keys in it, could be read there.
    """
    merged = [link for link, _ in system.links]
    devices = [f"/dev/{name}" for name in _DEVICES]
    return {
        "read": [*system.folders, *merged, *system.etc, "/etc/passwd", "/etc/group", *_PROC, *read],
        "write": [*devices, *write],
    }


def not_dumpable() -> None:
    """Close this process's ``/proc`` entries (environment, memory, descriptors) to others of its user, and its cores.

    Programs that it starts are not affected: an exec resets it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
