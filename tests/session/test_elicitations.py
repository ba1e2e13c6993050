"""An agent that asks with a form or a URL: a durable question like any other (DESIGN 3.8)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.errors import RunnerError
from tests.session.asking import check
from tests.session.bed import CALLER, Bed, types
from tests.session.fake_agent import FORM, FakeAgent
from tests.session.gates import SlowStore

pytestmark = pytest.mark.virtual_time

URL = {"mode": "url", "url": "https://example.test/login", "elicitationId": "e1", "requestedSchema": None}


async def asked(bed: Bed, **members: Any) -> tuple[FakeAgent, dict[str, Any], str]:
    """A turn that paused for an elicitation: its agent, the open prompt, the question."""
    handle = await bed.dispatch(prompt_id="one", keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    agent.elicit("e", **members)
    assert (await handle.result())["outcome"] == "paused"
    [question] = (await bed.sessions.view(CALLER, "s"))["open_interactions"]
    return agent, frame, question


async def finish(bed: Bed, agent: FakeAgent, frame: dict[str, Any]) -> None:
    agent.say("thanks")
    agent.answer(frame)
    await check(bed, ["paused", "completed"])


async def shown(bed: Bed, question: str) -> dict[str, Any]:
    items = (await bed.sessions.interactions(CALLER, "s", None))["items"]
    return next(item for item in items if item["interaction_id"] == question)


async def test_a_form_is_shown_and_filled_in(bed: Bed) -> None:
    agent, frame, question = await asked(bed)
    view = await shown(bed, question)
    assert (view["kind"], view["status"], view["tool_call"], view["options"]) == ("elicitation", "pending", None, [])
    assert (view["mode"], view["message"], view["schema"]) == ("form", "Which name?", FORM)
    reply = await bed.answer(question, action="accept", content={"name": "x", "count": 2})
    assert (reply.status, reply.body["status"]) == (200, "consumed")
    assert (await agent.answered("e"))["result"] == {"action": "accept", "content": {"name": "x", "count": 2}}
    await finish(bed, agent, frame)
    assert (await shown(bed, question))["answer"] == {"action": "accept", "content": {"name": "x", "count": 2}}
    closed = [event["data"] for event in await bed.history() if event["type"] == "interaction_closed"]
    assert closed == [{"interaction_id": question, "status": "consumed", "decision": "accept"}]


@pytest.mark.parametrize("action", ["decline", "cancel"])
async def test_a_form_that_nobody_fills_in(bed: Bed, action: str) -> None:
    agent, frame, question = await asked(bed)
    assert (await bed.answer(question, action=action)).status == 200
    assert (await agent.answered("e"))["result"] == {"action": action}
    await finish(bed, agent, frame)


@pytest.mark.parametrize(
    ("answer", "field"),
    [
        ({"action": "accept"}, "content.name"),
        ({"action": "accept", "content": {"name": "too long"}}, "content.name"),
        ({"action": "accept", "content": {"name": "x", "count": 1.5}}, "content.count"),
        ({"action": "accept", "content": {"name": "x", "other": 1}}, "content.other"),
        ({"decision": "allow"}, "action"),
        ({"option_id": "yes"}, "action"),
    ],
)
async def test_an_answer_that_does_not_fit_changes_nothing(bed: Bed, answer: dict[str, Any], field: str) -> None:
    agent, frame, question = await asked(bed)
    with pytest.raises(RunnerError) as caught:
        await bed.answer(question, **answer)
    assert (caught.value.code, caught.value.extra["field"]) == ("invalid_request", field)
    assert (await shown(bed, question))["status"] == "pending"
    await bed.answer(question, action="decline")
    await finish(bed, agent, frame)


async def test_a_permission_takes_no_action(bed: Bed) -> None:
    handle = await bed.dispatch(prompt_id="one", keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    agent.ask(1)
    await handle.result()
    [question] = (await bed.sessions.view(CALLER, "s"))["open_interactions"]
    with pytest.raises(RunnerError) as caught:
        await bed.answer(question, action="accept")
    assert (caught.value.code, caught.value.extra["field"]) == ("invalid_request", "action")
    await bed.answer(question, decision="deny")
    await finish(bed, agent, frame)


async def test_a_url_is_shown_and_takes_no_content(bed: Bed) -> None:
    agent, frame, question = await asked(bed, **URL)
    view = await shown(bed, question)
    assert (view["mode"], view["url"], "schema" in view) == ("url", "https://example.test/login", False)
    with pytest.raises(RunnerError):
        await bed.answer(question, action="accept", content={"name": "x"})
    assert (await bed.answer(question, action="accept")).status == 200
    assert (await agent.answered("e"))["result"] == {"action": "accept"}
    agent.send({"method": "elicitation/complete", "params": {"elicitationId": "e1"}})
    await finish(bed, agent, frame)
    notices = [event["data"] for event in await bed.history() if event["type"] == "notice"]
    assert notices == [{"kind": "elicitation_complete", "id": "e1"}]


async def test_a_url_that_is_done_leaves_no_card(bed: Bed) -> None:
    agent, frame, question = await asked(bed, **URL)
    agent.send({"method": "elicitation/complete", "params": {"elicitationId": "e1"}})
    assert (await agent.answered("e"))["result"] == {"action": "accept"}
    await finish(bed, agent, frame)
    assert (await shown(bed, question))["status"] == "consumed"


async def test_a_url_that_is_done_while_its_turn_runs(bed: Bed) -> None:
    handle = await bed.dispatch(prompt_id="one", keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    agent.update(sessionUpdate="tool_call", toolCallId="t", title="login", status="in_progress")
    agent.elicit("e", **URL)
    await asyncio.sleep(1)
    assert await bed.state() == "running", "another call still runs"
    agent.send({"method": "elicitation/complete", "params": {"elicitationId": "e1"}})
    assert (await agent.answered("e"))["result"] == {"action": "accept"}
    agent.say("ok")
    agent.answer(frame)
    assert (await handle.result())["outcome"] == "completed"
    await check(bed, ["completed"])


@pytest.mark.parametrize("default", ["deny", "allow", "allow_reads", "ask"])
async def test_a_policy_fills_in_no_form(bed: Bed, default: str) -> None:
    handle = await bed.dispatch(prompt_id="one", keep_on_disconnect=True, permissions={"default": default})
    agent = await bed.agent()
    frame = await agent.prompt()
    agent.elicit("e")
    if default == "deny":
        assert (await agent.answered("e"))["result"] == {"action": "decline"}
        agent.answer(frame)
        assert (await handle.result())["outcome"] == "completed"
        assert "interaction_requested" not in types(await bed.history())
        return
    assert (await handle.result())["outcome"] == "paused"
    await bed.cancel()
    agent.answer(frame, "cancelled")
    await check(bed, ["paused", "cancelled"])


@pytest.mark.parametrize("when", ["running", "paused"])
async def test_a_stop_cancels_it(bed: Bed, when: str) -> None:
    """DESIGN 3.3.2: elicitations with action ``cancel``, before the cancel itself."""
    handle = await bed.dispatch(prompt_id="one", keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    if when == "running":
        agent.update(sessionUpdate="tool_call", toolCallId="t", title="x", status="in_progress")
    agent.elicit("e")
    await asyncio.sleep(1)
    assert (await bed.state()) == ("running" if when == "running" else "awaiting_approval")
    stopping = asyncio.create_task(bed.cancel(wait_seconds=20))
    await agent.heard("session/cancel")
    assert (await agent.answered("e"))["result"] == {"action": "cancel"}
    agent.elicit("late")
    assert (await agent.answered("late"))["result"] == {"action": "cancel"}
    order = [f.get("method") or f["id"] for f in agent.frames]
    assert order.index("e") < order.index("session/cancel")
    agent.answer(frame, "cancelled")
    assert (await stopping).body["outcome"] == "stopped"
    assert handle.prompt_id
    await check(bed, ["cancelled"] if when == "running" else ["paused", "cancelled"])


async def test_it_names_the_tool_call_that_it_belongs_to(bed: Bed) -> None:
    handle = await bed.dispatch(prompt_id="one", keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    agent.update(sessionUpdate="tool_call", toolCallId="t", title="login", status="in_progress")
    agent.elicit("e", toolCallId="t")
    assert (await handle.result())["outcome"] == "paused", "the call waits for its own question"
    [question] = (await bed.sessions.view(CALLER, "s"))["open_interactions"]
    assert (await shown(bed, question))["tool_call"]["title"] == "login"
    await bed.answer(question, action="decline")
    agent.update(sessionUpdate="tool_call_update", toolCallId="t", status="completed")
    await finish(bed, agent, frame)


@pytest.mark.parametrize("same", [True, False])
async def test_a_form_survives_its_agent(bed: Bed, same: bool) -> None:
    agent, _, question = await asked(bed)
    agent.exit(3)
    await asyncio.sleep(0.1)
    answering = asyncio.create_task(bed.answer(question, action="accept", content={"name": "x"}))
    agent = await bed.agent(2)
    frame = await agent.prompt()
    agent.elicit("again", **({} if same else {"message": "Which other name?"}))
    if same:
        assert (await agent.answered("again"))["result"] == {"action": "accept", "content": {"name": "x"}}
        assert (await answering).status == 200
        await finish(bed, agent, frame)
        return
    await asyncio.sleep(1)
    [fresh] = (await bed.sessions.view(CALLER, "s"))["open_interactions"]
    assert fresh != question
    await asyncio.gather(answering, return_exceptions=True)
    await bed.answer(fresh, action="decline")
    agent.say("ok")
    agent.answer(frame)
    await check(bed, ["paused", "paused", "completed"])
    assert (await shown(bed, question))["status"] == "expired"


async def test_secrets_are_masked_in_what_is_kept_of_an_answer(bed: Bed) -> None:
    handle = await bed.dispatch(prompt_id="one", keep_on_disconnect=True, secrets={"KEY": "hunter2-secret"})
    agent = await bed.agent()
    frame = await agent.prompt()
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    agent.elicit("e", message="Is it hunter2-secret?", requestedSchema=schema)
    await handle.result()
    [question] = (await bed.sessions.view(CALLER, "s"))["open_interactions"]
    await bed.answer(question, action="accept", content={"name": "hunter2-secret"})
    assert (await agent.answered("e"))["result"]["content"] == {"name": "hunter2-secret"}
    await finish(bed, agent, frame)
    store: SlowStore = bed.store
    rows = await store.interactions("p", "s")
    records = await store.records("p", "s", None, 1000)
    assert "hunter2-secret" not in repr([(row.request, row.answer) for row in rows])
    assert "hunter2-secret" not in repr([row.data for row in records])
