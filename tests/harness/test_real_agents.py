"""The two real agents, installed by the installer: unharmed, startable, of the pinned version."""

from __future__ import annotations

import pytest

from runner.harness.catalogue import Catalogue
from runner.harness.installer import check
from tests.harness_fixture import InstalledHarnesses

EXPECTED = {
    "claude": ("@agentclientprotocol/claude-agent-acp", "0.101.0"),
    "codex": ("codex-acp", "0.16.0"),
}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_real_agent_answers_initialize_with_its_pinned_version(
    installed_harnesses: InstalledHarnesses, name: str
) -> None:
    agent, version = EXPECTED[name]
    result = check(name, installed_harnesses.state_dir)
    assert result.ok, result.detail
    assert (result.agent, result.version, result.protocol_version) == (agent, version, 1)
    spec = Catalogue.build({}, installed_harnesses.state_dir).get(name)
    assert spec.version == version
