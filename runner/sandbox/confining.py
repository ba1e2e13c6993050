"""From one start to what holds its cell in: the wrapper's command, or the paths and numbers for its init."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from runner.errors import RunnerError
from runner.rules.cell_view import CellView, bubblewrap
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

    Raises:
        RunnerError: ``invalid_request``: the workspace would show what a cell must hide.
    """

    def __init__(self, isolation: Isolation, state_dir: Path, spec: SandboxSpec, paths: Paths) -> None:
        self._isolation = isolation
        self._state_dir = state_dir
        self._spec = spec
        self._paths = paths
        if isolation.level == "cell" and os.path.realpath(paths.workspace) in NO_WORKSPACE:
            text = f"workspace.path: {paths.workspace} cannot be shown in a cell."
            raise RunnerError("invalid_request", text, field="workspace.path")

    def wrap(self, init: Sequence[str]) -> list[str]:
        """The command that runs the init in a cell."""
        system, folder = self._isolation.system, self._paths.home.parent
        view = CellView(
            read=(*of_the_init(system), *self._read()),
            write=self._write(),
            hidden=tuple(dict.fromkeys((str(self._state_dir), os.path.realpath(self._state_dir)))),
            tmp=str(self._paths.tmp),
            accounts=(str(folder / ACCOUNTS[0]), str(folder / ACCOUNTS[1])),
        )
        network = self._isolation.network
        return bubblewrap(
            self._isolation.program, system, view, uid=inner_id(), gid=inner_gid(), network=network, init=init
        )

    def confine(self) -> dict[str, Any]:
        """What the init does to the agent."""
        found: dict[str, Any] = {}
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
