"""The local provider: cells on this machine, each with its own workspace, home and allow-list environment."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from runner.clock import Clock
from runner.errors import RunnerError
from runner.ids import SPARES, Key
from runner.sandbox import spare_places
from runner.sandbox.census import MARKER, kill_all, marker
from runner.sandbox.confining import Confining
from runner.sandbox.copying import COPY_SECONDS, Budget, TooMuch, copy_tree
from runner.sandbox.egress import Egress
from runner.sandbox.init_process import spawn_init
from runner.sandbox.isolation import NOTHING, Isolation, write_accounts
from runner.sandbox.local_files import LocalFiles
from runner.sandbox.local_sandbox import Bounds, LocalSandbox
from runner.sandbox.namespace import children
from runner.sandbox.port import Condition, Copied, Disk, Paths, SandboxSpec
from runner.sandbox.workspace import check_files, check_ids, identities, open_directory, write_given, write_private
from runner.tasks import shielded

BASE_ENV: Final[Mapping[str, str]] = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}
FILES_SECONDS: Final = 10.0
UNDO_SECONDS: Final = 10.0
CLOSE_SECONDS: Final = 5.0
IDENTITY: Final = "identity"
log = logging.getLogger("runner.sandbox")


class LocalProvider:
    """Makes cells under one state directory (layout: DESIGN 5); one for each replica.

    Args:
        state_dir: holds ``workspaces/<project>/<session>`` and ``homes/<project>/<session>/{home,tmp,identity}``.
        store_id, replica_id: name this runner in the marker of every process it starts.
        clock: on the scale of ``SandboxSpec.deadline``.
        bounds: how its cells are isolated and limited.
    """

    def __init__(
        self, state_dir: Path, store_id: str, replica_id: str, *, clock: Clock, bounds: Isolation = NOTHING
    ) -> None:
        self._state_dir = state_dir.absolute()
        self._store_id = store_id
        self._replica_id = replica_id
        self._clock = clock
        self._bounds = bounds
        if bounds.groups is not None:
            bounds.groups.sweep()
        self.own_ports: Callable[[], Sequence[int]] = tuple
        """Loopback ports of the runner that a cell may use whatever ``[local] allow_hosts`` says."""
        self.secret_files: tuple[Path, ...] = ()
        """Files of the runner's, beside its state directory, that no sandbox and nobody by ``files`` sees."""
        self._live: dict[str, LocalSandbox] = {}
        self._closed = False

    @property
    def name(self) -> str:
        """``local``."""
        return "local"

    @property
    def capacity(self) -> int | None:
        """Only the pool's ``max_seats`` bounds it."""
        return None

    @property
    def isolation(self) -> str:
        """What every sandbox of this provider has."""
        return self._bounds.level

    @property
    def live(self) -> tuple[str, ...]:
        """Seats of the sandboxes whose end is not proven, in order of their start."""
        return tuple(self._live)

    def paths(self, project: str, session_id: str, workspace_path: Path | None) -> Paths:
        """Where the session's workspace, home and tmp are or will be.

        Raises:
            RunnerError: ``invalid_request`` for ids that could leave the state directory, or a relative path.
        """
        check_ids(session_id, *(() if project == SPARES else (project,)))
        if workspace_path is not None and not workspace_path.is_absolute():
            raise RunnerError("invalid_request", "workspace.path must be absolute.", field="workspace.path")
        workspace = workspace_path or self._state_dir / "workspaces" / project / session_id
        home = self._state_dir / "homes" / project / session_id
        return Paths(workspace, home / "home", home / "tmp")

    async def start(self, spec: SandboxSpec) -> LocalSandbox:
        """See ``port.Provider.start``; a deadline of 0 is none."""
        paths = self.paths(spec.project, spec.session_id, spec.workspace_path)
        seconds = spec.deadline - self._clock.monotonic() if spec.deadline else None
        try:
            if seconds is not None and seconds <= 0:
                raise TimeoutError
            async with asyncio.timeout(seconds):
                await shielded(asyncio.to_thread(self._prepare, spec, paths), FILES_SECONDS)
                return await self._spawn(spec, paths)
        except TimeoutError:
            raise RunnerError("sandbox_start_failed", "The sandbox did not start in time.") from None
        except OSError as error:
            raise RunnerError("sandbox_start_failed", f"The sandbox could not be made: {error}.") from error

    def _prepare(self, spec: SandboxSpec, paths: Paths) -> None:
        """Make directories and files; in a worker thread, for a disk may be slow."""
        check_files(spec.workspace_files)
        self._state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = [paths.home, paths.tmp] if spec.workspace_path is not None else [paths.home, paths.tmp, paths.workspace]
        if _identity(paths.home) is None:
            self._make(paths.home.parent)
            if spec.spare:
                spare_places.begin(paths.home.parent)
            write_private(paths.home.parent, {IDENTITY: secrets.token_hex(16).encode()})
        if spec.project == SPARES and not spec.spare:
            spare_places.adopt(self._state_dir, spec.session_id)
        for path in own:
            self._make(path)
        if self._bounds.level == "cell":
            write_accounts(paths.home.parent, paths.home)
        write_private(paths.home, spec.home_files)
        write_given(paths.workspace, spec.workspace_files, identities(self._state_dir, *self.secret_files))

    def _make(self, path: Path) -> None:
        fd = open_directory(self._state_dir, path.relative_to(self._state_dir).parts)
        os.close(fd)

    async def _spawn(self, spec: SandboxSpec, paths: Paths) -> LocalSandbox:
        if self._closed:
            raise RunnerError("sandbox_start_failed", "The runner is shutting down.")
        if spec.seat_id in self._live:
            raise RunnerError("sandbox_start_failed", f"The seat {spec.seat_id} has a sandbox already.")
        text = marker(self._store_id, self._replica_id, spec.seat_id)
        own = {"HOME": str(paths.home), "TMPDIR": str(paths.tmp), MARKER: text}
        sandbox = self._forked(spec, paths, text)
        self._live[spec.seat_id] = sandbox
        try:
            await sandbox.begin(spec.argv, {**BASE_ENV, **sandbox.network_env, **spec.env, **own})
        except BaseException:
            await shielded(sandbox.destroy(0.0), UNDO_SECONDS)
            raise
        return sandbox

    def _forked(self, spec: SandboxSpec, paths: Paths, text: str) -> LocalSandbox:
        """The cell with its init, and nothing left of it when it cannot be made."""
        bounds, cell = self._bounds, self._confining(spec, paths)
        group = bounds.groups.make(f"{self._store_id}-{spec.seat_id}", bounds.limits) if bounds.groups else None
        try:
            env = {"PATH": BASE_ENV["PATH"], "LANG": BASE_ENV["LANG"], MARKER: text}
            child = spawn_init(env, cell.wrap if bounds.level == "cell" else None)
        except BaseException:
            if group is not None:
                group.remove()
            raise
        if group is not None:
            # In this order: what the wrapper forks behind its own move is born in the group, and the init forks later.
            group.add(child[0].pid)
            for pid in children(child[0].pid):
                group.add(pid)
        own = Bounds(bounds, cell.confine(), group, self._way_out(spec.seat_id))
        return LocalSandbox(spec.seat_id, text, str(paths.workspace), own, child, self._gone)

    def _confining(self, spec: SandboxSpec, paths: Paths) -> Confining:
        return Confining(self._bounds, self._state_dir, spec, paths, self.secret_files)

    def _way_out(self, name: str) -> Egress | None:
        return Egress(name, self._bounds.allowed, self.own_ports()) if self._bounds.network == "proxy" else None

    def _gone(self, sandbox: LocalSandbox) -> None:
        self._live.pop(sandbox.seat_id, None)

    def disks(self) -> tuple[Disk, ...]:
        """See ``port.Provider.disks``: what sleeps here is a folder."""
        return ()

    def condition(self) -> Condition:
        """See ``port.Provider.condition``."""
        return Condition(True, running=len(self._live))

    async def home_identity(self, project: str, session_id: str) -> str | None:
        """See ``port.Provider.home_identity``: a random text beside the home, so that it moves with it."""
        home = self.paths(project, session_id, None).home
        try:
            return await shielded(asyncio.to_thread(_identity, home), FILES_SECONDS)
        except TimeoutError:
            log.warning("the disk did not tell the home of session %s in time", session_id)
            return None

    def files(self, project: str, session_id: str, workspace_path: Path | None, recipe: str = "default") -> LocalFiles:
        """See ``port.Provider.files``."""
        workspace = self.paths(project, session_id, workspace_path).workspace
        return LocalFiles(self._state_dir, workspace, own=workspace_path is None, secret=self.secret_files)

    async def copy_workspace(self, source: Key, to: Key) -> Copied:
        """See ``port.Provider.copy_workspace``: at most 1 GiB, 100,000 entries, one minute."""
        for key in (source, to):
            self.paths(*key, None)
        budget = Budget(time.monotonic() + COPY_SECONDS)
        work = asyncio.to_thread(copy_tree, self._state_dir, ("workspaces", *source), ("workspaces", *to), budget)
        try:
            found = await shielded(work, 2 * COPY_SECONDS)
        except (TooMuch, TimeoutError):
            return "too_large"
        except OSError as error:
            raise RunnerError("internal", f"The workspace of {source[1]} was not copied: {error}.") from error
        return "copied" if found else "none"

    async def remove(self, project: str, session_id: str, used: bool = True) -> None:
        """See ``port.Provider.remove``.

        Raises:
            RunnerError: ``internal`` when something could not be deleted.
        """
        self.paths(project, session_id, None)
        try:
            await shielded(asyncio.to_thread(spare_places.remove, self._state_dir, project, session_id), FILES_SECONDS)
        except OSError as error:
            raise RunnerError(
                "internal", f"The files of session {session_id} were not all deleted: {error}."
            ) from error

    def adopt(self, spare_id: str) -> None:
        """See ``port.SpareProvider.adopt``."""
        spare_places.adopt(self._state_dir, spare_id)

    def untouched(self, project: str, session_id: str) -> bool:
        """See ``port.SpareProvider.untouched``."""
        return spare_places.untouched(self._state_dir, project, session_id)

    async def sweep_spares(self) -> int:
        """See ``port.SpareProvider.sweep_spares``."""
        found, errors = await asyncio.to_thread(spare_places.sweep, self._state_dir, IDENTITY)
        for error in errors:
            log.error("what is left of a spare could not be removed: %s", error)
        return found

    async def close(self) -> None:
        """Destroy what is left and start nothing more; what no init can answer for is killed by the census."""
        self._closed = True
        await asyncio.gather(*(sandbox.destroy(0.0, CLOSE_SECONDS) for sandbox in list(self._live.values())))
        if self._live:
            reaped = await asyncio.to_thread(kill_all, marker(self._store_id, self._replica_id, ""), CLOSE_SECONDS)
            log.error("sandboxes %s were not proven gone; survivors: %s", list(self._live), reaped.survivors)


def _identity(home: Path) -> str | None:
    try:
        file = os.open(home.parent / IDENTITY, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(file, encoding="ascii") as stream:
            return (stream.read(64) or None) if home.is_dir() else None
    except (OSError, UnicodeDecodeError):
        return None
