"""Snapshots on an emulator that runs their builds: the programs of the image, and what is asked of them."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from runner.config import Settings
from tests.daytona_emulator.fixture import EmulatorProcess

PYTHON = """#!/bin/sh
# pip without an index: the package of this machine.
[ "$2" = pip ] || exec {python} "$@"
while [ "$1" != --target ]; do shift; done
echo "pip installs $3"
mkdir -p "$2" && cp -r {websockets} "$2/"
{after_pip}
"""

NPM = """#!{python}
# npm without a registry: each locked package of this machine with the version that it must have.
import json, os, platform, sys
from pathlib import Path

assert sys.argv[1] == "ci" and "--ignore-scripts" in sys.argv
cpu = {{"x86_64": "x64", "aarch64": "arm64"}}.get(platform.machine(), platform.machine())
here = {{"os": "linux", "cpu": cpu, "libc": "glibc"}}
lock = json.loads(Path("package-lock.json").read_text())
there = {{
    path: entry
    for path, entry in lock["packages"].items()
    if path and all(here[name] in entry.get(name, [here[name]]) for name in here)
}}
for path, entry in there.items():
    place = Path(path)
    (place / "bin").mkdir(parents=True)
    (place / "package.json").write_text(json.dumps({{"version": entry["version"]}}))
    (place / "bin" / "agent").write_text({agent!r})
    (place / "bin" / "agent").chmod(0o755)
Path("node_modules/.package-lock.json").write_text(json.dumps({{"packages": there, "at": os.getcwd()}}))
print("npm installed", len(there), "packages")
"""


def programs(folder: Path, *, agent: str = "", after_pip: str = "") -> str:
    """``PATH`` of an image: Python, pip and npm that need no network, and a node.

    Args:
        folder: where to put them.
        agent: the program that each package has.
        after_pip: one more command of the shell behind each installation by pip.
    """
    spec = find_spec("websockets")
    assert spec is not None and spec.origin is not None
    folder.mkdir(parents=True, exist_ok=True)
    members = {"python": sys.executable, "websockets": Path(spec.origin).parent, "after_pip": after_pip}
    texts = {
        "python3": PYTHON.format(**members),
        "npm": NPM.format(python=sys.executable, agent=agent),
        "node": "#!/bin/sh\necho v24.0.0\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return f"{folder}:/usr/local/bin:/usr/bin:/bin"


def settings(emulator: EmulatorProcess, root: Path, **daytona: object) -> Settings:
    """The settings of a runner that uses the emulator, with the agents below ``root`` over there."""
    given = {"api_url": emulator.api_url, "api_key": emulator.api_key, "root": str(root)}
    return Settings.model_validate({"daytona": {**given, **daytona}})
