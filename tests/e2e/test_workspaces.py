"""What lasts of a session's files: over failed turns, over cells, and where its folder is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.client import Client
from tests.agents import steps
from tests.e2e.conftest import Scripted, Serve
from tests.e2e.talk import Talk

LIMIT = {"limits": {"total_seconds": 2}}


async def seen(client: Client, talk: Talk, path: str) -> str:
    """What a command of the session finds in a file."""
    return str((await client.shell(talk.session, f"cat {path} 2>/dev/null || echo nothing"))["output"]).strip()


@pytest.mark.parametrize("how", ["limit", "error", "exit"])
async def test_a_failed_turn_costs_no_file(scripted: Scripted, client: Client, how: str) -> None:
    """Case C2: what was installed in the workspace, the home and the temporary folder is there in the next turn."""
    talk, script = scripted()
    endings = {"limit": steps.hang(), "error": steps.fail(), "exit": steps.exit_with(7, "no")}
    script.on_prompt(steps.run("echo tool | tee $HOME/tool /tmp/tool > tool"), endings[how])
    script.on_prompt(steps.text("next"), steps.reply())
    result = await talk.prompt("install", **(LIMIT if how == "limit" else {}))
    assert result["outcome"] == "failed", result
    for path in ("tool", "$HOME/tool", "/tmp/tool"):
        assert await seen(client, talk, path) == "tool"


async def test_a_workspace_that_is_gone_is_no_empty_one(serve: Serve, tmp_path: Path) -> None:
    """Case C13: the folder that was promised is not there any more: refused, said, and never made anew."""
    server, checkout, away = serve(), tmp_path / "checkout", tmp_path / "away"
    checkout.mkdir()
    async with server.client() as client:
        talk = Talk(server, client, "s", harness="demo", workspace={"path": str(checkout)})
        assert (await talk.prompt("/write kept.txt durable"))["ok"]
        await client.kill("s")
        checkout.rename(away)
        error = await talk.refused("hello")
        assert (error.code, error.problem["field"]) == ("invalid_request", "workspace.path")
        assert str(checkout) in str(error)
        assert not checkout.exists()
        away.rename(checkout)
        assert "durable" in (await talk.prompt("/read kept.txt"))["text"]
        await talk.check()
