"""Codex and Claude Code with a token instead of their key: whatever variable it is in, at every level of isolation."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.e2e.searching import places_of
from tests.e2e.server import Server
from tests.e2e.talk import Talk
from tests.harness_fixture import InstalledHarnesses
from tests.model_server import ModelServer

KEY = "sk-ant-oat01-key-of-the-real-test-3f9a"
CONFIG = '[credentials]\nhosts = ["127.0.0.1"]\n[secrets]\nSHARED = "{key}"\n'


@pytest.fixture
async def model() -> AsyncIterator[ModelServer]:
    async with ModelServer() as model:
        yield model


@pytest.mark.parametrize(
    ("name", "variable", "level"),
    [
        ("claude", "ANTHROPIC_API_KEY", "cell"),
        ("claude", "ANTHROPIC_AUTH_TOKEN", "landlock"),
        ("claude", "CLAUDE_CODE_OAUTH_TOKEN", "none"),
        ("codex", "OPENAI_API_KEY", "cell"),
        ("codex", "OPENAI_API_KEY", "landlock"),
        ("codex", "OPENAI_API_KEY", "none"),
    ],
)
async def test_the_key_of_a_real_agent_is_nowhere_in_its_cell_case_k1(
    tmp_path: Path,
    installed_harnesses: InstalledHarnesses,
    model: ModelServer,
    name: str,
    variable: str,
    level: str,
) -> None:
    """The operator's key, by reference; the agent, its tool and all they wrote are searched while they live."""
    server = Server(tmp_path / "own", CONFIG.format(key=KEY), env={"ACP_RUNNER_LOCAL__ISOLATION": level})
    installed_harnesses.link_into(server.state_dir)
    server.start()
    base = {"ANTHROPIC_BASE_URL": model.url} if name == "claude" else {"OPENAI_BASE_URL": model.openai_url}
    env = base | ({} if name == "claude" else {"CODEX_MODEL": "gpt-5.4"})
    try:
        async with server.client() as client:
            secrets = {variable: {"ref": "SHARED"}}
            allowed = {"permissions": {"default": "allow"}}
            talk = Talk(server, client, "s", harness=name, env=env, secrets=secrets, **allowed)
            result = await talk.prompt(
                "[[shell:env > seen.txt; cat /proc/*/environ /proc/*/cmdline >> seen.txt; true]]"
            )
            assert result["outcome"] == "completed", result
            assert {request.api_key for request in model.requests} == {KEY}
            view = await talk.view()
            assert (view["isolation"], view["proxied_keys"]) == (level, [variable])
            if level != "none":
                assert KEY.encode() not in (server.workspace("s") / "seen.txt").read_bytes()
            (server.workspace("s") / "seen.txt").unlink()
            assert places_of(server, "s", KEY) == []
            assert KEY not in json.dumps(await talk.records())
            await talk.check()
    finally:
        server.stop()
    assert KEY not in server.log.read_text()
