"""A paused chain without its agent: the questions stay open, and an answer goes on with a new one (DESIGN 3.2, 3.8)."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.interactions import desk
from runner.rules import interaction
from runner.session.chain import CONTINUE
from tests.session.asking import check, paused
from tests.session.bed import CALLER, Bed, types
from tests.session.fake_agent import OPTIONS, FakeAgent
from tests.session.gates import Gate, SlowStore
from tests.session.reading import assert_ordered, conversation, lease
from tests.session.test_restart import crash

pytestmark = pytest.mark.virtual_time

WEEK = 7 * 86_400


async def lose(bed: Bed, agent: FakeAgent, how: str) -> Bed:
    """Take the seat of a paused chain away; the replica that goes on."""
    if how == "exit":
        agent.exit(3)
        await asyncio.sleep(0.1)
    elif how == "window":
        await asyncio.sleep(601)
    elif how == "drain":
        await bed.close()
        bed.store.unavailable = False
        return await Bed.make(store=bed.store, replica_id="rep_2")
    else:
        await asyncio.sleep(1)
        return await Bed.make(store=await crash(bed), replica_id="rep_2")
    return bed


async def cold(bed: Bed, count: int = 1, how: str = "exit") -> tuple[Bed, Any, list[str]]:
    """A chain that waits without an agent: the replica, the prompt's handle, its questions."""
    handle, agent, _, questions = await paused(bed, count, prompt_id="one")
    return await lose(bed, agent, how), handle, questions


async def next_agent(bed: Bed, count: int | None = None) -> tuple[FakeAgent, dict[str, Any]]:
    """The agent that was started for the chain, and the frame that it was sent."""
    agent = await bed.agent(count if count is not None else (2 if bed.replica.replica_id == "rep_1" else 1))
    return agent, await agent.prompt()


def texts(frame: dict[str, Any]) -> list[str]:
    return [block["text"] for block in frame["params"]["prompt"]]


async def questions_of(bed: Bed) -> dict[str, dict[str, Any]]:
    items = (await bed.sessions.interactions(CALLER, "s", None))["items"]
    return {item["interaction_id"]: item for item in items}


WAYS = ["exit", "window", "crash", "drain"]


@pytest.mark.parametrize("how", WAYS)
async def test_a_chain_waits_on_without_its_seat_case_f9(bed: Bed, how: str) -> None:
    bed, handle, [question] = await cold(bed, how=how)
    view = await bed.sessions.view(CALLER, "s")
    assert (view["state"], view["open_interactions"]) == ("awaiting_approval", [question])
    assert view["pool"]["state"] is None
    assert (await questions_of(bed))[question]["status"] == "pending"
    assert (await bed.sessions.sessions(CALLER, 5, None))["items"][0]["open_interactions"] == [question]
    events = await bed.history()
    assert "prompt_ended" not in types(events)
    assert "session_idle" not in types(events)
    assert lease(bed).owner is None, "any replica may go on with it"
    again = await bed.dispatch(prompt="hello", prompt_id="one")
    assert (again.turn_id, again.state) == (handle.turn_id, "active")
    assert (await again.result())["outcome"] == "paused"
    await bed.close()


@pytest.mark.parametrize("how", WAYS)
async def test_an_answer_starts_an_agent_that_asks_the_same_again_case_f9(bed: Bed, how: str) -> None:
    bed, handle, [question] = await cold(bed, how=how)
    answering = asyncio.create_task(bed.answer(question, decision="allow", idempotency_key="k"))
    agent, frame = await next_agent(bed)
    assert texts(frame)[-2:] == ["hello", CONTINUE], "nothing was loaded: the prompt is told again"
    agent.ask(9, "t9")
    assert (await agent.answered(9))["result"]["outcome"] == {"outcome": "selected", "optionId": "yes"}
    reply = await answering
    assert (reply.status, reply.body["status"]) == (200, "consumed")
    agent.update(sessionUpdate="tool_call_update", toolCallId="t9", status="completed")
    agent.say("ran it")
    agent.answer(frame)
    await check(bed, ["paused", "completed"])
    twice = await bed.answer(question, decision="allow", idempotency_key="k")
    assert twice.status == 200
    result = await (await bed.dispatch(prompt="hello", prompt_id="one")).result()
    assert (result["outcome"], result["start"], result["context_lost"], result["text"]) == (
        "completed",
        "cold",
        True,
        "ran it",
    )
    events = await bed.history()
    admitted = [event["data"] for event in events if event["type"] == "turn_admitted"]
    assert admitted[-1]["resumes"] == handle.turn_id
    assert types(events).count("user_message") == 1, "the human said it once"
    assert types(events).count("interaction_requested") == 1
    assert {tool["status"] for tool in conversation(events)["tools"].values()} == {"failed", "completed"}
    await bed.close()


