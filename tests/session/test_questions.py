"""One question after the other: what is shown, what may be answered, and by whom (DESIGN 3.8, cases F)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.errors import RunnerError
from tests.session.asking import asking, check, paused
from tests.session.bed import CALLER, Bed, types
from tests.session.fake_agent import FakeAgent

pytestmark = pytest.mark.virtual_time


async def items(bed: Bed, status: str | None = None) -> list[dict[str, Any]]:
    return list((await bed.sessions.interactions(CALLER, "s", status))["items"])


async def refused(bed: Bed, question: str, **answer: Any) -> RunnerError:
    with pytest.raises(RunnerError) as caught:
        await bed.answer(question, **answer)
    return caught.value


def replies(agent: FakeAgent, request_id: Any) -> list[dict[str, Any]]:
    return [frame for frame in agent.frames if "method" not in frame and frame.get("id") == request_id]


async def test_arguments_that_come_with_the_request_are_shown_case_f5(bed: Bed) -> None:
    """The first call had none: the human sees what is really run, and the approval covers just that."""
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    agent.update(sessionUpdate="tool_call", toolCallId="t", title="run it", kind="execute", rawInput={})
    agent.ask(1, "t", rawInput={"command": "rm -rf build"})
    await handle.result()
    [item] = await items(bed)
    assert item["tool_call"]["raw_input"] == {"command": "rm -rf build"}
    await bed.answer(item["interaction_id"], decision="allow")
    agent.update(sessionUpdate="tool_call_update", toolCallId="t", status="completed")
    agent.answer(frame)
    await check(bed, ["paused", "completed"])
    records = (await bed.sessions.records(CALLER, "s", None, 100))["items"]
    calls = [record["data"] for record in records if record["type"] == "tool_call"]
    assert [(call["status"], call["raw_input"]) for call in calls] == [
        ("deferred", {"command": "rm -rf build"}),
        ("completed", {"command": "rm -rf build"}),
    ]


async def test_an_answer_needs_no_message_case_f3(bed: Bed) -> None:
    """Out of band, on a parked session and on a cold one: both go on, without a word of the user."""
    _, agent, frame, [question] = await paused(bed)
    assert (await bed.answer(question, decision="allow")).status == 200
    agent.say("ok")
    agent.answer(frame)
    await asyncio.sleep(1)
    handle = await bed.dispatch(prompt="again", keep_on_disconnect=True)
    frame = await agent.prompt(2)
    agent.ask(2, "t2")
    await handle.result()
    [question] = (await bed.sessions.view(CALLER, "s"))["open_interactions"]
    agent.exit(1)
    await asyncio.sleep(1)
    answering = asyncio.create_task(bed.answer(question, decision="allow"))
    agent = await bed.agent(2)
    frame = await agent.prompt()
    agent.ask(3, "t3")
    assert (await answering).status == 200
    agent.say("ok")
    agent.answer(frame)
    await check(bed, ["paused", "completed", "paused", "completed"])


async def test_an_answer_on_a_cold_session_that_cannot_go_on_has_a_real_status_case_f3(bed: Bed) -> None:
    _, agent, _, [question] = await paused(bed)
    agent.exit(1)
    await asyncio.sleep(1)
    plane: Any = bed.replica.plane
    plane.down = True
    error = await refused(bed, question, decision="allow")
    assert (error.code, error.status, error.retryable) == ("plane_unavailable", 503, True)
    plane.down = False
    await bed.cancel(wait_seconds=5)


async def test_an_answer_while_the_agent_starts_is_not_lost_case_f14(bed: Bed) -> None:
    """It is kept, and success is only told once the agent has it; meanwhile nobody else can answer."""
    _, agent, _, [question] = await paused(bed)
    agent.exit(1)
    await asyncio.sleep(1)
    bed.provider.start_gate = asyncio.Event()
    began = asyncio.get_running_loop().time()
    first = await bed.answer(question, decision="allow", idempotency_key="k")
    assert (first.status, first.body["status"]) == (202, "answered")
    assert asyncio.get_running_loop().time() - began == pytest.approx(10, abs=0.5)
    assert (await bed.answer(question, decision="allow", idempotency_key="k")).status == 202
    assert (await refused(bed, question, decision="deny")).code == "interaction_conflict"
    assert await bed.state() == "running"
    bed.provider.start_gate.set()
    agent = await bed.agent(2)
    frame = await agent.prompt()
    agent.ask(9, "t9")
    assert (await agent.answered(9))["result"]["outcome"]["optionId"] == "yes"
    agent.say("ok")
    agent.answer(frame)
    await check(bed, ["paused", "completed"])
    assert (await bed.answer(question, decision="allow", idempotency_key="k")).status == 200


@pytest.mark.parametrize("when", ["idle", "running", "paused", "cold"])
async def test_an_unknown_question_changes_nothing_case_f10(bed: Bed, when: str) -> None:
    agent, frame = None, None
    if when == "idle":
        await bed.turn()
    elif when == "running":
        await bed.dispatch(keep_on_disconnect=True)
        agent = await bed.agent()
        frame = await agent.prompt()
    else:
        _, agent, frame, _ = await paused(bed)
    if when == "cold" and agent is not None:
        agent.exit(1)
        await asyncio.sleep(1)
    before = (await bed.sessions.view(CALLER, "s"))["state"], len(await bed.history())
    assert (await refused(bed, "int_nobody", decision="allow")).status == 404
    assert ((await bed.sessions.view(CALLER, "s"))["state"], len(await bed.history())) == before
    if when in ("paused", "cold"):
        stopping = asyncio.create_task(bed.cancel(wait_seconds=20))
        if when == "paused" and agent is not None and frame is not None:
            await agent.heard("session/cancel")
            agent.answer(frame, "cancelled")
        assert (await stopping).body["outcome"] == "stopped"


async def test_an_old_answer_leaves_the_session_that_parked_again_alone_case_f1(bed: Bed) -> None:
    _, agent, frame, [one] = await paused(bed)
    await bed.answer(one, decision="allow")
    agent.ask(7, "t7")
    await asyncio.sleep(1)
    [two] = (await bed.sessions.view(CALLER, "s"))["open_interactions"]
    assert (await refused(bed, one, decision="allow")).code == "interaction_conflict"
    assert (await bed.sessions.view(CALLER, "s"))["open_interactions"] == [two]
    assert len(bed.provider.sandboxes) == 1
    await bed.answer(two, decision="deny")
    agent.answer(frame)
    await check(bed, ["paused", "paused", "completed"])


async def test_two_verdicts_at_once_have_one_winner_case_f12(bed: Bed) -> None:
    _, agent, frame, [question] = await paused(bed)
    calls = [bed.answer(question, decision="allow"), bed.answer(question, decision="deny")]
    both: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
    won, lost = sorted(both, key=lambda reply: isinstance(reply, Exception))
    assert (won.status, won.body["answer"]["decision"]) == (200, "allow")
    assert isinstance(lost, RunnerError)
    assert (lost.code, lost.extra["recorded_decision"]) == ("interaction_conflict", "allow")
    assert len(replies(agent, 0)) == 1
    agent.say("ok")
    agent.answer(frame)
    await check(bed, ["paused", "completed"])


async def test_a_finished_prompt_answers_each_retry_at_once_case_h10(bed: Bed) -> None:
    """A storm of reconnects behind an answered question: the last frame and the result for everybody, and no turn."""
    _, agent, frame, [question] = await paused(bed, prompt_id="one")
    await bed.answer(question, decision="allow")
    agent.say("ok")
    agent.answer(frame)
    await check(bed, ["paused", "completed"])
    turns, began = len(await bed.history()), asyncio.get_running_loop().time()
    handles = await asyncio.gather(*(bed.dispatch(prompt="hello", prompt_id="one") for _ in range(50)))
    results = [await handle.result() for handle in handles]
    assert {(result["outcome"], handle.state) for result, handle in zip(results, handles, strict=True)} == {
        ("completed", "done")
    }
    assert [types(await bed.events(handle))[-1] for handle in handles[:5]] == ["done"] * 5
    assert asyncio.get_running_loop().time() - began < 1
    assert len(await bed.history()) == turns
    await bed.sessions.delete(CALLER, "s")
    assert (await refused(bed, question, decision="allow")).code == "session_ended"
    with pytest.raises(RunnerError) as caught:
        await bed.dispatch(prompt="hello", prompt_id="one")
    assert (caught.value.code, caught.value.status) == ("session_ended", 410)


async def test_an_answer_while_a_first_agent_starts_leaves_the_start_alone_case_l5(bed: Bed) -> None:
    bed.provider.start_gate = asyncio.Event()
    handle = await bed.dispatch(keep_on_disconnect=True)
    assert (await refused(bed, "int_early", decision="allow")).status == 404
    bed.provider.start_gate.set()
    await (await bed.agent()).finish()
    assert (await handle.result())["outcome"] == "completed"


# Case F15: whatever the agent asks is a card that can be answered, or a refusal that it sees.


async def test_a_question_without_options_can_only_be_denied_case_f15(bed: Bed) -> None:
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    agent.ask(1, options=[])
    assert (await handle.result())["outcome"] == "paused"
    [item] = await items(bed, "pending")
    assert item["options"] == []
    for answer in ({"decision": "allow"}, {"option_id": "yes"}):
        assert (await refused(bed, item["interaction_id"], **answer)).code == "invalid_request"
    await bed.answer(item["interaction_id"], decision="deny")
    assert (await agent.answered(1))["error"]["code"] == -32000
    agent.answer(frame)
    await check(bed, ["paused", "completed"])
    assert (await items(bed))[0]["answer"] == {"decision": "deny"}


async def test_option_kinds_that_nobody_knows_case_f15(bed: Bed) -> None:
    """They can be chosen by their id; a decision never picks one of them."""
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    strange = [{"optionId": "later", "name": "Later", "kind": "_vendor/later"}, {"optionId": "bare"}]
    agent.ask(1, options=strange)
    agent.ask(2, "t2", options=strange)
    await handle.result()
    one, two = [item["interaction_id"] for item in await items(bed, "pending")]
    assert (await refused(bed, one, decision="allow")).code == "invalid_request"
    await bed.answer(one, option_id="later")
    assert (await agent.answered(1))["result"]["outcome"]["optionId"] == "later"
    await bed.answer(two, decision="deny")
    assert (await agent.answered(2))["error"]["code"] == -32000
    agent.say("ok")
    agent.answer(frame)
    await check(bed, ["paused", "completed"])


async def test_a_question_of_a_call_that_nobody_told_of_case_f15(bed: Bed) -> None:
    """A sub-agent asks, and nobody listens: the card is there all the same, and the state says what is waited for."""
    _, agent, frame = await asking(bed)
    await asyncio.sleep(5)
    assert await bed.state() == "awaiting_approval"
    [item] = await items(bed, "pending")
    assert item["tool_call"]["tool_call_id"] == "t0"
    assert (await bed.sessions.interactions(CALLER, None, "pending"))["items"] == [item]
    await bed.answer(item["interaction_id"], decision="allow")
    agent.say("ok")
    agent.answer(frame)
    await check(bed, ["paused", "completed"])


@pytest.mark.parametrize(
    "broken", [{"options": "yes"}, {"options": [{"name": "no id"}]}, {"toolCall": None}, {"toolCall": {"title": "x"}}]
)
async def test_a_malformed_question_is_refused_to_the_agent_and_shown_case_f15(
    bed: Bed, broken: dict[str, Any]
) -> None:
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    params = {"sessionId": "agent-session", "toolCall": {"toolCallId": "t"}, "options": [], **broken}
    agent.send({"id": 1, "method": "session/request_permission", "params": params})
    assert (await agent.answered(1))["error"]["code"] == -32602
    agent.say("ok")
    agent.answer(frame)
    assert (await handle.result())["outcome"] == "completed"
    assert await items(bed) == []
    [notice] = [event["data"] for event in await bed.history() if event["type"] == "notice"]
    assert notice["kind"] == "malformed_permission_request"


@pytest.mark.parametrize("default", ["allow", "ask"])
async def test_nothing_is_granted_for_good_unless_a_client_chose_it(bed: Bed, default: str) -> None:
    """A policy and a plain decision take the single use; where there is none a human must choose the option itself."""
    handle = await bed.dispatch(keep_on_disconnect=True, permissions={"default": default})
    agent = await bed.agent()
    frame = await agent.prompt()
    forever = [{"optionId": "always", "kind": "allow_always"}, {"optionId": "no", "kind": "reject_once"}]
    agent.ask(1, options=forever)
    assert (await handle.result())["outcome"] == "paused"
    [question] = (await bed.sessions.view(CALLER, "s"))["open_interactions"]
    assert (await refused(bed, question, decision="allow")).code == "invalid_request"
    await bed.answer(question, option_id="always")
    assert (await agent.answered(1))["result"]["outcome"]["optionId"] == "always"
    agent.say("ok")
    agent.answer(frame)
    await check(bed, ["paused", "completed"])


async def test_the_agents_generation_is_part_of_a_question(bed: Bed) -> None:
    """An agent's request ids begin anew with each process: an answer never meets another one's request."""
    _, agent, _, [one] = await paused(bed)
    first = (await bed.store.interaction("p", one)).request
    agent.exit(1)
    await asyncio.sleep(1)
    await bed.cancel(wait_seconds=5)
    handle = await bed.dispatch(prompt="again", keep_on_disconnect=True)
    agent = await bed.agent(2)
    frame = await agent.prompt()
    agent.ask(0, "t0")
    await handle.result()
    [two] = (await bed.sessions.view(CALLER, "s"))["open_interactions"]
    second = (await bed.store.interaction("p", two)).request
    assert first["binding"] == second["binding"]
    assert first["generation"] != second["generation"]
    assert (await refused(bed, one, decision="allow")).code == "interaction_closed"
    assert replies(agent, 0) == []
    await bed.answer(two, decision="deny")
    agent.answer(frame)
    await check(bed, ["paused", "cancelled", "paused", "completed"])


# PROMPT-ABORT W5, P2, P3.


async def test_the_cancelled_outcome_goes_before_the_cancel_w5(bed: Bed) -> None:
    _, agent, frame = await asking(bed, 2)
    agent.update(sessionUpdate="tool_call", toolCallId="x", title="x", status="in_progress")
    await asyncio.sleep(1)
    assert await bed.state() == "running"
    stopping = asyncio.create_task(bed.cancel(wait_seconds=20))
    await agent.heard("session/cancel")
    order = [f.get("method") or f["id"] for f in agent.frames]
    assert max(order.index(0), order.index(1)) < order.index("session/cancel")
    agent.answer(frame, "cancelled")
    assert (await stopping).body["outcome"] == "stopped"
    await check(bed, ["cancelled"])


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("order", ["answer first", "prompt first"])
async def test_an_answer_and_a_new_prompt_at_once_p3(bed: Bed, order: str, cold: bool) -> None:
    """Exactly one wins, whatever the order, and the other one is told."""
    _, agent, frame, [question] = await paused(bed, prompt_id="one")
    if cold:
        agent.exit(1)
        await asyncio.sleep(1)
    calls = [bed.answer(question, decision="allow"), bed.dispatch(prompt="two", prompt_id="two")]
    running = asyncio.gather(*(calls if order == "answer first" else reversed(calls)), return_exceptions=True)
    await asyncio.sleep(1)
    if cold:
        agent = await bed.agent(2)
        frame = await agent.prompt()
        if "two" not in str(frame):
            agent.ask(9, "t9")
            await asyncio.sleep(1)
        agent.say("ok")
        agent.answer(frame)
    elif replies(agent, 0) and "optionId" in str(replies(agent, 0)):
        agent.say("ok")
        agent.answer(frame)
    else:
        agent.answer(frame, "cancelled")
        await agent.finish(2)
    outcomes: list[Any] = await running
    answer, handle = outcomes if order == "answer first" else list(reversed(outcomes))
    if isinstance(answer, RunnerError):
        assert answer.code in ("interaction_closed", "session_turn_in_use")
        assert handle.refused is None
        assert (await handle.result())["outcome"] == "completed"
    else:
        assert answer.status == 200
        assert handle.refused is not None
        assert handle.refused.code == "session_turn_in_use"
    await check(bed, ["paused", "completed"])
    assert types(await bed.history()).count("interaction_closed") == 1


@pytest.mark.parametrize("how", ["withdrawn", "answered", "stopped"])
async def test_a_card_is_gone_at_once_while_its_turn_goes_on_case_f11(bed: Bed, how: str) -> None:
    """The list of open questions does not wait for the turn's ending."""
    _, agent, frame = await asking(bed)
    agent.update(sessionUpdate="tool_call", toolCallId="other", title="long", status="in_progress")
    await asyncio.sleep(1)
    [item] = await items(bed, "pending")
    if how == "withdrawn":
        agent.send({"method": "$/cancel_request", "params": {"requestId": 0}})
    elif how == "answered":
        await bed.answer(item["interaction_id"], decision="allow")
    else:
        await bed.cancel()
    await asyncio.sleep(0.05)
    assert await bed.state() == ("stopping" if how == "stopped" else "running")
    assert await items(bed, "pending") == []
    assert (await bed.sessions.interactions(CALLER, None, "pending"))["items"] == []
    [closed] = await items(bed)
    assert closed["status"] == ("consumed" if how == "answered" else "cancelled")
    agent.say("ok")
    agent.answer(frame, "cancelled" if how == "stopped" else "end_turn")
    await check(bed, ["cancelled" if how == "stopped" else "completed"])
