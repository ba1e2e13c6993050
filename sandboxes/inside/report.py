"""Tells what a remote sandbox is made of, as one line of JSON on stdout. Standard library only.

``python3 -I report.py ROOT``, beside ``contents.py`` (a copy of ``runner/sandbox/contents.py``). It trusts no record:
digests are of the files that are there.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

TYPE_CHECKING = False
if TYPE_CHECKING:
    from runner.sandbox.contents import bundle_digest, files_of, tree_digest
else:
    from contents import bundle_digest, files_of, tree_digest

NODE_SECONDS = 20.0


def main() -> None:
    root = Path(sys.argv[1])
    bridges = {path.name.partition("-")[2]: bundle_digest(files_of(path)) for path in sorted(root.glob("bridge-*"))}
    told = {
        "python": platform.python_version(),
        "node": node(),
        "uid": os.getuid(),
        "home": os.path.expanduser("~"),
        "platform": [sys.platform, platform.machine(), platform.libc_ver()[0] or "musl"],
        "writable": os.access(root, os.W_OK),
        "record": loaded(root / "snapshot.json"),
        "bridges": bridges,
        "inside": bundle_digest(files_of(root / "inside")) if (root / "inside").is_dir() else None,
        "harnesses": {path.name: harness(path) for path in sorted((root / "harnesses").glob("[!.]*"))},
    }
    sys.stdout.write(json.dumps(told, separators=(",", ":")) + "\n")


def node() -> str | None:
    found = shutil.which("node")
    if found is None:
        return None
    try:
        said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=NODE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return said.stdout.strip() or None


def harness(directory: Path) -> dict[str, Any]:
    """Its manifest, the version of each package that is there, and the digest of all of them."""
    packages = {}
    for path in sorted(directory.rglob("package.json")):
        place = path.parent.relative_to(directory).as_posix()
        parts = place.split("/")
        names = 2 if len(parts) > 1 and parts[-2].startswith("@") else 1
        if len(parts) > names and parts[-names - 1] == "node_modules":
            found = loaded(path)
            packages[place] = str(found.get("version")) if isinstance(found, dict) else "unreadable"
    return {
        "manifest": loaded(directory / "manifest.json"),
        "packages": packages,
        "files": tree_digest(directory / "node_modules"),
    }


def loaded(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


if __name__ == "__main__":
    main()