async def test_a_denial_is_given_by_a_reject_option_of_the_new_agent(bed: Bed) -> None:
    bed, _, [question] = await cold(bed)
    answering = asyncio.create_task(bed.answer(question, decision="deny"))
    agent, frame = await next_agent(bed)
    agent.ask(9, "t9", [{"optionId": "go", "kind": "allow_once"}, {"optionId": "stay", "kind": "reject_once"}])
    assert (await agent.answered(9))["result"]["outcome"]["optionId"] == "stay"
    assert (await answering).status == 200
    agent.answer(frame)
    await check(bed, ["paused", "completed"])


@pytest.mark.parametrize("change", [{"rawInput": {"command": "rm y"}}, {"title": "run that"}, {"kind": "delete"}])
async def test_other_arguments_are_another_question_case_f9(bed: Bed, change: dict[str, Any]) -> None:
    bed, _, [question] = await cold(bed)
    answering = asyncio.create_task(bed.answer(question, decision="allow"))
    agent, frame = await next_agent(bed)
    agent.ask(9, "t9", **change)
    await asyncio.sleep(1)
    assert [f for f in agent.frames if "method" not in f and f.get("id") == 9] == [], "the approval does not cover it"
    view = await bed.sessions.view(CALLER, "s")
    assert view["state"] == "awaiting_approval"
    [fresh] = view["open_interactions"]
    assert fresh != question
    told = (await questions_of(bed))[question]
    if "kind" in change:
        assert told["status"] == "answered", "another tool: the first call may still come"
    else:
        assert (told["status"], told["reason"]) == ("expired", "The agent asked again with other arguments.")
        with pytest.raises(RunnerError) as caught:
            await answering
        assert (caught.value.code, caught.value.message) == ("interaction_closed", told["reason"])
    await bed.answer(fresh, decision="deny")
    agent.answer(frame)
    await check(bed, ["paused", "paused", "completed"])
    told = (await questions_of(bed))[question]
    assert (told["status"], told["answer"]["decision"]) == ("expired", "allow")
    assert told["reason"]
    await asyncio.gather(answering, return_exceptions=True)
    await bed.close()


async def test_an_option_that_means_something_else_now_is_not_chosen(bed: Bed) -> None:
    bed, _, [question] = await cold(bed)
    answering = asyncio.create_task(bed.answer(question, option_id="yes"))
    agent, frame = await next_agent(bed)
    agent.ask(9, "t9", [{"optionId": "yes", "kind": "allow_always"}, {"optionId": "no", "kind": "reject_once"}])
    await asyncio.sleep(1)
    [fresh] = (await bed.sessions.view(CALLER, "s"))["open_interactions"]
    assert fresh != question
    await asyncio.gather(answering, return_exceptions=True)
    await bed.answer(fresh, option_id="no")
    agent.answer(frame)
    await check(bed, ["paused", "paused", "completed"])


