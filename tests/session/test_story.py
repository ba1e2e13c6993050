"""The story of a session: every machine tells its moves, a client reads them, a turn can be stepped again."""

from __future__ import annotations

import json

import pytest

from runner.errors import RunnerError
from runner.rules.story import replay
from tests.session.asking import paused
from tests.session.bed import CALLER, Bed

pytestmark = pytest.mark.virtual_time


async def test_every_machine_tells_its_moves(bed: Bed) -> None:
    _, agent, frame, (question,) = await paused(bed)
    await bed.answer(question, decision="allow")
    stopping = await bed.cancel()
    assert stopping.status == 202
    await agent.heard("session/cancel")
    agent.answer(frame, "cancelled")
    assert (await bed.cancel(wait_seconds=5)).body["state"] == "idle"
    items = (await bed.sessions.story(CALLER, "s"))["items"]
    assert {item["machine"] for item in items} == {"turn", "pool", "lease", "command", "interaction"}
    assert replay(items) == []
    turns = [(item["event"]["name"], item["after"]["phase"]) for item in items if item["machine"] == "turn"]
    assert turns[:4] == [("Begin", "preparing"), ("Prepared", "prompting"), ("Quiet", "ended"), ("Begin", "preparing")]
    asked = [(item["id"], item["after"]["state"]) for item in items if item["machine"] == "interaction"]
    assert asked == [(question, "pending"), (question, "answered"), (question, "consumed")]
    assert [item["at"] for item in items] == sorted(item["at"] for item in items)
    assert all(item["at"].endswith("Z") for item in items)


async def test_no_text_of_a_prompt_or_a_secret_is_told(bed: Bed) -> None:
    handle = await bed.dispatch(prompt="my diary", secrets={"KEY": "sk-secret"}, keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    agent.error(frame["id"], -32603, "sk-secret is not valid")
    assert (await handle.result())["outcome"] == "failed"
    told = json.dumps(await bed.sessions.story(CALLER, "s"))
    assert "harness_protocol_error" in told
    assert "diary" not in told
    assert "sk-secret" not in told


async def test_an_ended_session_has_no_story(bed: Bed) -> None:
    await bed.turn()
    await bed.sessions.delete(CALLER, "s")
    assert bed.replica.services.stories.sessions() == []
    with pytest.raises(RunnerError) as refused:
        await bed.sessions.story(CALLER, "s")
    assert refused.value.code == "session_ended"
