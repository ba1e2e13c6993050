"""Runs npm for one installation: pinned packages by digest, no scripts, a deadline, one clear error."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from runner.harness.installed import NpmInstall, fits_this_machine
from runner.harness.spec import missing

INSTALL_SECONDS: Final = 900.0

# Exact flags, because a person's npm configuration may say otherwise. Scripts stay off: what they
# would fetch is past the lock's digests.
ARGUMENTS: Final = (
    "ci",
    "--ignore-scripts",
    "--include=optional",
    "--omit=dev",
    "--bin-links=false",
    "--engine-strict=false",
    "--global=false",
    "--audit=false",
    "--fund=false",
    "--update-notifier=false",
    "--loglevel=error",
)


def find_npm(name: str) -> str:
    """Path of npm.

    Raises:
        RunnerError: ``harness_missing`` with the command that installs npm.
    """
    found = shutil.which("npm")
    if found is None:
        raise missing(name, "npm is needed to install it and was not found", "apt-get install npm")
    return found


def install_packages(
    name: str,
    install: NpmInstall,
    directory: Path,
    progress: Callable[[str], None],
    seconds: float = INSTALL_SECONDS,
) -> dict[str, str]:
    """Fill ``directory`` with exactly the locked packages.

    npm checks each package against the lock's digest, but leaves an optional one out without a
    word when it fails; so what is there is compared with the lock afterwards.

    Returns:
        Path of each package below ``directory`` to its version.

    Raises:
        RunnerError: ``harness_missing`` with npm's words.
    """
    npm = find_npm(name)
    lock = json.loads(install.lock_bytes())
    root = lock["packages"][""]
    (directory / "package.json").write_text(json.dumps({"private": True, **root}, indent=2) + "\n")
    (directory / "package-lock.json").write_bytes(install.lock_bytes())
    expected = {path: entry for path, entry in lock["packages"].items() if path and fits_this_machine(entry)}
    progress(f"{name}: installing {len(expected)} packages with npm")
    _run(name, (npm, *ARGUMENTS), directory, progress, time.monotonic() + seconds)
    _compare(name, expected, directory)
    return {path: str(entry["version"]) for path, entry in expected.items()}


def _compare(name: str, expected: Mapping[str, Mapping[str, Any]], directory: Path) -> None:
    try:
        found: Any = json.loads((directory / "node_modules" / ".package-lock.json").read_bytes())["packages"]
    except (OSError, ValueError, KeyError) as error:
        raise missing(name, f"npm left no record of what it installed ({error})", None) from error
    for path, entry in expected.items():
        got = found.get(path)
        if got is None or not (directory / path / "package.json").is_file():
            raise missing(name, f"npm could not install {path} {entry['version']} with the digest it must have", None)
        if (got.get("version"), got.get("integrity")) != (entry["version"], entry["integrity"]):
            raise missing(name, f"npm installed another {path} than the pinned {entry['version']}", None)
    extra = sorted(set(found) - set(expected))
    if extra:
        raise missing(name, f"npm installed {extra[0]}, which is not pinned", None)


def _run(
    name: str, command: tuple[str, ...], directory: Path, progress: Callable[[str], None], deadline: float
) -> None:
    process = subprocess.Popen(
        command,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        start_new_session=True,
    )
    ended = False
    said: deque[str] = deque(maxlen=20)
    try:
        ended = _follow(process, name, said, progress, deadline)
    finally:
        if not ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        if process.stdout is not None:
            process.stdout.close()
    if not ended:
        raise missing(name, "npm did not finish in time: " + " | ".join(said), None)
    if code != 0:
        raise missing(name, f"npm failed with exit code {code}: " + " | ".join(said), None)


def _follow(
    process: subprocess.Popen[bytes],
    name: str,
    said: deque[str],
    progress: Callable[[str], None],
    deadline: float,
) -> bool:
    """Pass npm's lines on until it closes its output; False when the time is up."""
    assert process.stdout is not None
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if not selector.select(left):
                continue
            data = process.stdout.read(65_536)
            *lines, rest = (rest + data).split(b"\n")
            for line in [*lines, *([rest] if not data else [])]:
                text = line.decode(errors="replace").strip()[:500]
                if text:
                    said.append(text)
                    progress(f"{name}: {text}")
            if not data:
                return True
    return False