async def test_several_questions_are_answered_one_by_one_cold_case_f8(bed: Bed) -> None:
    bed, _, [one, two] = await cold_pair(bed)
    answering = asyncio.create_task(bed.answer(two, decision="deny"))
    agent, frame = await next_agent(bed)
    agent.ask(8, "t8", rawInput={"command": "0"})
    await asyncio.sleep(1)
    assert await bed.state() == "awaiting_approval", "the first one is asked again and still open: no new card"
    assert (await bed.sessions.view(CALLER, "s"))["open_interactions"] == [one]
    assert (await answering).status == 202, "the agent has not asked for it again yet"
    second = asyncio.create_task(bed.answer(one, decision="allow"))
    assert (await agent.answered(8))["result"]["outcome"]["optionId"] == "yes"
    assert (await second).status == 200
    agent.ask(9, "t9", rawInput={"command": "1"})
    assert (await agent.answered(9))["result"]["outcome"]["optionId"] == "no"
    agent.say("done")
    agent.answer(frame)
    await check(bed, ["paused", "paused", "completed"])
    statuses = {name: item["status"] for name, item in (await questions_of(bed)).items()}
    assert statuses == {one: "consumed", two: "consumed"}


async def cold_pair(bed: Bed) -> tuple[Bed, Any, list[str]]:
    handle = await bed.dispatch(prompt_id="one", keep_on_disconnect=True)
    agent = await bed.agent()
    await agent.prompt()
    for n in range(2):
        agent.ask(n, f"t{n}", rawInput={"command": str(n)})
    await handle.result()
    listed = (await bed.sessions.view(CALLER, "s"))["open_interactions"]
    return await lose(bed, agent, "exit"), handle, listed


async def test_an_answer_that_nobody_asks_for_again_expires_with_a_reason(bed: Bed) -> None:
    bed, _, [question] = await cold(bed)
    answering = asyncio.create_task(bed.answer(question, decision="allow"))
    agent, frame = await next_agent(bed)
    agent.say("I no longer need it")
    agent.answer(frame)
    with pytest.raises(RunnerError) as caught:
        await answering
    assert caught.value.code == "interaction_closed"
    await check(bed, ["paused", "completed"])
    told = (await questions_of(bed))[question]
    assert (told["status"], told["reason"]) == ("expired", "The agent went on without this answer.")


async def test_a_policy_of_the_session_still_decides_what_it_decided_before(bed: Bed) -> None:
    rules = [{"tool": "read", "decision": "allow"}]
    handle, agent, _, [question] = await paused(bed, 1, permissions={"default": "ask", "rules": rules})
    await lose(bed, agent, "exit")
    answering = asyncio.create_task(bed.answer(question, decision="allow"))
    agent, frame = await next_agent(bed)
    agent.ask(8, "t8", kind="read")
    assert (await agent.answered(8))["result"]["outcome"]["optionId"] == "yes"
    agent.ask(9, "t9")
    await answering
    agent.answer(frame)
    await check(bed, ["paused", "completed"])
    assert handle.prompt_id


# Case F2: an answer whose resume fails.


async def test_a_start_that_fails_gives_the_answer_back_case_f2(bed: Bed) -> None:
    bed, _, [question] = await cold(bed)
    bed.provider.start_error = RunnerError("sandbox_start_failed", "No room on this machine.")
    with pytest.raises(RunnerError) as caught:
        await bed.answer(question, decision="allow")
    assert caught.value.code == "sandbox_start_failed"
    assert "still open" in caught.value.message
    told = (await questions_of(bed))[question]
    assert (told["status"], told["last_error"]) == ("pending", "No room on this machine.")
    assert "answer" not in told
    view = await bed.sessions.view(CALLER, "s")
    assert (view["state"], view["open_interactions"]) == ("awaiting_approval", [question])
    events = await bed.history()
    assert [e["data"]["outcome"] for e in events if e["type"] == "done"] == ["paused", "paused"]
    assert "prompt_ended" not in types(events)
    returned = {"kind": "answer_returned", "interaction_id": question, "message": "No room on this machine."}
    assert returned in [event["data"] for event in events if event["type"] == "notice"]
    bed.provider.start_error = None
    answering = asyncio.create_task(bed.answer(question, decision="deny"))
    agent, frame = await next_agent(bed)
    agent.ask(9, "t9")
    assert (await agent.answered(9))["result"]["outcome"]["optionId"] == "no"
    assert (await answering).status == 200
    agent.answer(frame)
    await check(bed, ["paused", "paused", "completed"])


