"""Stands in for npm: installs from the lock beside it, as badly as ``FAKE_NPM`` says."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

MANNER = os.environ.get("FAKE_NPM", "good")


def main() -> None:
    assert sys.argv[1] == "ci"
    assert "--ignore-scripts" in sys.argv
    log = os.environ.get("FAKE_NPM_LOG")
    if log:
        with Path(log).open("a") as file:
            file.write("ci\n")
    if MANNER == "fails":
        sys.exit("npm error code EINTEGRITY")
    if MANNER == "hangs":
        time.sleep(300)
    if MANNER == "slow":
        time.sleep(0.3)
    if MANNER == "silent":
        return
    lock = json.loads(Path("package-lock.json").read_text())
    packages = {path: entry for path, entry in lock["packages"].items() if path}
    packages = {path: entry for path, entry in packages.items() if "linux-never" not in str(entry.get("cpu"))}
    victim = next(iter(packages))
    if MANNER == "leaves_out":
        del packages[victim]
    if MANNER == "other_digest":
        packages[victim] = {**packages[victim], "integrity": "sha512-other"}
    if MANNER == "adds":
        packages["node_modules/extra"] = {"version": "1.0.0", "integrity": "sha512-x"}
    for path, entry in packages.items():
        directory = Path(path)
        (directory / "bin").mkdir(parents=True)
        (directory / "package.json").write_text(json.dumps({"version": entry["version"]}))
        program = directory / "bin" / "agent"
        program.write_text(os.environ.get("FAKE_AGENT", "#!/bin/sh\n"))
        program.chmod(0o755)
    Path("node_modules/.package-lock.json").write_text(json.dumps({"packages": packages}))
    print(f"added {len(packages)} packages")


main()
