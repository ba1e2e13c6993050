"""Directories of spares on this machine: a note beside the home says that no session adopted them yet (DESIGN 3.10)."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from runner.ids import SPARES
from runner.sandbox.workspace import remove_tree, write_private

NOTE: Final = "unclaimed"
FOLDERS: Final = ("workspaces", "homes")


def begin(home: Path) -> None:
    """Note that nobody owns what is about to be made; ``home`` is the folder that holds home, tmp and the note."""
    write_private(home, {NOTE: b""})


def adopt(state_dir: Path, spare_id: str) -> None:
    """A session owns them from now on; again is fine. Raises ``OSError``."""
    with suppress(FileNotFoundError):
        os.unlink(state_dir / "homes" / SPARES / spare_id / NOTE)


def sweep(state_dir: Path, identity: str) -> tuple[int, list[OSError]]:
    """Remove those that nobody adopted: how many, and what could not be removed.

    ``identity``: the file that every complete home has; what lacks it is the begin of a spare that was never started.
    """
    try:
        names = sorted(os.listdir(state_dir / "homes" / SPARES))
    except FileNotFoundError:
        return 0, []
    found, errors = 0, []
    for name in names:
        home = state_dir / "homes" / SPARES / name
        if not os.path.lexists(home / NOTE) and os.path.lexists(home / identity):
            continue
        found += 1
        try:
            remove(state_dir, SPARES, name)
        except OSError as error:
            errors.append(error)
    return found, errors


def remove(state_dir: Path, project: str, session_id: str) -> None:
    """Delete workspace, then home with the note, so that what is left of a try is found again. Raises ``OSError``."""
    for folder in FOLDERS:
        remove_tree(state_dir, (folder, project, session_id))


def untouched(state_dir: Path, project: str, session_id: str) -> bool:
    """Whether a session has no directory here."""
    return not any(os.path.lexists(state_dir / folder / project / session_id) for folder in FOLDERS)
