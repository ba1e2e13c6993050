"""The layers and vendor homes hold, and the contracts that say so would notice (DESIGN 6)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.tree import ROOT

LINT = str(Path(sys.executable).with_name("lint-imports"))


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [LINT, "--no-cache", "--no-logo"], cwd=tree, capture_output=True, text=True, timeout=50, check=False
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "runner", tmp_path / "runner", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_contracts_hold() -> None:
    checked = lint(ROOT)
    assert checked.returncode == 0, checked.stdout[-6000:] + checked.stderr[-2000:]


@pytest.mark.parametrize(
    ("file", "line", "told"),
    [
        ("rules/later.py", "import runner.store.port", "runner.rules is not allowed to import runner.store"),
        ("store/later.py", "import runner.sandbox.port", "runner.store is not allowed to import runner.sandbox"),
        ("rules/later.py", "from asyncio import sleep", "runner.rules is not allowed to import asyncio"),
        ("rules/later.py", "import time", "runner.rules is not allowed to import time"),
        ("turn/later.py", "from aiohttp import web", "runner is not allowed to import aiohttp"),
        ("server/later.py", "import rich", "runner is not allowed to import rich"),
        ("session/later.py", "import prometheus_client", "runner is not allowed to import prometheus_client"),
        ("acp/later.py", "import acp.schema", "runner is not allowed to import acp"),
        ("session/later.py", "import sqlite3", "runner is not allowed to import sqlite3"),
        ("attic/__init__.py", "", "attic"),
    ],
)
def test_a_breach_is_noticed(copy: Path, file: str, line: str, told: str) -> None:
    target = copy / "runner" / file
    target.parent.mkdir(exist_ok=True)
    target.write_text(f'"""A breach."""\n\n{line}\n', encoding="utf-8")
    checked = lint(copy)
    assert checked.returncode != 0
    assert told in checked.stdout + checked.stderr