async def test_a_start_that_failed_survives_a_crash_case_f2(bed: Bed) -> None:
    bed, _, [question] = await cold(bed)
    bed.provider.start_error = RunnerError("sandbox_start_failed", "No room on this machine.")
    with pytest.raises(RunnerError):
        await bed.answer(question, decision="allow")
    again = await Bed.make(store=await crash(bed), replica_id="rep_2")
    assert (await again.sessions.view(CALLER, "s"))["open_interactions"] == [question]
    assert (await questions_of(again))[question]["last_error"] == "No room on this machine."
    answering = asyncio.create_task(again.answer(question, decision="allow"))
    agent, frame = await next_agent(again)
    agent.ask(9, "t9")
    assert (await answering).status == 200
    agent.answer(frame)
    await check(again, ["paused", "paused", "completed"])
    await again.close()


@pytest.mark.parametrize("missing", ["store", "plane"])
async def test_a_resume_that_is_not_admitted_gives_the_answer_back_case_f2(bed: Bed, missing: str) -> None:
    bed, _, [question] = await cold(bed)
    plane: Any = bed.replica.plane
    plane.down = missing == "plane"
    bed.store.failing["admit"] = 2 * int(missing == "store")
    with pytest.raises(RunnerError) as caught:
        await bed.answer(question, decision="allow")
    assert caught.value.code == f"{missing}_unavailable"
    plane.down = False
    told = (await questions_of(bed))[question]
    assert (told["status"], "answer" in told) == ("pending", False)
    assert told["last_error"]
    assert bed.provider.alive == set()
    await finish_cold(bed, question)


async def finish_cold(bed: Bed, question: str) -> None:
    answering = asyncio.create_task(bed.answer(question, decision="allow"))
    agent, frame = await next_agent(bed)
    agent.ask(9, "t9")
    assert (await answering).status == 200
    agent.say("ok")
    agent.answer(frame)
    await check(bed, ["paused", "completed"])


async def test_a_crash_between_claim_and_resume_gives_the_answer_back_case_f2(bed: Bed) -> None:
    bed, _, [question] = await cold(bed)
    bed.store.gates["admit"] = Gate()
    answering = asyncio.create_task(bed.answer(question, decision="allow"))
    await bed.store.gates["admit"].reached.wait()
    assert (await bed.store.interaction("p", question)).status == "answered"
    again = await Bed.make(store=await crash(bed), replica_id="rep_2")
    await asyncio.gather(answering, return_exceptions=True)
    told = (await questions_of(again))[question]
    assert told["status"] == "pending"
    assert "runner stopped" in told["last_error"]
    await finish_cold(again, question)
    await again.close()


@pytest.mark.parametrize("boots", [1, 2])
async def test_a_crash_while_the_new_agent_starts_gives_the_answer_back_case_f2(bed: Bed, boots: int) -> None:
    bed, _, [question] = await cold(bed)
    bed.provider.start_gate = asyncio.Event()
    answering = asyncio.create_task(bed.answer(question, decision="allow"))
    await asyncio.sleep(1)
    for number in range(boots):
        bed = await Bed.make(store=await crash(bed), replica_id=f"rep_{number + 2}")
    await asyncio.gather(answering, return_exceptions=True)
    told = (await questions_of(bed))[question]
    assert (told["status"], "answer" in told, "runner stopped" in told["last_error"]) == ("pending", False, True)
    assert (await bed.sessions.view(CALLER, "s"))["open_interactions"] == [question]
    assert "prompt_ended" not in types(await bed.history())
    answering = asyncio.create_task(bed.answer(question, decision="allow"))
    agent, frame = await next_agent(bed)
    agent.ask(9, "t9")
    assert (await answering).status == 200
    agent.say("ok")
    agent.answer(frame)
    await check(bed, ["paused", "lost", "completed"])
    await bed.close()


