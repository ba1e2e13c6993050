"""Where things are: the state directory, and the files that travel with the package (DESIGN 5, 6).

A wheel carries them as ``runner/_bundled/<name>`` (force-included in ``pyproject.toml``). A checkout, and so an
editable installation, has them beside the package. Both are real directories: wheels are unpacked when installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path


def resource_path(*parts: str) -> Path:
    """Absolute path of a bundled file or folder, e.g. ``resource_path("sandboxes", "inside", "init.py")``.

    Args:
        parts: the path below the repository's root; the first is ``sandboxes`` or ``patches``.

    Raises:
        FileNotFoundError: this installation lacks it; the message names the path that was looked for.
    """
    package = Path(str(files("runner"))).resolve()
    bundled = package / "_bundled"
    path = (bundled if bundled.is_dir() else package.parent).joinpath(*parts)
    if not path.exists():
        raise FileNotFoundError(f"the installation of acp-runner lacks {path}")
    return path


def state_dir(environ: Mapping[str, str]) -> Path:
    """``$ACP_RUNNER_STATE_DIR``, default ``~/.local/state/acp-runner``; absolute."""
    named = environ.get("ACP_RUNNER_STATE_DIR")
    home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    return Path(named).expanduser().absolute() if named else home / ".local" / "state" / "acp-runner"
