"""A question pauses the turn; its answer, a Stop or a new prompt goes on from there (DESIGN 3.2 Paused, 3.8)."""

from __future__ import annotations

import asyncio

import pytest

from runner.errors import RunnerError
from tests.session.bed import CALLER, Bed, types

pytestmark = pytest.mark.virtual_time


async def paused(bed: Bed, *, questions: int = 1):
    """A paused turn: its handle, its agent, the open prompt's frame, the question's ids."""
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    for n in range(questions):
        agent.ask(n, f"t{n}")
    result = await handle.result()
    assert (result["ok"], result["outcome"], result["stop_reason"]) == (True, "paused", "paused")
    listed = (await bed.sessions.interactions(CALLER, "s", "pending"))["items"]
    return handle, agent, frame, [item["interaction_id"] for item in listed]


async def resumed_events(bed: Bed) -> list[dict]:
    """Events of the newest epoch."""
    events = await bed.history()
    epochs = [event["cursor"].split(".")[0] for event in events]
    return [event for event, epoch in zip(events, epochs, strict=True) if epoch == epochs[-1]]


async def test_an_answer_resumes_the_same_agent(bed: Bed) -> None:
    handle, agent, frame, [question] = await paused(bed)
    assert await bed.state() == "awaiting_approval"
    view = await bed.sessions.view(CALLER, "s")
    assert view["open_interactions"] == [question]
    assert view["pool"]["state"] == "awaiting_approval"
    events = await bed.events(handle)
    assert types(events)[-3:] == ["interaction_requested", "tool_call_update", "done"]
    assert events[-1]["data"] == {"turn_id": handle.turn_id, "outcome": "paused", "stop_reason": "paused"}
    reply = await bed.answer(question, decision="allow")
    assert (reply.status, reply.body["status"]) == (200, "consumed")
    assert (await agent.answered(0))["result"] == {"outcome": {"outcome": "selected", "optionId": "yes"}}
    again = await bed.dispatch(prompt="hello", prompt_id=handle.prompt_id)
    agent.update(sessionUpdate="tool_call_update", toolCallId="t0", status="completed")
    agent.say("ran it")
    agent.answer(frame)
    result = await again.result()
    assert (result["outcome"], result["start"], result["text"]) == ("completed", "hit", "ran it")
    assert result["turn_id"] != handle.turn_id
    events = await resumed_events(bed)
    assert events[0]["type"] == "turn_admitted"
    assert events[0]["data"]["resumes"] == handle.turn_id
    assert types(events).count("prompt_ended") == 1
    assert types(await bed.history()).count("session_busy") == 1
    assert types(await bed.history()).count("session_idle") == 1
    assert (await bed.turn(nth=2))["start"] == "hit"


@pytest.mark.parametrize("how", [{"decision": "deny"}, {"option_id": "no"}])
async def test_deny_is_a_reject_option_never_cancelled_case_f7(bed: Bed, how: dict) -> None:
    _handle, agent, frame, [question] = await paused(bed)
    await bed.answer(question, **how)
    assert (await agent.answered(0))["result"]["outcome"] == {"outcome": "selected", "optionId": "no"}
    agent.answer(frame)
    await asyncio.sleep(1)
    row = (await bed.store.turn("p", "s", (await bed.sessions.view(CALLER, "s"))["last_turn"]["turn_id"])).result
    assert row["outcome"] == "completed", "an end_turn without output after a denial is a completed turn"


async def test_an_answer_before_the_pause_goes_straight_through(bed: Bed) -> None:
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    agent.update(sessionUpdate="tool_call", toolCallId="other", title="build", status="in_progress")
    agent.ask("uuid-1", "t1")
    await asyncio.sleep(5)
    assert await bed.state() == "running", "another tool call still runs"
    [question] = (await bed.sessions.view(CALLER, "s"))["open_interactions"]
    reply = await bed.answer(question, option_id="always")
    assert reply.status == 200
    assert (await agent.answered("uuid-1"))["result"]["outcome"]["optionId"] == "always"
    agent.say("ok")
    agent.answer(frame)
    assert (await handle.result())["outcome"] == "completed"


