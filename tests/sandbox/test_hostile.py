"""Fifty hostile turns: nobody is left by an independent look, the agent and its helper still answer (cases D4, D9)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sandbox.hostile_run import hostile_turns

ROOT = Path(__file__).parents[2]
NOBODY = 65534
TURNS = 50
RUN_SECONDS = 300.0


def assert_nobody_is_left(found: dict[str, Any], turns: int, proof: str) -> None:
    assert found["left"] == []
    assert found["strangers"] == []
    assert len(found["kills"]) == turns
    assert found["answers"]
    assert (found["proof"], found["survivors"]) == (proof, [])


@pytest.mark.timeout(RUN_SECONDS)
@pytest.mark.parametrize("level", ["cell", "landlock", "none"])
async def test_hostile_turns_leave_nobody(tmp_path: Path, level: str) -> None:
    """Cases D4 and D9, as the user that runs the tests."""
    assert_nobody_is_left(await hostile_turns(tmp_path / "state", level, TURNS), TURNS, "echild")


@pytest.fixture
def folder_of_nobody() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="acp-runner-nobody-") as name:
        os.chmod(name, 0o755)
        folder = Path(name) / "state"
        folder.mkdir()
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        yield folder


def as_nobody() -> list[str]:
    """The command before one that another user runs: the interpreter may lie in a home that is root's alone."""
    if os.geteuid() != 0:
        return []
    needed = {Path(path).resolve() for path in (sys.prefix, sys.base_prefix, ROOT)}
    homes = [path for path in needed if path.is_relative_to("/root")]
    shown = []
    for path in sorted(homes):
        for folder in [*reversed(path.parents), path][2:]:
            shown += ["--perms", "0755", "--dir", str(folder)]
        shown += ["--ro-bind", str(path), str(path)]
    covered = ["--tmpfs", "/root", *shown] if homes else []
    return [
        *("bwrap", "--dev-bind", "/", "/", *covered, "--"),
        *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--inh-caps=-all", "--"),
    ]


@pytest.mark.timeout(RUN_SECONDS)
@pytest.mark.parametrize("level", ["cell", "landlock", "none"])
def test_hostile_turns_of_an_unprivileged_runner_leave_nobody(folder_of_nobody: Path, level: str) -> None:
    """Cases D4 and D9, as nobody: no capability, no control group of its own."""
    command = [
        *as_nobody(),
        sys.executable,
        "-m",
        "tests.sandbox.hostile_run",
        str(folder_of_nobody),
        level,
        str(TURNS),
    ]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=RUN_SECONDS, check=False, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout)
    assert found["uid"] == (NOBODY if os.geteuid() == 0 else os.geteuid())
    assert_nobody_is_left(found, TURNS, "echild")


@pytest.mark.timeout(RUN_SECONDS)
def test_an_unprivileged_runner_serves_cells(folder_of_nobody: Path) -> None:
    """The whole way, not dumpable, as nobody: a server of its own for one prompt, and nobody behind it."""
    state = folder_of_nobody / "state"
    # Process 1 of the cell is the init.
    tool = "/tool test $(tr '\\0' ' ' < /proc/1/cmdline | grep -c init.py) = 1"
    prompt = ("-m", "runner.cli.main", "prompt", "--state-dir", str(state), tool)
    own = {name: value for name, value in os.environ.items() if not name.startswith("ACP_RUNNER_")}
    command = [*as_nobody(), sys.executable, *prompt]
    environ = {**own, "HOME": str(folder_of_nobody), "ACP_RUNNER_LOCAL__ISOLATION": "cell"}
    ran = subprocess.run(
        command, cwd=ROOT, capture_output=True, timeout=RUN_SECONDS, check=False, text=True, env=environ
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.strip() == "exit code 0", (ran.stdout, ran.stderr)
