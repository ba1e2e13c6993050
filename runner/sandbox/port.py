"""The provider port: what the pool asks of any place where an agent can run (DESIGN 3.10)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Protocol, runtime_checkable

from runner.acp.transport import Transport
from runner.ids import Key
from runner.rules.files import ALWAYS, Content, Listing, Precondition, Written


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """All that a cold start needs.

    Attributes:
        project: tenant.
        session_id: owner of workspace and home.
        seat_id: unique name of this sandbox, made before the create call.
        argv: the agent's command.
        env: the agent's whole environment but HOME, TMPDIR, PATH, LANG, TERM and the marker, which the provider adds
            unless given; nothing of the runner's own environment is inherited.
        home_files: relative path to content, written into the private home before the agent starts.
        secret_names: variables whose values are secret, where ``env`` has them.
        read, write: more host paths the sandbox may see, where it can hide any.
        workspace_path: a host directory used in place, or None for the session's own.
        workspace_files: given files, relative path to content, written before the agent starts.
        recipe: what the sandbox is made of, where the provider has a choice.
        spare: no session owns it yet: what it makes is swept by the next boot until it was adopted.
        deadline: loop time by which the start must have succeeded or failed.
    """

    project: str
    session_id: str
    seat_id: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    secret_names: frozenset[str] = frozenset()
    home_files: Mapping[str, bytes] = field(default_factory=dict)
    read: tuple[Path, ...] = ()
    write: tuple[Path, ...] = ()
    workspace_path: Path | None = None
    workspace_files: Mapping[str, bytes] = field(default_factory=dict)
    recipe: str = "default"
    spare: bool = False
    deadline: float = 0.0


@dataclass(frozen=True, slots=True)
class Reaped:
    """Result of a kill of one turn's processes: how many were killed, and pids that would not die."""

    killed: int
    survivors: tuple[int, ...] = ()


Copied = Literal["copied", "none", "too_large"]
"""What became of the copy of a workspace."""

OUTPUT_BYTES: Final = 1024 * 1024
"""How much of a command's output is heard."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended: its exit code, or the signal that killed it; ``truncated``: it said more than was heard."""

    code: int | None
    signal: int | None = None
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Gone:
    """Proof of a teardown.

    Attributes:
        proven: nobody is left, by ``proof``: ``echild`` (the kernel told the init that no child is left),
            ``init_gone`` (of a pid namespace), ``census`` (the init was lost; nobody carries the marker any more),
            ``stopped`` or ``deleted`` (the remote sandbox itself),
            ``never_started``. Empty when not proven.
        survivors: pids still alive when the budget ended; not empty only when not proven.
    """

    proven: bool
    proof: str
    survivors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Disk:
    """A session's sandbox that is asleep: nothing runs, its disk is kept until the loop time ``until``."""

    provider: str
    project: str
    session_id: str
    until: float


@dataclass(frozen=True, slots=True)
class Condition:
    """How a provider is.

    Attributes:
        available: whether a turn may get a sandbox, as far as is known.
        reason: why not.
        install_command: what installs the part that is missing.
        running, asleep: sandboxes that run, and disks that are kept, for this runner.
    """

    available: bool
    reason: str | None = None
    install_command: str | None = None
    running: int = 0
    asleep: int = 0


class Sandbox(Protocol):
    """One live sandbox with one agent in it. Used by one seat at a time."""

    @property
    def transport(self) -> Transport:
        """The agent's stdio."""
        ...

    @property
    def workspace(self) -> str:
        """Absolute path of the workspace as the agent sees it: the ``cwd`` of ``session/new``."""
        ...

    @property
    def agent_pid(self) -> int | None:
        """Process id of the agent on this machine, when it has one."""
        ...

    @property
    def isolation(self) -> str:
        """``cell``, ``landlock``, ``none``, or what a remote provider gives."""
        ...

    @property
    def limits(self) -> Mapping[str, object]:
        """Name of a bound to ``{"limit", "by"}``; 0 and ``off``: there is none."""
        ...

    @property
    def memory_kills(self) -> int:
        """How many of its processes were killed for its bound on memory, as far as that can be told."""
        ...

    @property
    def woken(self) -> bool:
        """Whether a sleeping disk of the session was started for it."""
        ...

    def mark(self, turn_id: str) -> Mark:
        """Begin marking: everything alive now is not the turn's. The frame may go out once the mark is set."""
        ...

    async def kill_turn(self, turn_id: str, seconds: float) -> Reaped:
        """Kill what the marked turn started, not the agent nor its helpers; bounded by ``seconds``.

        Raises:
            RunnerError: ``sandbox_lost`` when the sandbox does not answer.
        """
        ...

    async def run(self, name: str, argv: Sequence[str], heard: Callable[[bytes], None]) -> Ran:
        """Run a command beside the agent, in a session of its own, with the agent's environment, in its workspace.

        It ends with the command's own process; what that left running, and a command that is given up, is for
        ``kill_turn`` of the mark that was set before. Cancelling the call kills nothing.

        Args:
            name: of the run, unique in this sandbox.
            argv: the command.
            heard: called with its stdout and stderr as they come, ``OUTPUT_BYTES`` at most; the rest is dropped.

        Raises:
            RunnerError: ``sandbox_lost``: the sandbox is gone or cannot run it.
        """
        ...

    async def destroy(self, grace_seconds: float = 0.5, seconds: float = 5.0) -> Gone:
        """Close stdin, wait ``grace_seconds`` for the agent, then kill the whole cell and prove it; idempotent.

        Never raises for a process that will not die: ``Gone.proven`` says so. Safe to call from ``shielded``.
        """
        ...


