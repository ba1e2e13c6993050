"""The files of a bridge, as they lie in a remote sandbox."""

from __future__ import annotations

import functools
import io
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import runner.acp.link
from runner.resources import resource_path

_EPOCH: Final = (1980, 1, 1, 0, 0, 0)


@functools.cache
def bridge_files() -> dict[str, bytes]:
    """Relative path to content: the bridge, the init, the link and the pure Python part of ``websockets``."""
    inside = resource_path("sandboxes", "inside")
    files = {path.relative_to(inside).as_posix(): path.read_bytes() for path in sorted((inside / "cell").glob("*.py"))}
    for name in ("bridge.py", "init.py"):
        files[name] = (inside / name).read_bytes()
    files["link.py"] = Path(runner.acp.link.__file__).read_bytes()
    files["websockets.zip"] = _websockets()
    return files


def _websockets() -> bytes:
    """Byte for byte the same from the same version, so that its digest names it."""
    spec = find_spec("websockets")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*.py")):
            name = path.relative_to(folder.parent).as_posix()
            if "/legacy/" not in name and "/sync/" not in name:
                archive.writestr(zipfile.ZipInfo(name, _EPOCH), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
