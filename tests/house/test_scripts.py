"""The scripts: their syntax, their refusals, and what ``scripts/start --once`` accepts as a turn."""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.house.tree import ROOT

NAMES = ("setup", "start", "test", "check", "bench", "storm", "outage")
SHELL = [*(ROOT / "scripts" / name for name in NAMES), ROOT / ".ci" / "run"]


@pytest.fixture(scope="module")
def start() -> ModuleType:
    """``scripts/start.py`` as a module."""
    spec = importlib.util.spec_from_file_location("scripts_start", ROOT / "scripts" / "start.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("script", SHELL, ids=lambda path: path.name)
def test_shell_scripts_are_executable_and_parse(script: Path) -> None:
    assert os.access(script, os.X_OK)
    parsed = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=20, check=False)
    assert parsed.returncode == 0, parsed.stderr


def test_setup_refuses_what_it_does_not_know() -> None:
    done = subprocess.run(
        [str(ROOT / "scripts" / "setup"), "--nothing"], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 2
    assert "usage" in done.stderr


def test_setup_says_what_is_missing_without_a_python(tmp_path: Path) -> None:
    old = tmp_path / "python-old"
    old.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    old.chmod(0o755)
    argv = [str(ROOT / "scripts" / "setup"), "--venv", str(tmp_path / "venv"), "--python", str(old)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 1
    assert "Python 3.11 or newer" in done.stderr
    assert not (tmp_path / "venv").exists()


def good() -> dict[str, Any]:
    """A turn as the server streams it."""
    return {
        "events": [
            {"type": "turn_admitted", "data": {"turn_id": "t1"}},
            {"type": "message_delta", "data": {"text": "x"}},
            {"type": "tool_call", "data": {}},
            {"type": "done", "data": {"turn_id": "t1", "outcome": "completed"}},
        ],
        "result": {"ok": True, "turn_id": "t1"},
    }


def test_start_accepts_a_whole_turn(start: ModuleType) -> None:
    start.check_turn(start.Seen(**good()))


@pytest.mark.parametrize("lost", ["turn_admitted", "message_delta", "tool_call", "done"])
def test_start_misses_an_event(start: ModuleType, lost: str) -> None:
    turn = good()
    turn["events"] = [event for event in turn["events"] if event["type"] != lost]
    with pytest.raises(start.Failed, match=lost if lost != "done" else "endings"):
        start.check_turn(start.Seen(**turn))


def test_start_refuses_a_second_ending_and_a_bad_result(start: ModuleType) -> None:
    twice, failed, bare, other = (copy.deepcopy(good()) for _ in range(4))
    twice["events"].append(twice["events"][-1])
    failed["result"]["ok"] = False
    bare["result"] = None
    other["events"][-1]["data"]["outcome"] = "failed"
    for turn in (twice, failed, bare, other):
        with pytest.raises(start.Failed):
            start.check_turn(start.Seen(**turn))


def test_start_tells_the_error_of_a_failed_turn(start: ModuleType) -> None:
    turn = good()
    turn["result"] = {"ok": False, "turn_id": "t1", "error": {"code": "harness_exited", "message": "gone"}}
    with pytest.raises(start.Failed, match="harness_exited"):
        start.check_turn(start.Seen(**turn))


def test_start_census_sees_a_process_by_its_state_directory(start: ModuleType, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"], env={"HOME": str(tmp_path / "homes" / "x")}) as child:
        try:
            server = start.Server(child, tmp_path, "http://127.0.0.1:1", "replica-that-is-not-there")
            assert [line.split()[0] for line in start.census(server)] == [str(child.pid)]
        finally:
            child.kill()
    assert start.census(server) == []
    start.check_gone(server)