class Mark(Protocol):
    """A mark under way."""

    async def set(self, seconds: float) -> None:
        """Wait until the mark is taken, at most ``seconds``.

        Raises:
            RunnerError: ``sandbox_lost`` when the sandbox does not answer in time.
        """
        ...


class Files(Protocol):
    """The files of one session's workspace, whether a sandbox runs, is busy, is parked or sleeps.

    Nothing outside the workspace is reached, through whatever links; sockets, pipes and devices are never opened. All
    raise ``RunnerError``: ``not_found``, ``invalid_request`` naming ``path`` (something else is there, or a link leads
    out), ``forbidden`` (the system does not permit it), ``session_starting`` (a remote sandbox cannot be had now),
    ``runner_at_capacity`` (there is no room to wake it), ``sandbox_lost``, ``internal`` (the disk refuses).
    """

    async def read(self, path: str, most: int) -> Content:
        """A file's content, whole. Also raises ``too_large``: it has more than ``most`` bytes."""
        ...

    async def write(self, path: str, data: bytes, condition: Precondition = ALWAYS) -> Written | None:
        """Put a file in place in one step, with the folders that it needs; None when the condition does not hold.

        What it replaces gives it its mode and owner. Cancelling the call may leave the file written.
        """
        ...

    async def list(self, path: str, after: bytes, limit: int) -> Listing:
        """What is in a folder (``""``: the workspace), behind the name ``after``; empty before the first start."""
        ...


class Provider(Protocol):
    """Makes sandboxes. All deadlines are loop times, all methods are cancellable without leaving anything behind."""

    @property
    def name(self) -> str:
        """``local`` or another provider's name."""
        ...

    @property
    def isolation(self) -> str:
        """What every sandbox of it has; a facet of the fingerprint."""
        ...

    @property
    def capacity(self) -> int | None:
        """How many sandboxes it can hold, None when only the pool's ``max_seats`` bounds it."""
        ...

    def paths(self, project: str, session_id: str, workspace_path: Path | None) -> Paths:
        """Where the session's workspace, home and tmp are or will be."""
        ...

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Create the sandbox and start its agent; undone in reverse order on any failure or cancellation.

        Raises:
            RunnerError: ``harness_start_failed`` (the command cannot run), ``sandbox_start_failed`` (the place
                cannot be made or the deadline passed), ``invalid_request`` (a workspace file leaves the workspace).
        """
        ...

    async def home_identity(self, project: str, session_id: str) -> str | None:
        """What tells the session's private home from any other one, wherever it lies; None while there is none.

        An agent session that was kept in a home can only be loaded from that home (case M6).
        """
        ...

    def files(self, project: str, session_id: str, workspace_path: Path | None, recipe: str = "default") -> Files:
        """The files of the session's workspace; ``workspace_path`` as in ``paths``, ``recipe``: of what is made for it.

        Raises:
            RunnerError: ``invalid_request`` for ids or a path that are none of this provider's.
        """
        ...

    async def copy_workspace(self, source: Key, to: Key) -> Copied:
        """Copy a session's own workspace, as it is now, into that of session ``to``, where that has none yet.

        ``none``: there is nothing to copy. ``too_large``: there is more than a copy may have; nothing was copied.

        Raises:
            RunnerError: ``internal`` when the disk refuses; nothing was copied.
        """
        ...

    async def remove(self, project: str, session_id: str, used: bool = True) -> None:
        """Delete the session's own workspace and home; never a ``workspace.path``, never through a symlink.

        ``used``: the session is known to have had a sandbox here. Where it is not, only what this machine knows of is
        looked for; what is left elsewhere is the reaper's.
        """
        ...

    def disks(self) -> Sequence[Disk]:
        """Sessions whose sandbox is asleep: only its disk is kept, as far as this runner knows."""
        ...

    def condition(self) -> Condition:
        """How it is now, by what was seen last; asks nobody."""
        ...

    async def close(self) -> None:
        """Destroy what is left."""
        ...


@runtime_checkable
class SpareProvider(Provider, Protocol):
    """A provider whose sandboxes can be started for no session: with project ``SPARES`` and the spare's id.

    Their directories are swept until they are adopted; from then on they are the session's, at the same place.
    """

    def adopt(self, spare_id: str) -> None:
        """A session owns the directories of this spare from now on. Raises ``OSError``."""
        ...

    def untouched(self, project: str, session_id: str) -> bool:
        """Whether there are no directories of this session: it loses nothing with a spare's."""
        ...

    async def sweep_spares(self) -> int:
        """Remove the directories that nobody adopted; how many spares that were. For a runner that boots."""
        ...


@dataclass(frozen=True, slots=True)
class Paths:
    """Directories of a session on this machine."""

    workspace: Path
    home: Path
    tmp: Path
