"""Export, fork and usage over HTTP with real processes."""

from __future__ import annotations

from typing import Any

import pytest

from runner.client import ApiError, Client
from tests.agents import AgentScript, directive, steps
from tests.e2e.conftest import Scripted, Serve, scripted_talk
from tests.e2e.talk import Line, Talk


def texts(script: AgentScript) -> list[str]:
    """The blocks of the last prompt frame that the agents received."""
    return [block["text"] for block in script.log.frames("session/prompt")[-1]["params"]["prompt"]]


async def exported(client: Client, session: str) -> list[Line]:
    return [line async for line in client.export(session)]


async def first_turn(talk: Talk, script: AgentScript, text: str = "the first answer") -> str:
    """A turn; the session's newest cursor behind it."""
    script.on_prompt(steps.text(text), steps.reply())
    assert (await talk.prompt("the first question"))["ok"]
    return str((await talk.records())[-1]["cursor"])


async def test_an_export_is_everything_that_is_durable(scripted: Scripted, client: Client) -> None:
    talk, script = scripted()
    await first_turn(talk, script)
    first, *lines, end = await exported(client, talk.session)
    assert (first["kind"], first["session"]["session_id"]) == ("session", talk.session)
    assert [{**item, "kind": "record"} for item in await talk.records()] == lines
    assert (end["kind"], end["records"], end["complete"]) == ("end", len(lines), True)


async def test_a_fork_goes_on_in_a_copy_of_the_workspace(scripted: Scripted, client: Client) -> None:
    talk, script = scripted()
    head = await first_turn(talk, script)
    workspace = talk.server.workspace(talk.session)
    (workspace / "src").mkdir()
    (workspace / "src" / "made.py").write_text("made")
    made = await client.fork(talk.session, head, session_id=f"{talk.session}-fork")
    assert (made["workspace"], made["complete"]) == ("copied", True)
    fork = Talk(talk.server, client, made["session_id"])
    assert (talk.server.workspace(fork.session) / "src" / "made.py").read_text() == "made"
    script.on_prompt(steps.text("I know"), steps.reply())
    result = await fork.prompt("what was it?")
    assert (result["ok"], result["start"], result["context_lost"]) == (True, "cold", True)
    told, prompt = texts(script)
    assert "the first answer" in told
    assert prompt == "what was it?"
    (talk.server.workspace(fork.session) / "src" / "made.py").write_text("changed")
    assert (workspace / "src" / "made.py").read_text() == "made"
    await fork.check()
    assert (await client.delete(fork.session))["state"] == "ended"
    assert not talk.server.workspace(fork.session).exists()
    assert (await exported(client, talk.session))[-1]["complete"]
    with pytest.raises(ApiError) as caught:
        await exported(client, fork.session)
    assert (caught.value.status, caught.value.code) == (410, "session_ended")


async def test_usage_and_forks_outlive_a_kill(serve: Serve, tmp_path: Any) -> None:
    server = serve()
    script = AgentScript(tmp_path, "s")
    async with server.client() as client:
        talk = scripted_talk(server, client, "s", script)
        result = await talk.prompt(spends(5, 0.5))
        assert result["usage"]["cost"] == {"USD": 0.5}
        assert 0 < result["usage"]["turn_seconds"] < 40
        head = (await talk.records())[-1]["cursor"]
        fork = (await client.fork("s", head))["session_id"]
        before = await exported(client, fork)
    server.kill()
    server.start()
    async with server.client() as client:
        talk = scripted_talk(server, client, "s", script)
        assert (await exported(client, fork))[1:] == before[1:]
        await talk.prompt(spends(6, 0.2))
        usage = (await talk.view())["usage"]
        assert (usage["turns"], usage["cost"], usage["context"]) == (2, {"USD": 0.7}, {"used": 6, "size": 9})
        assert usage["sandbox_seconds"] > 0


def spends(used: int, dollars: float) -> str:
    """A prompt whose agent tells what its session has cost."""
    cost = {"amount": dollars, "currency": "USD"}
    return directive(steps.text("ok"), steps.update("usage_update", used=used, size=9, cost=cost), steps.reply())
