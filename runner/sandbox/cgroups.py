"""Control groups, version 1 or 2: one for each cell, where this machine lets the runner make them."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Mapping
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
        unified, roots = _roots()
        return Cgroups({name: root for name, root in roots.items() if _works(root, name, unified)}, unified)

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

    def out_of_memory(self) -> bool:
        """Whether the kernel killed a process for the memory limit."""
        folder = self._folders.get("memory")
        if folder is None:
            return False
        file = "memory.events" if self._unified else "memory.oom_control"
        try:
            words = dict(line.split() for line in (folder / file).read_text().splitlines() if len(line.split()) == 2)
        except OSError:
            return False
        return int(words.get("oom_kill", "0")) > 0

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


def _roots() -> tuple[bool, dict[str, Path]]:
    """The folder of this process's own group for each controller, and whether version 2 has them."""
    mine: dict[str, str] = {}
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            mine.update(dict.fromkeys(names.split(","), path))
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return False, {}
    first: dict[str, Path] = {}
    for words in mounts:
        kind = words[words.index("-") + 1]
        for name in _controllers(Path(words[4]), kind, words[-1]):
            first.setdefault(
                f"{kind} {name}", _own(Path(words[4]), words[3], mine.get("" if kind == "cgroup2" else name, "/"))
            )
    for kind in ("cgroup2", "cgroup"):
        roots = {name: first[f"{kind} {name}"] for name in CONTROLLERS if f"{kind} {name}" in first}
        if roots:
            return kind == "cgroup2", roots
    return False, {}


def _controllers(mount: Path, kind: str, options: str) -> list[str]:
    if kind == "cgroup":
        return [name for name in options.split(",") if name in CONTROLLERS]
    if kind != "cgroup2":
        return []
    with suppress(OSError):
        return [name for name in (mount / "cgroup.controllers").read_text().split() if name in CONTROLLERS]
    return []


def _own(mount: Path, root: str, path: str) -> Path:
    """A group's folder below a mount that may show only a part of the hierarchy."""
    inner = os.path.relpath(path, root) if path.startswith(root) else path.lstrip("/")
    folder = mount / inner
    return folder if folder.is_dir() else mount


def _works(root: Path, name: str, unified: bool) -> bool:
    """Try it: version 2 needs the controller to be passed on to groups below."""
    trial = Cgroup({name: root / f"{PREFIX}probe-{secrets.token_hex(4)}"}, unified)
    try:
        trial.create(Limits(1 << 40, pids=1 << 15, cpus=64.0))
    except OSError:
        return False
    finally:
        trial.remove()
    return True