async def test_a_claim_that_nobody_carries_lapses_case_f2(bed: Bed) -> None:
    """Another replica claimed the answer and died: nobody else is told for ever that it was answered."""
    bed, _, [question] = await cold(bed)
    row = await bed.store.interaction("p", question)
    now_ms = bed.replica.services.clock.now_ms()
    claimed = desk.answered(row, {"decision": "deny"}, now_ms)
    assert await bed.store.answer_interaction(claimed, "pending")
    with pytest.raises(RunnerError) as caught:
        await bed.answer(question, decision="allow")
    assert (caught.value.code, caught.value.extra["recorded_decision"]) == ("interaction_conflict", "deny")
    await asyncio.sleep(15)
    await finish_cold(bed, question)


async def test_a_drain_during_a_cold_start_leaves_the_question_open(bed: Bed) -> None:
    bed, _, [question] = await cold(bed)
    bed.provider.start_gate = asyncio.Event()
    answering = asyncio.create_task(bed.answer(question, decision="allow"))
    await asyncio.sleep(1)
    await bed.close()
    await asyncio.gather(answering, return_exceptions=True)
    bed.store.unavailable = False
    again = await Bed.make(store=bed.store, replica_id="rep_2")
    assert (await questions_of(again))[question]["status"] == "pending"
    answering = asyncio.create_task(again.answer(question, decision="allow"))
    agent, frame = await next_agent(again)
    agent.ask(9, "t9")
    assert (await answering).status == 200
    agent.answer(frame)
    await check(again, ["paused", "paused", "completed"])
    await again.close()


async def test_an_answer_that_no_agent_asked_for_comes_back_with_the_next_loss_case_f2(bed: Bed) -> None:
    """Nothing but it would be open, and nobody would see it."""
    bed, _, [one, two] = await cold_pair(bed)
    answering = asyncio.create_task(bed.answer(two, decision="deny"))
    agent, _ = await next_agent(bed)
    agent.ask(8, "t8", rawInput={"command": "0"})
    assert (await answering).status == 202
    agent.exit(3)
    await asyncio.sleep(1)
    assert (await bed.sessions.view(CALLER, "s"))["open_interactions"] == [one, two]
    told = await questions_of(bed)
    assert [(told[name]["status"], "answer" in told[name]) for name in (one, two)] == [("pending", False)] * 2
    assert "asked for" in told[two]["last_error"]
    await bed.cancel(wait_seconds=5)
    await check(bed, ["paused", "paused", "cancelled"])


# Stop, kill, DELETE and a new prompt need no agent.


@pytest.mark.parametrize("how", ["exit", "crash"])
async def test_a_stop_ends_a_cold_chain_without_an_agent_case_f11(bed: Bed, how: str) -> None:
    bed, handle, [question] = await cold(bed, how=how)
    started = len(bed.provider.sandboxes)
    reply = await bed.cancel(expected_execution_id=handle.turn_id, wait_seconds=5)
    assert reply.body["outcome"] == "stopped"
    assert len(bed.provider.sandboxes) == started
    await check(bed, ["paused", "cancelled"])
    assert (await questions_of(bed))[question]["status"] == "cancelled"
    ended = [event["data"] for event in await bed.history() if event["type"] == "prompt_ended"]
    assert ended == [{"prompt_id": "one", "state": "aborted"}]
    assert (await bed.store.prompt("p", "s", "one")).state == "aborted"
    with pytest.raises(RunnerError) as caught:
        await bed.answer(question, decision="allow")
    assert caught.value.code == "interaction_closed"
    await bed.close()


async def test_kill_and_delete_of_a_cold_chain(bed: Bed) -> None:
    bed, _, [question] = await cold(bed)
    assert (await bed.sessions.kill(CALLER, "s")).body["outcome"] == "stopped"
    await check(bed, ["paused", "cancelled"])
    assert (await questions_of(bed))[question]["status"] == "cancelled"
    bed2, _, _ = await cold_again(bed)
    await bed2.sessions.delete(CALLER, "s")
    assert await bed2.store.interactions("p", "s") == []


async def cold_again(bed: Bed) -> tuple[Bed, Any, list[str]]:
    handle = await bed.dispatch(prompt_id="two", keep_on_disconnect=True)
    agent = await bed.agent(2)
    await agent.prompt()
    agent.ask(0, "t0")
    await handle.result()
    return await lose(bed, agent, "exit"), handle, []