async def test_parallel_tool_calls_are_deferred_case_a18(bed: Bed) -> None:
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    await agent.prompt()
    agent.update(sessionUpdate="tool_call", toolCallId="a", title="one", status="pending")
    agent.update(sessionUpdate="tool_call", toolCallId="b", title="two", status="pending")
    agent.ask(1, "b")
    await handle.result()
    records = (await bed.sessions.records(CALLER, "s", None, 100))["items"]
    tools = {r["data"]["tool_call_id"]: r["data"]["status"] for r in records if r["type"] == "tool_call"}
    assert tools == {"a": "deferred", "b": "deferred"}


async def test_stop_while_paused_is_a_turn_that_resumes_and_ends_cancelled(bed: Bed) -> None:
    handle, agent, frame, [question] = await paused(bed)
    reply = await bed.cancel(expected_execution_id=handle.turn_id)
    assert (reply.status, reply.body["state"]) == (202, "stopping")
    assert (await agent.answered(0))["result"] == {"outcome": {"outcome": "cancelled"}}
    await agent.heard("session/cancel")
    agent.answer(frame, "cancelled")
    done = await bed.cancel(wait_seconds=5)
    assert done.body["outcome"] == "stopped"
    ends = [event["data"]["outcome"] for event in await bed.history() if event["type"] == "done"]
    assert ends == ["paused", "cancelled"]
    ended = [event["data"] for event in await bed.history() if event["type"] == "prompt_ended"]
    assert ended == [{"prompt_id": handle.prompt_id, "state": "aborted"}]
    with pytest.raises(RunnerError) as caught:
        await bed.answer(question, decision="allow")
    assert caught.value.code == "interaction_closed"
    assert (await bed.turn(nth=2))["start"] == "hit"


async def test_a_new_prompt_withdraws_the_question_case_a19(bed: Bed) -> None:
    handle, agent, frame, [_question] = await paused(bed)
    second = await bed.dispatch(prompt="never mind", keep_on_disconnect=True)
    assert second.refused is None
    await agent.heard("session/cancel")
    order = [f.get("method") or f["result"]["outcome"]["outcome"] for f in agent.frames[3:]]
    assert order == ["cancelled", "session/cancel"]
    agent.ask(5, "t9")
    assert (await agent.answered(5))["result"]["outcome"]["outcome"] == "cancelled"
    assert len(agent.all("session/prompt")) == 1, "nothing is sent before the old prompt settled"
    agent.say("old words")
    agent.answer(frame, "cancelled")
    frame2 = await agent.prompt(2)
    agent.say("new words")
    agent.answer(frame2)
    result = await second.result()
    assert (result["outcome"], result["text"], result["start"]) == ("completed", "new words", "hit")
    ended = [event["data"] for event in await bed.history() if event["type"] == "prompt_ended"]
    assert ended == [
        {"prompt_id": handle.prompt_id, "state": "aborted"},
        {"prompt_id": second.prompt_id, "state": "done"},
    ]
    assert types(await bed.history()).count("session_idle") == 1
    rows = (await bed.sessions.interactions(CALLER, "s", None))["items"]
    assert [row["status"] for row in rows] == ["cancelled"]


async def test_a_new_prompt_on_a_paused_agent_that_never_settles(bed: Bed) -> None:
    await paused(bed)
    second = await bed.dispatch(prompt="never mind", keep_on_disconnect=True)
    agent2 = await bed.agent(2)
    frame = await agent2.prompt()
    agent2.say("fresh")
    agent2.answer(frame)
    result = await second.result()
    assert (result["start"], result["reason"], result["context_lost"]) == ("cold", "not_settled", True)


async def test_a_permission_that_arrives_while_paused_joins(bed: Bed) -> None:
    _, agent, frame, [first] = await paused(bed)
    agent.ask(1, "t1")
    await asyncio.sleep(0.1)
    open_now = (await bed.sessions.view(CALLER, "s"))["open_interactions"]
    assert len(open_now) == 2
    second = next(i for i in open_now if i != first)
    await bed.answer(second, decision="deny")
    assert (await agent.answered(1))["result"]["outcome"]["optionId"] == "no"
    await asyncio.sleep(1)
    assert await bed.state() == "awaiting_approval", "the first question carries over"
    await bed.answer(first, decision="allow")
    agent.say("ok")
    agent.answer(frame)
    await asyncio.sleep(1)
    assert await bed.state() == "idle"


