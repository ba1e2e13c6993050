"""From one start to what holds its cell in: the wrapper's command, or the paths and numbers for its init."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from runner.errors import RunnerError
from runner.rules.cell_view import CellView, below, bubblewrap, places_of
from runner.sandbox.isolation import (
    ACCOUNTS,
    Isolation,
    inner_gid,
    inner_id,
    landlock_paths,
    needed_by,
    of_the_init,
)
from runner.sandbox.port import Paths, SandboxSpec

NO_WORKSPACE: Final = ("/", "/dev", "/proc", "/sys")


class Confining:
    """One start under one isolation.

    Args:
        secret: files that no sandbox sees, wherever they lie.

    Raises:
        RunnerError: ``invalid_request``: the workspace would show what a cell must hide; ``sandbox_start_failed``: all
            of this runner's would.
    """

    def __init__(
        self, isolation: Isolation, state_dir: Path, spec: SandboxSpec, paths: Paths, secret: Iterable[Path] = ()
    ) -> None:
        self._isolation = isolation
        self._state_dir = state_dir
        self._spec = spec
        self._paths = paths
        self._secret = tuple(os.path.realpath(path) for path in secret if path.exists())
        if isolation.level == "cell" and os.path.realpath(paths.workspace) in NO_WORKSPACE:
            text = f"workspace.path: {paths.workspace} cannot be shown in a cell."
            raise RunnerError("invalid_request", text, field="workspace.path")
        around = [folder for folder in isolation.system.folders if below(os.path.realpath(state_dir), folder)]
        if isolation.level != "none" and around:
            text = f"The state directory {state_dir} lies in {around[0]}, which every sandbox sees."
            raise RunnerError("sandbox_start_failed", f"{text} Set ACP_RUNNER_STATE_DIR.")
        if isolation.level == "landlock":
            self._refuse_what_shows_the_runner()

    def _refuse_what_shows_the_runner(self) -> None:
        """Landlock opens what lies below an open folder, too."""
        for path in self._write():
            for secret in (os.path.realpath(self._state_dir), *self._secret):
                if below(secret, os.path.realpath(path)):
                    text = f"workspace.path: {path} holds files of the runner's own, which only a cell can hide."
                    raise RunnerError("invalid_request", text, field="workspace.path")

    def wrap(self, init: Sequence[str]) -> list[str]:
        """The command that runs the init in a cell."""
        system, folder = self._isolation.system, self._paths.home.parent
        read, write = (*of_the_init(system), *self._read()), self._write()
        shown = [(path, os.path.realpath(path)) for path in (*read, *write)]
        state_dir = os.path.realpath(self._state_dir)
        view = CellView(
            read=read,
            write=write,
            hidden=tuple(dict.fromkeys((str(self._state_dir), state_dir, *places_of(state_dir, shown)))),
            masked=tuple(dict.fromkeys(place for path in self._secret for place in places_of(path, shown))),
            tmp=str(self._paths.tmp),
            accounts=(str(folder / ACCOUNTS[0]), str(folder / ACCOUNTS[1])),
        )
        network = self._isolation.network
        return bubblewrap(
            self._isolation.program, system, view, uid=inner_id(), gid=inner_gid(), network=network, init=init
        )

    def confine(self) -> dict[str, Any]:
        """What the init does to the agent."""
        found: dict[str, Any] = {} if self._isolation.level == "none" else {"keyrings": False}
        if self._isolation.limits.pids_by == "rlimit":
            found["processes"] = self._isolation.limits.pids
        if self._isolation.level == "landlock":
            write = (*self._write(), str(self._paths.tmp))
            found |= landlock_paths(self._isolation.system, self._read(), write)
        return found

    def _read(self) -> tuple[str, ...]:
        given = (str(path) for path in self._spec.read)
        return (*needed_by(self._spec.argv[:1], self._isolation.system), *given)

    def _write(self) -> tuple[str, ...]:
        return (str(self._paths.workspace), str(self._paths.home), *map(str, self._spec.write))
