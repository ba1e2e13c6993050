"""Codex and Claude Code: prompts of one session that wait, and are aborted, while the model holds an answer open."""

from __future__ import annotations

import json

from runner.client import Client
from tests.e2e.server import SECONDS, until
from tests.e2e.talk import Talk
from tests.e2e.test_real_agents import model, name, opens, server, talk, warm  # noqa: F401
from tests.model_server import HELD_TEXT, ModelServer

SECRET = "the words of B"


async def story(talk: Talk, client: Client, model: ModelServer, number: int, hold: str) -> None:  # noqa: F811
    """A is held by the model, B waits, C waits or arrives; B and A are aborted: C streams, by the same agent."""
    a, b, c = (f"{letter}{number}" for letter in "ABC")
    seen = len(model.held)
    first = talk.dispatch(f"{a} [[{hold}]]", prompt_id=a, on_busy="queue")
    await model.wait_held(seen + 1)
    if hold == "hold":
        await first.text(HELD_TEXT)
    second = talk.dispatch(f"{SECRET} {b} [[text:never]]", prompt_id=b, on_busy="queue")
    await second.event("turn_queued")
    third = talk.dispatch(f"{c} [[stream:50]]", prompt_id=c, on_busy="queue")
    if hold == "hold":
        await third.event("turn_queued")
    aborted = [await client.abort_prompt(talk.session, prompt) for prompt in (b, a, b, a)]
    assert aborted == [True, True, False, False]
    stopped, streamed = await first.result(), await third.result()
    assert (stopped["outcome"], stopped["cancel_settled"]) == ("cancelled", True), stopped
    assert (await second.result())["outcome"] == "cancelled"
    assert (streamed["outcome"], streamed["prompt_ids"], streamed["start"]) == ("completed", [c], "hit"), streamed
    assert "".join(f"{n} " for n in range(50)).strip() in streamed["text"]
    assert streamed["text"] == third.streamed
    assert len(third.of("message_delta")) > 1, "it streams"
    assert HELD_TEXT not in streamed["text"], "what is left of A's answer is not C's"
    assert [await client.abort_prompt(talk.session, prompt) for prompt in (a, b, c)] == [False] * 3


async def test_what_was_aborted_in_the_queue_reaches_no_model(
    talk: Talk,  # noqa: F811
    client: Client,
    model: ModelServer,  # noqa: F811
) -> None:
    agent = await warm(talk)
    for number, hold in enumerate(("hold", "hold0", "hold")):
        await story(talk, client, model, number, hold)
    await talk.prompt("[[text:last]]")
    assert await talk.agent_pid() == agent
    asked = [json.dumps(request.body) for request in model.requests]
    assert not [body for body in asked if SECRET in body], "no request of the model has a word of B"
    assert all(f"C{number} [[stream" in asked[-1] for number in range(3)), "the agent remembers each C"
    records = await talk.records()
    told = [record["data"] for record in records if record["type"] == "prompt_ended"]
    states = {data["prompt_id"]: data["state"] for data in told}
    assert len(states) == len(told)
    wanted = {"A": "aborted", "B": "cancelled", "C": "done"}
    for number in range(3):
        assert {letter: states[f"{letter}{number}"] for letter in "ABC"} == wanted
    beats = [record["type"] for record in records if record["type"] in ("session_busy", "session_idle")]
    assert beats == ["session_busy", "session_idle"] * (len(beats) // 2)
    model.release()
    await until(lambda: not model.held, "no model call is open", SECONDS)
