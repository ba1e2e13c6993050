"""What starting a command may load: the client commands know neither the server nor the store (DESIGN 7)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {"aiohttp.web", "sqlite3", "runner.server", "runner.store.sqlite", "runner.assembly", "prometheus_client"}


def loaded_by(code: str) -> set[str]:
    """Names of the modules that a fresh interpreter holds after ``code``."""
    told = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    return set(json.loads(told.stdout.splitlines()[-1]))


def test_the_command_line_starts_light() -> None:
    modules = loaded_by("import runner.cli.main")
    assert "runner.cli.main" in modules
    assert modules & (HEAVY | {"aiohttp"}) == set()


def test_the_client_loads_no_server() -> None:
    modules = loaded_by("import runner.client")
    assert "runner.client" in modules
    assert modules & HEAVY == set()


@pytest.mark.parametrize("module", ["aiohttp.web", "sqlite3"])
def test_the_check_would_notice(module: str) -> None:
    assert module in loaded_by(f"import {module}") & HEAVY
