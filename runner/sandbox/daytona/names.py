"""What a session's sandbox is called, and the places that stand for those inside before it is there."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from runner.errors import RunnerError
from runner.sandbox.daytona.service import DaytonaService, Found
from runner.sandbox.port import Paths
from runner.sandbox.workspace import check_ids

ROOT: Final = "/.acp-runner-root"
"""Stands for the session's directory over there, which is known only when the sandbox is: replaced wherever it is."""


async def root_of(service: DaytonaService, found: Found) -> str:
    """The session's directory over there, which ``ROOT`` stands for.

    Raises:
        CallFailed: the sandbox did not say where its home is.
    """
    return f"{(await service.home(found.id)).rstrip('/')}/acp-runner"


def sandbox_name(store_id: str, project: str, session_id: str) -> str:
    """Unique over all runners that share an account, the same for each start of the session."""
    text = f"{store_id}/{project}/{session_id}"
    return f"acp-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def places(project: str, session_id: str, workspace_path: Path | None) -> Paths:
    """Paths below ``ROOT``, which is replaced over there.

    Raises:
        RunnerError: ``invalid_request`` for a path of this machine or ids that are none.
    """
    check_ids(project, session_id)
    if workspace_path is not None:
        text = "workspace.path: a directory of the runner's machine is not in a Daytona sandbox."
        raise RunnerError("invalid_request", text, field="workspace.path")
    root = Path(ROOT)
    return Paths(root / "workspace", root / "home", root / "tmp")