@pytest.mark.parametrize("how", ["exit", "crash"])
async def test_a_new_prompt_withdraws_a_cold_chain_case_a19(bed: Bed, how: str) -> None:
    bed, _, [question] = await cold(bed, how=how)
    two = await bed.dispatch(prompt="never mind", prompt_id="two", keep_on_disconnect=True)
    agent, frame = await next_agent(bed)
    assert CONTINUE not in texts(frame)
    assert texts(frame)[-1] == "never mind"
    agent.say("ok")
    agent.answer(frame)
    assert (await two.result())["outcome"] == "completed"
    await check(bed, ["paused", "completed"])
    assert (await questions_of(bed))[question]["status"] == "cancelled"
    ended = {e["data"]["prompt_id"]: e["data"]["state"] for e in await bed.history() if e["type"] == "prompt_ended"}
    assert ended == {"one": "aborted", "two": "done"}
    await bed.close()


@pytest.mark.parametrize("order", ["answer first", "stop first"])
async def test_an_answer_and_a_stop_of_a_cold_chain_case_f11(bed: Bed, order: str) -> None:
    bed, _, [question] = await cold(bed)
    calls = [bed.answer(question, decision="allow"), bed.cancel(wait_seconds=30)]
    replies = asyncio.gather(*(calls if order == "answer first" else reversed(calls)), return_exceptions=True)
    for reply in await replies:
        assert not isinstance(reply, BaseException) or isinstance(reply, RunnerError)
    await check(bed, ["paused", "cancelled"])
    closed = [event["data"] for event in await bed.history() if event["type"] == "interaction_closed"]
    assert [data["status"] for data in closed] == ["cancelled"]
    assert bed.provider.alive == set()


async def test_a_stop_while_the_cold_agent_starts_undoes_the_start(bed: Bed) -> None:
    bed, _, [question] = await cold(bed)
    bed.provider.start_gate = asyncio.Event()
    answering = asyncio.create_task(bed.answer(question, decision="allow"))
    await asyncio.sleep(1)
    assert (await bed.cancel(wait_seconds=5)).body["outcome"] == "stopped"
    with pytest.raises(RunnerError) as caught:
        await answering
    assert caught.value.code == "interaction_closed"
    await check(bed, ["paused", "cancelled"])
    assert (await questions_of(bed))[question]["status"] == "cancelled"
    assert len(bed.provider.sandboxes) == 1


async def test_a_stop_of_the_cold_turn_cancels_what_it_asked_again(bed: Bed) -> None:
    bed, _, [one, _two] = await cold_pair(bed)
    answering = asyncio.create_task(bed.answer(one, decision="allow"))
    agent, frame = await next_agent(bed)
    agent.ask(9, "t9", rawInput={"command": "1"})
    await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    stopping = asyncio.create_task(bed.cancel(wait_seconds=20))
    assert (await agent.answered(9))["result"] == {"outcome": {"outcome": "cancelled"}}
    await agent.heard("session/cancel")
    agent.answer(frame, "cancelled")
    assert (await stopping).body["outcome"] == "stopped"
    with pytest.raises(RunnerError):
        await answering
    await check(bed, ["paused", "cancelled"])
    assert {item["status"] for item in (await questions_of(bed)).values()} == {"cancelled"}


async def test_an_agent_that_dies_in_the_cold_turn_ends_the_chain(bed: Bed) -> None:
    bed, _, [question] = await cold(bed)
    answering = asyncio.create_task(bed.answer(question, decision="allow"))
    agent, _ = await next_agent(bed)
    agent.exit(4)
    with pytest.raises(RunnerError):
        await answering
    await check(bed, ["paused", "failed"])
    assert (await questions_of(bed))[question]["status"] == "expired"


