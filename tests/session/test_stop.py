"""Stop at every moment: it stops now, it tells the truth, and it keeps the session warm (DESIGN 3.3)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.errors import RunnerError
from tests.session.bed import CALLER, Bed, types
from tests.session.fake_agent import text_frame, update_frame

pytestmark = pytest.mark.virtual_time


async def running(bed: Bed, prompt: str = "hello", **fields: Any):
    """A turn whose frame is with the agent."""
    handle = await bed.dispatch(prompt=prompt, keep_on_disconnect=True, **fields)
    agent = await bed.agent()
    return handle, agent, await agent.prompt()


async def test_a_stop_settles_and_the_next_prompt_is_a_hit(bed: Bed) -> None:
    handle, agent, frame = await running(bed)
    agent.say("part")
    reply = await bed.cancel()
    assert (reply.status, reply.body["state"], reply.body["outcome"]) == (202, "stopping", None)
    assert reply.body["turn_id"] == handle.turn_id
    assert await bed.state() == "stopping"
    await agent.heard("session/cancel")
    agent.answer(frame, "cancelled")
    result = await handle.result()
    assert (result["outcome"], result["stop_reason"], result["cancel_settled"]) == ("cancelled", "cancelled", True)
    assert result["ok"] is False
    assert result["text"] == "part"
    assert "error" not in types(await bed.events(handle))
    assert bed.sandbox().story == [f"mark {handle.turn_id}", f"kill {handle.turn_id}"]
    assert (await bed.turn(nth=2))["start"] == "hit"


async def test_cancel_right_behind_the_prompt_is_repeated_then_forced_case_a2(bed: Bed) -> None:
    handle, agent, _ = await running(bed)
    began = asyncio.get_running_loop().time()
    await bed.cancel()
    result = await handle.result()
    assert asyncio.get_running_loop().time() - began == pytest.approx(10, abs=0.5)
    assert len(agent.all("session/cancel")) >= 9
    assert (result["outcome"], result["cancel_settled"]) == ("cancelled", False)
    assert (await bed.turn(agents=2))["reason"] == "not_settled"


async def test_a_silent_end_is_a_limit_not_a_stop_case_a3(bed: Bed) -> None:
    handle, agent, _ = await running(bed, limits={"quiet_seconds": 30})
    agent.say("all of it")
    agent.update(sessionUpdate="usage_update", used=1, size=2)
    result = await handle.result()
    assert (result["outcome"], result["error"]["code"]) == ("failed", "limit_quiet")
    assert result["stop_reason"] is None


async def test_a_stray_terminal_of_a_cancelled_turn_case_a4(bed: Bed) -> None:
    handle, agent, frame = await running(bed)
    await bed.cancel()
    await agent.heard("session/cancel")
    agent.answer(frame, "cancelled")
    await handle.result()
    second = await bed.dispatch(prompt="again", keep_on_disconnect=True)
    frame2 = await agent.prompt(2)
    agent.answer(frame, "end_turn")
    agent.say("mine")
    agent.answer(frame2)
    result = await second.result()
    assert (result["outcome"], result["text"]) == ("completed", "mine")


async def test_an_agent_that_ignores_cancel_is_replaced_case_a6(bed: Bed) -> None:
    handle, agent, _ = await running(bed)
    await bed.cancel()
    await agent.heard("session/cancel")
    for _ in range(3):
        agent.say("still talking ")
        await asyncio.sleep(2)
    result = await handle.result()
    assert (result["outcome"], result["cancel_settled"]) == ("cancelled", False)
    assert "kill" in " ".join(bed.sandbox().story)
    assert bed.sandbox().story[-1] == "destroy"
    assert (await bed.turn(agents=2))["context_lost"] is True


@pytest.mark.parametrize("answer", ["null", "error", "-32800", "end_turn"])
async def test_any_answer_after_the_mark_settles_cases_a7_a9_a16(bed: Bed, answer: str) -> None:
    handle, agent, frame = await running(bed)
    await bed.cancel()
    await agent.heard("session/cancel")
    await asyncio.sleep(5)
    assert await bed.state() == "stopping"
    agent.say("late")
    match answer:
        case "null":
            agent.result(frame["id"], None)
        case "error":
            agent.error(frame["id"], -32603, "boom")
        case "-32800":
            agent.error(frame["id"], -32800, "cancelled")
        case _:
            agent.answer(frame, "end_turn")
    result = await handle.result()
    assert (result["outcome"], result["cancel_settled"]) == ("cancelled", True)
    assert result.get("late_completion", False) is (answer == "end_turn")
    assert "error" not in result
    assert result["text"] == "late"
    assert await bed.state() == "idle"
    assert (await bed.turn(nth=2))["start"] == "hit"


async def test_late_updates_are_not_the_next_turns_case_a10(bed: Bed) -> None:
    handle, agent, frame = await running(bed)
    await bed.cancel()
    await agent.heard("session/cancel")
    late = update_frame(sessionUpdate="tool_call_update", toolCallId="t9", status="completed")
    agent.send({"id": frame["id"], "result": {"stopReason": "cancelled"}}, late, late)
    await handle.result()
    second = await bed.dispatch(prompt="again", keep_on_disconnect=True)
    frame2 = await agent.prompt(2)
    agent.send(text_frame("clean"), {"id": frame2["id"], "result": {"stopReason": "end_turn"}})
    assert (await second.result())["text"] == "clean"
    events = await bed.events(second)
    assert "tool_call_update" not in types(events)
    assert "tool_call" not in types(events)


async def test_stop_during_session_new_case_a12(bed: Bed) -> None:
    gate = asyncio.Event()
    bed.provider.manners["gate:session/new"] = gate
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    await agent.heard("session/new")
    reply = await bed.cancel(wait_seconds=5)
    assert (reply.status, reply.body["outcome"]) == (200, "stopped")
    result = await handle.result()
    assert result["outcome"] == "cancelled"
    assert types(await bed.events(handle)).count("done") == 1
    assert agent.all("session/prompt") == []
    assert bed.sandbox().story == ["destroy"]
    gate.set()
    bed.provider.manners.clear()
    assert (await bed.turn(agents=2))["ok"] is True


async def test_stop_while_the_sandbox_starts_case_l5(bed: Bed) -> None:
    bed.provider.start_gate = asyncio.Event()
    handle = await bed.dispatch(keep_on_disconnect=True)
    reply = await bed.cancel(wait_seconds=5)
    assert reply.body["outcome"] == "stopped"
    assert (await handle.result())["outcome"] == "cancelled"
    bed.provider.start_gate = None
    assert (await bed.turn())["ok"] is True


async def test_control_never_waits_behind_a_turn_case_a13(bed: Bed) -> None:
    handle, agent, frame = await running(bed)
    began = asyncio.get_running_loop().time()
    assert (await bed.cancel()).status == 202
    assert await bed.state() == "stopping"
    assert bed.sessions.health()["status"] == "ok"
    assert asyncio.get_running_loop().time() == began
    agent.answer(frame, "cancelled")
    await handle.result()


async def test_a_stop_behind_the_ending_is_obsolete_case_a15(bed: Bed) -> None:
    assert (await bed.turn())["outcome"] == "completed"
    reply = await bed.cancel()
    assert (reply.status, reply.body["state"], reply.body["outcome"]) == (200, "idle", "not_running")
    assert (await bed.turn(nth=2))["start"] == "hit"


async def test_an_answer_processed_before_the_mark_wins_case_a15(bed: Bed) -> None:
    gate = asyncio.Event()
    handle, agent, frame = await running(bed)
    end = bed.store.end

    async def gated(ending):
        await gate.wait()
        return await end(ending)

    bed.store.end = gated
    agent.say("done")
    agent.answer(frame)
    await asyncio.sleep(1)
    reply = await bed.cancel()
    gate.set()
    result = await handle.result()
    assert result["outcome"] == "completed"
    assert "cancel_settled" not in result
    assert reply.body["outcome"] in (None, "not_running")
    bed.store.end = end
    assert (await bed.turn(nth=2))["start"] == "hit"


async def test_a_stop_names_its_execution_case_b9(bed: Bed) -> None:
    first = await bed.turn()
    reply = await bed.cancel(expected_execution_id=first["turn_id"])
    assert (reply.status, reply.body["outcome"]) == (200, "not_running")
    with pytest.raises(RunnerError) as caught:
        await bed.cancel(expected_execution_id="turn_unknown")
    assert caught.value.code == "execution_mismatch"
    handle = await bed.dispatch(prompt="next", keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt(2)
    with pytest.raises(RunnerError) as caught:
        await bed.cancel(expected_execution_id=first["turn_id"])
    assert (caught.value.code, caught.value.extra["current_execution_id"]) == ("execution_mismatch", handle.turn_id)
    agent.say("fine")
    agent.answer(frame)
    assert (await handle.result())["outcome"] == "completed"


async def test_one_key_is_one_stop(bed: Bed) -> None:
    handle, agent, frame = await running(bed)
    one = await bed.cancel(idempotency_key="k")
    two = await bed.cancel(idempotency_key="k")
    assert one.body["command_id"] == two.body["command_id"]
    agent.answer(frame, "cancelled")
    await handle.result()
    three = await bed.cancel(idempotency_key="k")
    assert (three.body["command_id"], three.body["outcome"]) == (one.body["command_id"], "stopped")


async def test_two_stops_at_once_are_one_ending(bed: Bed) -> None:
    handle, agent, frame = await running(bed)
    replies = asyncio.gather(bed.cancel(wait_seconds=20), bed.cancel(wait_seconds=20))
    await agent.heard("session/cancel")
    agent.answer(frame, "cancelled")
    assert [reply.body["outcome"] for reply in await replies] == ["stopped", "stopped"]
    assert types(await bed.events(handle)).count("done") == 1


async def test_open_tool_calls_and_late_permissions_are_closed(bed: Bed) -> None:
    handle, agent, frame = await running(bed)
    agent.update(sessionUpdate="tool_call", toolCallId="t1", title="sleep", kind="execute", status="in_progress")
    await asyncio.sleep(1)
    await bed.cancel()
    await agent.heard("session/cancel")
    agent.ask(7, "t2")
    assert (await agent.answered(7))["result"] == {"outcome": {"outcome": "cancelled"}}
    agent.answer(frame, "cancelled")
    await handle.result()
    updates = [event["data"] for event in await bed.events(handle) if event["type"] == "tool_call_update"]
    assert {"tool_call_id": "t1", "status": "cancelled"} in updates


async def test_survivors_of_the_reap_destroy_the_sandbox(bed: Bed) -> None:
    handle, agent, frame = await running(bed)
    bed.provider.survivors = True
    await bed.cancel()
    await agent.heard("session/cancel")
    agent.answer(frame, "cancelled")
    assert (await handle.result())["cancel_settled"] is True
    bed.provider.survivors = False
    assert (await bed.turn(agents=2))["reason"] == "survivors"


async def test_kill_destroys_at_once_and_keeps_the_session(bed: Bed) -> None:
    handle, _agent, _ = await running(bed)
    began = asyncio.get_running_loop().time()
    reply = await bed.sessions.kill(CALLER, "s")
    assert reply.body["outcome"] == "stopped"
    assert asyncio.get_running_loop().time() == began
    assert (await handle.result())["outcome"] == "cancelled"
    assert bed.provider.alive == set()
    assert (await bed.turn(agents=2))["reason"] == "kill"


async def test_delete_ends_the_session(bed: Bed) -> None:
    await bed.turn()
    reply = await bed.sessions.delete(CALLER, "s")
    assert reply.body == {"session_id": "s", "state": "ended"}
    assert bed.provider.alive == set()
    assert bed.provider.removed == [("p", "s")]
    for call in (bed.dispatch(), bed.cancel(), bed.state()):
        with pytest.raises(RunnerError) as caught:
            await call
        assert caught.value.code == "session_ended"


async def test_an_agent_that_dies_while_cancelled_is_not_settled(bed: Bed) -> None:
    handle, agent, _ = await running(bed)
    await bed.cancel()
    await agent.heard("session/cancel")
    agent.exit(1)
    result = await handle.result()
    assert (result["outcome"], result["cancel_settled"]) == ("cancelled", False)
    assert (await bed.turn(agents=2))["ok"] is True
