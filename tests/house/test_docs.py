"""What the pages promise exists: scripts, commands, links (README.md, docs/)."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from runner.cli.main import app
from runner.errors import CODES
from runner.metrics import FAMILIES
from runner.server.routes import ROUTES
from tests.house.tree import ROOT, below

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *below("docs", suffix=".md")]
FENCE = re.compile(r"^```(?:bash|sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)")
COMMAND = re.compile(r"(?:^|\s|`|/)acp-runner ([a-z]+)(?: ([a-z]+))?")
SCRIPT = re.compile(r"(?<![\w/])scripts/([a-z.]+)")

LONG = {"p": "prompt", "s": "session", "i": "interaction", "c": "command"}


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def commands_in_shell_blocks() -> set[tuple[str, ...]]:
    found: set[tuple[str, ...]] = set()
    for page in PAGES:
        for block in FENCE.findall(page.read_text(encoding="utf-8")):
            for first, second in COMMAND.findall(block):
                found.add((first, second) if second and first in {"harness", "sessions"} else (first,))
    return found


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    missing = [
        target
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_scripts_that_are_named_exist_and_run(page: Path) -> None:
    for name in set(SCRIPT.findall(page.read_text(encoding="utf-8"))):
        script = ROOT / "scripts" / name.rstrip(".")
        assert os.access(script, os.X_OK) or script.suffix == ".py", f"{script} is not there"


def test_the_readme_names_the_two_commands() -> None:
    blocks = "\n".join(FENCE.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    assert "scripts/start" in blocks
    assert "scripts/test" in blocks


def test_commands_that_are_shown_exist() -> None:
    shown = commands_in_shell_blocks()
    assert ("serve",) in shown
    assert ("prompt",) in shown
    for words in sorted(shown):
        told = CliRunner().invoke(app, [*words, "--help"])
        assert told.exit_code == 0, f"acp-runner {' '.join(words)}: {told.output}"


def test_ci_calls_the_commands_of_the_readme() -> None:
    run = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command in ("scripts/test", "scripts/check", "scripts/start --once"):
        assert re.search(rf"^step .* {re.escape(command)}$", run, re.MULTILINE)


def test_the_page_of_the_api_lists_the_routes_that_are_built() -> None:
    page = (ROOT / "docs" / "http-api.md").read_text(encoding="utf-8")
    listed = {
        (method, re.sub(r"\{(.)id\}", lambda short: f"{{{LONG[short[1]]}_id}}", path.split("?")[0]))
        for line in page.splitlines()
        if line.startswith("| `")
        for method, path in re.findall(r"`(GET|HEAD|POST|PUT|DELETE) (/[^`\s]*)`", line)
    }
    assert listed == {(route.method, route.path) for route in ROUTES}


def test_the_page_of_the_metrics_lists_those_that_are_there() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = [row.split(" | ") for row in page.splitlines() if row.startswith("| `")]
    listed = {(row[0].strip("| `"), row[1].strip(), tuple(re.findall(r"`([a-z_]+)`", row[2]))) for row in rows}
    assert listed == {(family.name, family.kind, family.labels) for family in FAMILIES}
    assert len(rows) == len(FAMILIES)


def test_the_page_of_the_api_lists_every_error_code() -> None:
    page = (ROOT / "docs" / "http-api.md").read_text(encoding="utf-8").split("## Errors")[1]
    later = {"queue_full", "session_starting"}
    assert set(re.findall(r"`([a-z_]+)`", page)) >= set(CODES) - later