async def test_a_cold_chain_that_pauses_again_and_loses_its_seat_again(bed: Bed) -> None:
    bed, _, [one, two] = await cold_pair(bed)
    answering = asyncio.create_task(bed.answer(one, decision="allow"))
    agent, frame = await next_agent(bed)
    agent.ask(9, "t9", rawInput={"command": "1"})
    await asyncio.sleep(1)
    assert await bed.state() == "awaiting_approval"
    assert (await answering).status == 202
    again = await Bed.make(store=await crash(bed), replica_id="rep_2")
    told = await questions_of(again)
    assert {name: told[name]["status"] for name in (one, two)} == {one: "pending", two: "pending"}
    answers = [asyncio.create_task(again.answer(name, decision="deny")) for name in (one, two)]
    agent, frame = await next_agent(again)
    for n in range(2):
        agent.ask(n, f"u{n}", rawInput={"command": str(n)})
        assert (await agent.answered(n))["result"]["outcome"]["optionId"] == "no"
    assert [(await task).status for task in answers] == [200, 200]
    agent.answer(frame)
    await check(again, ["paused", "paused", "completed"])
    await again.close()


# Time.


async def test_an_answer_that_comes_too_late_is_refused_case_f9(bed: Bed) -> None:
    bed, _, [question] = await cold(bed)
    await asyncio.sleep(WEEK)
    with pytest.raises(RunnerError) as caught:
        await bed.answer(question, decision="allow")
    assert (caught.value.code, "expired" in caught.value.message) == ("interaction_closed", True)
    assert (await bed.sessions.interactions(CALLER, None, "pending"))["items"] == []


# While a turn is admitted.


@pytest.mark.parametrize("how", ["exit", "window"])
async def test_a_seat_that_is_lost_while_an_answer_is_admitted_goes_on_cold(bed: Bed, how: str) -> None:
    _, agent, _, [question] = await paused(bed, prompt_id="one")
    gate = bed.store.gates["admit"] = Gate()
    if how == "window":
        await asyncio.sleep(599)
    answering = asyncio.create_task(bed.answer(question, decision="allow"))
    await gate.reached.wait()
    if how == "exit":
        agent.exit(3)
    await asyncio.sleep(2)
    gate.open()
    agent, frame = await next_agent(bed)
    agent.ask(9, "t9")
    assert (await answering).status == 200
    agent.say("ok")
    agent.answer(frame)
    await check(bed, ["paused", "completed"])
    assert_ordered(await bed.history())


async def test_an_agent_that_exits_while_the_pause_is_written_leaves_a_cold_chain(bed: Bed) -> None:
    handle = await bed.dispatch(prompt_id="one", keep_on_disconnect=True)
    agent = await bed.agent()
    await agent.prompt()
    gate = bed.store.gates["end"] = Gate()
    agent.update(sessionUpdate="tool_call", toolCallId="t0", title="run it", status="pending")
    agent.ask(0, "t0")
    await gate.reached.wait()
    agent.exit(3)
    await asyncio.sleep(0.1)
    gate.open()
    assert (await handle.result())["outcome"] == "paused"
    await asyncio.sleep(1)
    assert await bed.state() == "awaiting_approval"
    [question] = (await bed.sessions.view(CALLER, "s"))["open_interactions"]
    await finish_cold(bed, question)
    assert OPTIONS


async def test_what_is_open_survives_a_store_that_is_slow(bed: Bed) -> None:
    assert isinstance(bed.store, SlowStore)
    bed.store.latency = 0.3
    bed, _, [question] = await cold(bed)
    await finish_cold(bed, question)


async def test_a_cold_chain_that_nobody_answers_ends_as_expired(bed: Bed) -> None:
    """F8: expired, never denied by user; the sweep sees to it."""
    bed, _, [question] = await cold(bed)
    await asyncio.sleep(WEEK + 120)
    await check(bed, ["paused", "failed"])
    told = (await questions_of(bed))[question]
    assert (told["status"], told["reason"], "answer" in told) == ("expired", "Nobody answered in time.", False)
    ended = [event["data"] for event in await bed.history() if event["type"] == "prompt_ended"]
    assert ended == [{"prompt_id": "one", "state": "failed"}]
    assert len(bed.provider.sandboxes) == 1, "no agent was started for that"


