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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The installation has its own limit, so the test's counts only the test."""
    for item in items:
        if "installed_harnesses" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.real_agent)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TEST_SECONDS, func_only=True))