async def test_several_at_once_are_answered_in_any_order_case_f8(bed: Bed) -> None:
    _, agent, frame, questions = await paused(bed, questions=2)
    await asyncio.gather(bed.answer(questions[1], decision="deny"), bed.answer(questions[0], decision="allow"))
    assert (await agent.answered(0))["result"]["outcome"]["optionId"] == "yes"
    assert (await agent.answered(1))["result"]["outcome"]["optionId"] == "no"
    agent.say("ok")
    agent.answer(frame)
    await asyncio.sleep(1)
    assert await bed.state() == "idle"


async def test_answers_are_claimed_once_case_f1(bed: Bed) -> None:
    _, agent, frame, [question] = await paused(bed)
    with pytest.raises(RunnerError) as caught:
        await bed.answer("int_unknown", decision="allow")
    assert caught.value.code == "not_found"
    with pytest.raises(RunnerError) as caught:
        await bed.answer(question, option_id="nonsense")
    assert caught.value.code == "invalid_request"
    one = await bed.answer(question, decision="allow", idempotency_key="k")
    two = await bed.answer(question, decision="allow", idempotency_key="k")
    assert (one.status, two.status) == (200, 200)
    with pytest.raises(RunnerError) as caught:
        await bed.answer(question, decision="deny")
    assert (caught.value.code, caught.value.extra["recorded_decision"]) == ("interaction_conflict", "allow")
    agent.say("ok")
    agent.answer(frame)
    await asyncio.sleep(1)
    assert await bed.state() == "idle"


async def test_the_agent_goes_on_by_itself_while_paused(bed: Bed) -> None:
    _, agent, frame, _ = await paused(bed)
    agent.say("changed my mind")
    agent.answer(frame)
    await asyncio.sleep(1)
    assert await bed.state() == "idle"
    done = [event["data"]["outcome"] for event in await bed.history() if event["type"] == "done"]
    assert done == ["paused", "completed"]
    rows = (await bed.sessions.interactions(CALLER, "s", None))["items"]
    assert [row["status"] for row in rows] == ["cancelled"]


async def test_policies_answer_without_a_human(bed: Bed) -> None:
    handle = await bed.dispatch(
        keep_on_disconnect=True,
        permissions={"default": "deny", "rules": [{"tool": "execute", "match": "rm *", "decision": "allow"}]},
    )
    agent = await bed.agent()
    frame = await agent.prompt()
    agent.ask(1, "t1")
    assert (await agent.answered(1))["result"]["outcome"]["optionId"] == "yes"
    agent.ask(2, "t2", [{"optionId": "x", "kind": "allow_once", "name": "n"}])
    assert (await agent.answered(2))["result"]["outcome"]["optionId"] == "x"
    agent.say("ok")
    agent.answer(frame)
    assert (await handle.result())["outcome"] == "completed"


async def test_an_approved_call_counts_as_output_even_when_the_agent_says_no_more(bed: Bed) -> None:
    _, agent, frame, [question] = await paused(bed)
    await bed.answer(question, decision="allow")
    agent.answer(frame)
    await asyncio.sleep(1)
    done = [event["data"]["outcome"] for event in await bed.history() if event["type"] == "done"]
    assert done == ["paused", "completed"]


async def test_kill_while_paused(bed: Bed) -> None:
    await paused(bed)
    reply = await bed.sessions.kill(CALLER, "s")
    assert reply.body["outcome"] == "stopped"
    assert bed.provider.alive == set()
    assert await bed.state() == "idle"
    assert (await bed.turn(agents=2))["ok"] is True


async def test_last_words_of_a_withdrawn_prompt_are_no_part_of_what_the_new_one_is_told(bed: Bed) -> None:
    """Both are messages of one turn; a client puts together by its id what belongs together."""
    _, agent, frame, _ = await paused(bed)
    handle = await bed.dispatch(prompt="two", keep_on_disconnect=True)
    await agent.heard("session/cancel")
    agent.say("late")
    agent.answer(frame, "cancelled")
    frame = await agent.prompt(2)
    agent.say("fresh")
    agent.answer(frame)
    assert (await handle.result())["text"] == "fresh"
    said = {
        event["data"]["text"]: event["data"]["message_id"]
        for event in await resumed_events(bed)
        if event["type"] == "message"
    }
    assert said.keys() == {"late", "fresh"} and said["late"] != said["fresh"]
