"""Control groups, version 1 or 2: one for each cell, where this machine lets the runner make them."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from runner.rules.isolation import Limits

CONTROLLERS: Final = ("memory", "pids", "cpu")
PREFIX: Final = "acp-runner-"
PERIOD_US: Final = 100_000
NEW_SECONDS: Final = 60.0
log = logging.getLogger("runner.sandbox")


@dataclass(frozen=True, slots=True)
class Cgroups:
    """Where groups can be made: controller to folder; ``unified``: one hierarchy for all (version 2)."""

    folders: Mapping[str, Path]
    unified: bool

    @staticmethod
    def found() -> Cgroups:
        """What can be used here: tried by making a group and setting its limit."""
        unified, places = _places()
        working = {name: next((root for root in roots if _works(root, name, unified)), None) for name, roots in places}
        return Cgroups({name: root for name, root in working.items() if root is not None}, unified)

    def why_not(self, controller: str) -> str:
        """Empty when this controller can be used."""
        return "" if controller in self.folders else f"no {controller} control group can be made here"

    def make(self, name: str, limits: Limits) -> Cgroup:
        """A group with the limits that groups keep.

        Raises:
            OSError: it cannot be made; nothing is left.
        """
        wanted = {"memory": limits.memory_by, "pids": limits.pids_by, "cpu": limits.cpus_by}
        chosen = {key: self.folders[key] for key, by in wanted.items() if by == "cgroup" and key in self.folders}
        group = Cgroup({key: root / f"{PREFIX}{name}" for key, root in chosen.items()}, self.unified)
        try:
            group.create(limits)
        except BaseException:
            group.remove()
            raise
        return group

    def sweep(self) -> None:
        """Remove what runners that were killed left; a group in use, or one that was made just now, stays."""
        for root in set(self.folders.values()):
            for left in root.glob(f"{PREFIX}*"):
                with suppress(OSError):
                    if time.time() - left.stat().st_mtime > NEW_SECONDS:
                        left.rmdir()


class Cgroup:
    """The group of one cell; in version 1 one folder for each controller."""

    def __init__(self, folders: Mapping[str, Path], unified: bool) -> None:
        self._folders = folders
        self._unified = unified

    def create(self, limits: Limits) -> None:
        """Make the folders and set the limits."""
        for folder in set(self._folders.values()):
            folder.mkdir(exist_ok=True)
        for name, folder in self._folders.items():
            for file, value in _settings(name, limits, self._unified).items():
                (folder / file).write_text(value)

    def add(self, pid: int) -> None:
        """Move a process in; what it forks from now on is born there."""
        for folder in set(self._folders.values()):
            with suppress(ProcessLookupError):
                (folder / "cgroup.procs").write_text(str(pid))

    def memory_kills(self) -> int:
        """How many processes the kernel killed for the memory limit."""
        folder = self._folders.get("memory")
        if folder is None:
            return 0
        file = "memory.events" if self._unified else "memory.oom_control"
        try:
            words = dict(line.split() for line in (folder / file).read_text().splitlines() if len(line.split()) == 2)
        except OSError:
            return 0
        return int(words.get("oom_kill", "0"))

    def remove(self) -> None:
        """Remove the folders; those that are still in use stay for ``Cgroups.sweep``."""
        for folder in set(self._folders.values()):
            with suppress(OSError):
                folder.rmdir()


def _settings(name: str, limits: Limits, unified: bool) -> dict[str, str]:
    """File to content."""
    quota = str(int(limits.cpus * PERIOD_US))
    if name == "pids":
        return {"pids.max": str(limits.pids)}
    if name == "memory":
        return {"memory.max" if unified else "memory.limit_in_bytes": str(limits.memory_bytes)}
    if unified:
        return {"cpu.max": f"{quota} {PERIOD_US}"}
    return {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": quota}


def _places() -> tuple[bool, list[tuple[str, tuple[Path, ...]]]]:
    try:
        mine, mounts = Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text()
    except OSError:
        return False, []
    unified, found = places_of(mine, mounts, lambda mount: (mount / "cgroup.controllers").read_text())
    return unified, [(name, (own, *filter(_delegated, above))) for name, (own, *above) in found.items()]


def _delegated(folder: Path) -> bool:
    """Whether a service manager says that whoever serves may do here what it likes; others' groups are let alone."""
    for name in ("user.delegate", "trusted.delegate"):
        with suppress(OSError):
            if os.getxattr(folder, name) == b"1":
                return True
    return os.geteuid() != 0 and os.access(folder, os.W_OK)


def places_of(
    cgroup: str, mountinfo: str, controllers: Callable[[Path], str]
) -> tuple[bool, dict[str, tuple[Path, ...]]]:
    """Where groups for cells may be made, best first, and whether it is version 2 that has the controllers.

    Version 2 lets no group with processes of its own pass controllers on: there the group above is the next choice,
    which a service manager hands to who serves in a group below it (``Delegate=`` and ``DelegateSubgroup=``).

    Args:
        cgroup, mountinfo: this process's files of these names in ``/proc``.
        controllers: those that a mount of version 2 has; OSError: nobody can tell.
    """
    mine: dict[str, str] = {}
    for line in cgroup.splitlines():
        _, names, path = line.split(":", 2)
        mine.update(dict.fromkeys(names.split(","), path))
    found: dict[str, dict[str, tuple[Path, ...]]] = {"cgroup2": {}, "cgroup": {}}
    for words in map(str.split, mountinfo.splitlines()):
        kind, mount, root = words[words.index("-") + 1], Path(words[4]), words[3]
        for name in _controllers(mount, kind, words[-1], controllers):
            own = _own(mount, root, mine.get("" if kind == "cgroup2" else name, "/"))
            above = (own.parent,) if kind == "cgroup2" and own != mount else ()
            found[kind].setdefault(name, (own, *above))
    unified = bool(found["cgroup2"])
    return unified, found["cgroup2"] or found["cgroup"]


def _controllers(mount: Path, kind: str, options: str, controllers: Callable[[Path], str]) -> list[str]:
    if kind == "cgroup":
        return [name for name in options.split(",") if name in CONTROLLERS]
    if kind != "cgroup2":
        return []
    with suppress(OSError):
        return [name for name in controllers(mount).split() if name in CONTROLLERS]
    return []


def _own(mount: Path, root: str, path: str) -> Path:
    """A group's folder below a mount that may show only a part of the hierarchy."""
    inner = os.path.relpath(path, root) if path.startswith(root) else path.lstrip("/")
    folder = mount / inner
    return folder if folder.is_dir() else mount


def _works(root: Path, name: str, unified: bool) -> bool:
    """Try it; version 2 needs the controller to be passed on to groups below, which is tried first."""
    if unified:
        with suppress(OSError):
            (root / "cgroup.subtree_control").write_text(f"+{name}")
    trial = Cgroup({name: root / f"{PREFIX}probe-{secrets.token_hex(4)}"}, unified)
    try:
        trial.create(Limits(1 << 40, pids=1 << 15, cpus=64.0))
    except OSError:
        return False
    finally:
        trial.remove()
    return True
