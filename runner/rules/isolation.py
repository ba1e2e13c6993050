"""How strongly a local cell is isolated: what was asked for, what the machine allows, and who may be served so.

Levels, strongest first (DESIGN 3.10): ``cell`` is bubblewrap with the init as process 1 of a namespace of its own,
``landlock`` an init with Landlock around the agent, ``none`` an init alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from runner.errors import RunnerError

Level = Literal["cell", "landlock", "none"]
Network = Literal["shared", "none", "proxy"]
Means = Literal["off", "cgroup", "rlimit", "init"]
LEVELS: Final[tuple[Level, ...]] = ("cell", "landlock", "none")


@dataclass(frozen=True, slots=True)
class Probed:
    """What was tried on this machine; an empty text means that it works, any other says why it does not.

    Attributes:
        cell: bubblewrap, with the options that a cell needs.
        landlock: Landlock, for an unprivileged process.
        memory, pids: a control group that bounds them.
        cpu: a control group that bounds processor time.
        root: the runner is root, whom RLIMIT_NPROC does not bind.
    """

    cell: str = ""
    landlock: str = ""
    memory: str = ""
    pids: str = ""
    cpu: str = ""
    root: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one cell, and by what each is kept; 0 is no bound.

    Attributes:
        memory_bytes: of all its processes together. ``init``: the cell's init looks twice a second.
        pids: processes and threads at one time.
        cpus: processors' worth of time.
    """

    memory_bytes: int = 0
    memory_by: Means = "off"
    pids: int = 0
    pids_by: Means = "off"
    cpus: float = 0.0
    cpus_by: Means = "off"

    def view(self) -> dict[str, dict[str, Any]]:
        """For ``/health``, ``doctor`` and the session view: each bound and what keeps it."""
        return {
            "memory_bytes": {"limit": self.memory_bytes, "by": self.memory_by},
            "pids": {"limit": self.pids, "by": self.pids_by},
            "cpus": {"limit": self.cpus, "by": self.cpus_by},
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """What cells of this runner get. ``why`` says what keeps it from a stronger level, empty for ``cell``."""

    level: Level
    why: str
    network: Network
    limits: Limits


@dataclass(frozen=True, slots=True)
class Refusal:
    """A setting that this machine cannot keep."""

    field: str
    message: str


def choose(
    wanted: Literal["auto", "cell", "landlock", "none"],
    network: Network,
    probed: Probed,
    *,
    memory_bytes: int = 0,
    pids: int = 0,
    cpus: float = 0.0,
) -> Choice | Refusal:
    """The strongest level that works, or exactly the one that was named; a named one is never weakened in silence."""
    why = {"cell": probed.cell, "landlock": probed.landlock, "none": ""}
    working: list[Level] = [level for level in LEVELS if not why[level]]
    level: Level = working[0] if wanted == "auto" else wanted
    if why[level]:
        return Refusal("local.isolation", f"[local] isolation = {level} does not work here: {why[level]}.")
    if network != "shared" and level != "cell":
        reason = f" ({probed.cell})" if probed.cell else ""
        return Refusal("local.network", f"[local] network = {network} needs isolation cell{reason}.")
    weaker = "; ".join(f"{name}: {why[name]}" for name in LEVELS[: LEVELS.index(level)] if why[name])
    if not weaker and level != "cell":
        weaker = f"[local] isolation = {level}"
    limits = Limits(
        memory_bytes,
        "off" if not memory_bytes else "init" if probed.memory else "cgroup",
        pids,
        _pids_by(level, pids, probed),
        cpus,
        "off" if not cpus or probed.cpu else "cgroup",
    )
    return Choice(level, weaker, network, limits)


def _pids_by(level: Level, pids: int, probed: Probed) -> Means:
    """RLIMIT_NPROC counts one cell's processes only inside its user namespace, and never root's."""
    if not pids:
        return "off"
    if not probed.pids:
        return "cgroup"
    return "rlimit" if level == "cell" and not probed.root else "off"


def unfit(level: Level, *, projects: int, beyond_loopback: bool, allow_weak: bool) -> Refusal | None:
    """Why this set-up may not be served at this level, None when it may (DESIGN 3.10)."""
    if level == "cell" or allow_weak or (projects <= 1 and not beyond_loopback):
        return None
    return Refusal(
        "local.allow_weak",
        "More than one project, or a bind beyond loopback, needs isolation cell; sandboxes here have isolation "
        f"{level}. Set [local] allow_weak = true to serve all the same.",
    )


def short_of_memory(error: RunnerError, killed: int) -> RunnerError:
    """An agent's error, with what it may not know: so many processes of its sandbox were killed for want of memory."""
    if killed == 0 or "memory_bytes" in error.message:
        return error
    what = "a process" if killed == 1 else f"{killed} processes"
    why = f"The sandbox had no memory left: {what} of it had to be killed ([local] memory_bytes)."
    return RunnerError(error.code, f"{error.message.rstrip('. ')}. {why}")
