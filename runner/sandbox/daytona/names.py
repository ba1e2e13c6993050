"""What a session's sandbox is called, and the places that stand for those inside before it is there."""

from __future__ import annotations

import hashlib
from pathlib import Path

from runner.errors import RunnerError
from runner.ids import valid_id
from runner.sandbox.daytona.boot import ROOT
from runner.sandbox.port import Paths


def sandbox_name(store_id: str, project: str, session_id: str) -> str:
    """Unique over all runners that share an account, the same for each start of the session."""
    text = f"{store_id}/{project}/{session_id}"
    return f"acp-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def places(project: str, session_id: str, workspace_path: Path | None) -> Paths:
    """Paths below ``boot.ROOT``, which is replaced over there.

    Raises:
        RunnerError: ``invalid_request`` for a path of this machine or ids that are none.
    """
    if not (valid_id(project) and valid_id(session_id)):
        raise RunnerError("invalid_request", "A project or session id may hold letters, digits, “_” and “-” only.")
    if workspace_path is not None:
        text = "workspace.path: a directory of the runner's machine is not in a Daytona sandbox."
        raise RunnerError("invalid_request", text, field="workspace.path")
    root = Path(ROOT)
    return Paths(root / "workspace", root / "home", root / "tmp")