async def test_a_chain_of_a_restarted_runner_expires_too(bed: Bed) -> None:
    bed, _, [question] = await cold(bed, how="crash")
    await asyncio.sleep(WEEK + 120)
    await check(bed, ["paused", "failed"])
    assert (await questions_of(bed))[question]["status"] == "expired"
    await bed.close()


@pytest.fixture
def five_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions that live five minutes, less than a seat."""
    monkeypatch.setattr(interaction, "EXPIRY_MS", 300_000)


@pytest.mark.usefixtures("five_minutes")
async def test_what_is_due_is_refused_to_a_live_agent_and_the_chain_goes_on(bed: Bed) -> None:
    """Deny-like, never ``cancelled``, and nobody is told that a user denied it (cases F7, F8)."""
    _, agent, frame, [question] = await paused(bed, 1)
    await asyncio.sleep(361)
    assert (await agent.answered(0))["result"]["outcome"] == {"outcome": "selected", "optionId": "no"}
    agent.answer(frame)
    await check(bed, ["paused", "completed"])
    told = (await questions_of(bed))[question]
    assert (told["status"], told["reason"], "answer" in told) == ("expired", "Nobody answered in time.", False)


@pytest.mark.usefixtures("five_minutes")
async def test_what_is_due_is_refused_while_its_turn_runs(bed: Bed) -> None:
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    agent.update(sessionUpdate="tool_call", toolCallId="other", title="long", status="in_progress")
    agent.ask(1, "t1", [{"optionId": "go", "kind": "allow_once"}])
    agent.elicit("form")
    await asyncio.sleep(361)
    assert (await agent.answered(1))["error"]["code"] == -32000, "without a reject option it is an error"
    assert (await agent.answered("form"))["result"] == {"action": "decline"}
    agent.say("so be it")
    agent.answer(frame)
    assert (await handle.result())["outcome"] == "completed"
    await check(bed, ["completed"])
    assert {item["status"] for item in (await questions_of(bed)).values()} == {"expired"}


async def test_a_question_that_no_chain_waits_for_is_closed_by_the_next_turn(bed: Bed) -> None:
    """What an older version, or a store that lost a write, left behind: no card stays."""
    bed, _, [question] = await cold(bed)
    await bed.cancel(wait_seconds=5)
    row = await bed.store.interaction("p", question)
    left = dataclasses.replace(row, interaction_id="int_left", status="pending", answer=None)
    answered = dataclasses.replace(left, interaction_id="int_given", status="answered", answer={"decision": "allow"})
    for given in (left, answered):
        bed.store._save_interaction(given)
    again = await Bed.make(store=await crash(bed), replica_id="rep_2")
    rows = {name: item["status"] for name, item in (await questions_of(again)).items()}
    assert rows["int_left"] == "expired", "a boot closes what nobody waits for"
    again.store._save_interaction(dataclasses.replace(left, interaction_id="int_late"))
    again.sessions._registry._sessions.clear()
    assert (await again.turn())["ok"] is True
    closed = [e["data"]["interaction_id"] for e in await again.history() if e["type"] == "interaction_closed"]
    assert "int_late" in closed
    assert (await questions_of(again))["int_late"]["status"] == "expired"
    await again.close()


@pytest.mark.parametrize("what", ["stop", "kill"])
async def test_a_command_that_cannot_end_a_cold_chain_says_so(bed: Bed, what: str) -> None:
    """Nobody can admit the turn that would end it: the question stays open, and the outcome is no "nothing ran"."""
    bed, _, [question] = await cold(bed)
    plane: Any = bed.replica.plane
    plane.down = True
    call = bed.cancel(wait_seconds=30) if what == "stop" else bed.sessions.kill(CALLER, "s")
    assert (await call).body["outcome"] == "failed"
    assert (await bed.sessions.view(CALLER, "s"))["open_interactions"] == [question]
    plane.down = False
    await asyncio.sleep(1)
    again = bed.cancel(wait_seconds=30) if what == "stop" else bed.sessions.kill(CALLER, "s")
    assert (await again).body["outcome"] == "stopped"
    await check(bed, ["paused", "cancelled"])
