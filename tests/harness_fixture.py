"""The real agents for tests: installed once into the checkout's ``.cache/harnesses``, then reused.

``tests/conftest.py`` imports what stands here. A test that asks for ``installed_harnesses`` fails,
and never skips, where an agent cannot be installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.harness.installer import install
from tests.model_server import ModelServer

REAL_HARNESSES = ("claude", "codex")
CACHE = Path(__file__).resolve().parents[1] / ".cache" / "harnesses"
TEST_SECONDS = 120


@dataclass(frozen=True)
class InstalledHarnesses:
    """Where the real agents lie.

    Attributes:
        state_dir: a state directory that holds nothing but them.
    """

    state_dir: Path

    def link_into(self, state_dir: Path) -> None:
        """Make them available in another state directory, without a copy (they have 800 MB)."""
        state_dir.mkdir(parents=True, exist_ok=True)
        (state_dir / "harnesses").symlink_to(self.state_dir / "harnesses")


@pytest.fixture(scope="session")
def installed_harnesses() -> InstalledHarnesses:
    for name in REAL_HARNESSES:
        lines: list[str] = []
        try:
            install(name, CACHE, lines.append)
        except RunnerError as error:
            said = "\n".join(lines)
            pytest.fail(f"{error.message}\nTry: acp-runner harness install {name} --state-dir {CACHE}\n{said}")
    return InstalledHarnesses(CACHE)


def model_variables(name: str, model: ModelServer) -> dict[str, str]:
    """What a dispatch's ``env`` or ``secrets`` must hold for a real agent to talk to this model server.

    The Codex model is one that it knows: for any other it adds a warning to each turn's text.
    """
    if name == "claude":
        return {"ANTHROPIC_API_KEY": "key-of-the-test", "ANTHROPIC_BASE_URL": model.url}
    return {
        "OPENAI_API_KEY": "key-of-the-test",
        "OPENAI_BASE_URL": model.openai_url,
        "CODEX_MODEL": "gpt-5.4",
        "CODEX_MAX_RETRIES": "0",
    }


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The installation has its own limit, so the test's counts only the test."""
    for item in items:
        if "installed_harnesses" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.real_agent)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TEST_SECONDS, func_only=True))
