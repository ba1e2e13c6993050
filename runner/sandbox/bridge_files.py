"""The files of a bridge, as they lie in a remote sandbox."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path

import runner.acp.link
from runner.resources import resource_path
from runner.sandbox.contents import bundle_digest, zipped


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
    spec = find_spec("websockets")
    assert spec is not None
    assert spec.origin is not None
    return zipped(Path(spec.origin).parent)


@functools.cache
def bridge_digest() -> str:
    """Names the bridge's files: another version lies beside an old one."""
    return bundle_digest(bridge_files())
