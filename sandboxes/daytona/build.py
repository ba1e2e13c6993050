"""Fills an image while it is built: agents with their patches, the demo agent, the bridge. Standard library only.

``python3 -I build.py ROOT``, from ``ROOT/parcel``, which it removes in the end. ``plan.json`` there says what to do,
``ROOT/snapshot.json`` what was done. The first thing that is not as planned ends it, and with it the build.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

TYPE_CHECKING = False
if TYPE_CHECKING:
    from runner.rules.patches import Patch, applied
    from runner.sandbox.contents import bundle_digest, zipped
else:
    from contents import bundle_digest, zipped

    from patches import Patch, applied

BRIDGE = ("bridge.py", "init.py", "link.py")


def main() -> None:
    root = Path(sys.argv[1])
    parcel = root / "parcel"
    plan = json.loads((parcel / "plan.json").read_text())
    os.umask(0o022)
    shutil.move(str(parcel / "inside"), str(root / "inside"))
    make_bridge(root, parcel, plan)
    record: dict[str, Any] = {"content": plan["content"], "bridge": plan["bridge"], "harnesses": {}}
    for name, harness in plan["harnesses"].items():
        record["harnesses"][name] = install(root / "harnesses" / name, harness, plan["npm"])
    (root / "content").write_text(plan["content"])
    (root / "snapshot.json").write_text(json.dumps(record, indent=1) + "\n")
    shutil.rmtree(parcel)


def make_bridge(root: Path, parcel: Path, plan: dict[str, Any]) -> None:
    """The files of the bridge, byte for byte those of the runner that asked for the image."""
    fetched = parcel / "websockets"
    wanted = f"websockets=={plan['websockets']}"
    run(["python3", "-m", "pip", "install", "--no-deps", "--no-compile", "--target", str(fetched), wanted], parcel)
    files = {name: (root / "inside" / name).read_bytes() for name in BRIDGE if name != "link.py"}
    files |= {f"cell/{path.name}": path.read_bytes() for path in (root / "inside" / "cell").glob("*.py")}
    files |= {"link.py": (parcel / "link.py").read_bytes(), "websockets.zip": zipped(fetched / "websockets")}
    if bundle_digest(files) != plan["bridge"]:
        sys.exit(f"{wanted} of the index is not the one of the runner: the bridge would be another")
    place = root / f"bridge-{plan['bridge']}"
    for name, content in {**files, "complete": b"yes"}.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def install(directory: Path, harness: dict[str, Any], npm: list[str]) -> dict[str, Any]:
    """Exactly the locked packages, patched; what it returns is what the runner's own installations record."""
    lock = harness["lock"]
    directory.mkdir(parents=True)
    text = base64.b64decode(lock)
    packages = json.loads(text)["packages"]
    (directory / "package.json").write_text(json.dumps({"private": True, **packages[""]}, indent=2) + "\n")
    (directory / "package-lock.json").write_bytes(text)
    run(["npm", *npm], directory)
    for table in harness["patches"]:
        patch = Patch(**{**table, "diff": base64.b64decode(table["diff"])})
        if packages.get(patch.place, {}).get("version") != patch.version:
            sys.exit(
                f"patches/{patch.file} is made for version {patch.version} of {patch.package}, which is not pinned"
            )
        if (directory / patch.place).is_dir():
            change(patch, directory / patch.target)
    there = {path: entry["version"] for path, entry in packages.items() if path and (directory / path).is_dir()}
    manifest: dict[str, Any] = {**harness["manifest"], "packages": there}
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def change(patch: Patch, path: Path) -> None:
    try:
        content = applied(patch, path.read_bytes())
    except (ValueError, OSError) as error:
        sys.exit(f"patches/{patch.file} does not apply to {path}: {error}")
    path.write_bytes(content)
    tell(f"applied {patch.file} to {path}")


def run(command: list[str], directory: Path) -> None:
    tell(" ".join(command))
    code = subprocess.run(command, cwd=directory, stdin=subprocess.DEVNULL, check=False).returncode
    if code != 0:
        sys.exit(f"{command[0]} failed with exit code {code}")


def tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
