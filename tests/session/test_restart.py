"""A runner that stops, and the one that comes after it: each turn has one ending, and the session goes on."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from typing import Any

import pytest

from runner.errors import RunnerError
from tests.session.bed import CALLER, Bed, types
from tests.session.fake_agent import FakeAgent
from tests.session.gates import Gate, SlowStore
from tests.session.reading import assert_contiguous, conversation, cursor

pytestmark = pytest.mark.virtual_time


async def crash(bed: Bed) -> SlowStore:
    """End every task of a replica at once, as kill -9 does; its store as the disk has it."""
    survivor = as_it_is(bed)
    await bed.die()
    return survivor


def as_it_is(bed: Bed) -> SlowStore:
    """What another process would find now: what is cancelled may still write for a moment."""
    survivor = SlowStore()
    for table in ("_sessions", "_turns", "_epochs", "_prompts", "_interactions", "_records", "_record_ids"):
        setattr(survivor, table, deepcopy(getattr(bed.store, table)))
    return survivor


async def running(bed: Bed, prompt: str = "hello", **fields: Any) -> tuple[Any, FakeAgent, dict[str, Any]]:
    handle = await bed.dispatch(prompt=prompt, keep_on_disconnect=True, **fields)
    agent = await bed.agent()
    return handle, agent, await agent.prompt()


def endings(events: list[dict[str, Any]]) -> list[str]:
    return [event["data"]["outcome"] for event in events if event["type"] == "done"]


async def test_a_running_turn_is_lost_exactly_once_case_m10() -> None:
    bed = await Bed.make()
    handle, agent, _ = await running(bed, prompt_id="x", harness="demo", env={"A": "1"})
    agent.say("half an ans")
    agent.update(sessionUpdate="tool_call", toolCallId="t", title="ls", status="in_progress")
    await asyncio.sleep(1)
    seen = await bed.history()
    once = await Bed.make(store=await crash(bed), replica_id="rep_2")
    await check_lost(once, handle.turn_id, seen[-1])
    again = await Bed.make(store=await crash(once), replica_id="rep_3")
    await check_lost(again, handle.turn_id, seen[-1])
    second = await again.dispatch(prompt="go on", keep_on_disconnect=True)
    agent = await again.agent()
    assert again.sandbox().spec.env["A"] == "1", "the session keeps its configuration"
    await agent.finish()
    result = await second.result()
    assert (result["ok"], result["start"], result["context_lost"]) == (True, "cold", True)
    assert endings(await again.history()) == ["lost", "completed"]
    await again.close()


async def check_lost(bed: Bed, turn_id: str, last_seen: dict[str, Any]) -> None:
    """The turn of the prompt ``x`` was lost: the stream, the view and a retry say so."""
    events = await bed.history()
    assert endings(events) == ["lost"]
    assert types(events)[-4:] == ["error", "prompt_ended", "done", "session_idle"]
    assert events[-2]["turn_id"] == turn_id
    assert all(cursor(event) > cursor(last_seen) for event in events[-4:]), "cursors are never used again"
    assert types(await bed.history(after=last_seen["cursor"]))[-4:] == types(events)[-4:]
    view = await bed.sessions.view(CALLER, "s")
    assert (view["state"], view["last_turn"]["outcome"], view["open_interactions"]) == ("idle", "lost", [])
    retry = await bed.dispatch(prompt="hello", prompt_id="x")
    result = await retry.result()
    assert (result["ok"], result["outcome"], result["error"]["code"]) == (False, "lost", "execution_lost")
    assert (result["turn_id"], retry.state) == (turn_id, "failed")
    assert types(await bed.events(retry))[-1] == "done"
    assert bed.provider.sandboxes == []


async def test_a_turn_without_a_frame_loses_no_context() -> None:
    bed = await Bed.make()
    bed.provider.start_gate = asyncio.Event()
    await bed.dispatch(prompt_id="x")
    await asyncio.sleep(1)
    again = await Bed.make(store=await crash(bed), replica_id="rep_2")
    assert endings(await again.history()) == ["lost"]
    assert "context_lost" not in await again.turn()
    await again.close()


async def test_a_paused_chain_waits_on_behind_a_crash_case_f9() -> None:
    bed = await Bed.make()
    handle, agent, _ = await running(bed, prompt_id="x")
    agent.update(sessionUpdate="tool_call", toolCallId="other", title="later", status="pending")
    agent.ask(1)
    await handle.result()
    before = await bed.history()
    [question] = (await bed.sessions.view(CALLER, "s"))["open_interactions"]
    again = await Bed.make(store=await crash(bed), replica_id="rep_2")
    third = await Bed.make(store=await crash(again), replica_id="rep_3")
    view = await third.sessions.view(CALLER, "s")
    assert (view["state"], view["open_interactions"]) == ("awaiting_approval", [question])
    assert conversation(await third.history()) == conversation(before), "a boot changes nothing of it"
    retry = await third.dispatch(prompt="hello", prompt_id="x")
    assert (retry.state, (await retry.result())["outcome"]) == ("active", "paused")
    assert (await third.cancel(wait_seconds=5)).body["outcome"] == "stopped"
    events = await third.history()
    assert endings(events) == ["paused", "cancelled"]
    assert [e["data"]["state"] for e in events if e["type"] == "prompt_ended"] == ["aborted"]
    assert types(events).count("interaction_closed") == types(events).count("session_idle") == 1
    assert types(events).count("session_busy") == 1
    assert {tool["status"] for tool in conversation(events)["tools"].values()} == {"failed"}
    assert (await third.turn())["context_lost"] is True
    await third.close()


async def test_a_paused_chain_that_waits_for_nobody_fails_at_the_boot() -> None:
    """The runner died between the agent's answer and the turn that would have taken it."""
    bed = await Bed.make()
    handle, agent, frame = await running(bed, prompt_id="x")
    agent.ask(1)
    await handle.result()
    plane: Any = bed.replica.plane
    plane.down = True
    agent.send({"method": "$/cancel_request", "params": {"requestId": 1}})
    agent.answer(frame)
    await asyncio.sleep(1)
    again = await Bed.make(store=await crash(bed), replica_id="rep_2")
    assert await again.state() == "idle"
    events = await again.history()
    assert endings(events) == ["paused"]
    assert [e["data"]["state"] for e in events if e["type"] == "prompt_ended"] == ["failed"]
    assert (await again.turn())["ok"] is True
    await again.close()


async def test_a_resumed_turn_is_lost_with_everything_it_carried() -> None:
    bed = await Bed.make()
    handle, agent, _ = await running(bed, prompt_id="x")
    agent.ask(1, "t1")
    agent.ask(2, "t2")
    await handle.result()
    one, two = (await bed.sessions.view(CALLER, "s"))["open_interactions"]
    await bed.answer(one, decision="allow")
    agent.update(sessionUpdate="tool_call_update", toolCallId="t1", status="completed")
    agent.update(sessionUpdate="tool_call", toolCallId="t3", title="more", status="in_progress")
    await asyncio.sleep(1)
    again = await Bed.make(store=await crash(bed), replica_id="rep_2")
    events = await again.history()
    assert endings(events) == ["paused", "lost"]
    assert [e["data"]["state"] for e in events if e["type"] == "prompt_ended"] == ["failed"]
    statuses = {
        r["interaction_id"]: r["status"] for r in (await again.sessions.interactions(CALLER, "s", None))["items"]
    }
    assert statuses == {one: "consumed", two: "expired"}
    tools = conversation(events)["tools"]
    assert (tools["t1"]["status"], tools["t2"]["status"]) == ("completed", "failed")
    assert types(events).count("session_idle") == 1
    assert (await again.turn())["ok"] is True
    await again.close()


async def test_a_withdrawal_is_lost_with_both_prompts() -> None:
    bed = await Bed.make()
    handle, agent, _ = await running(bed, prompt_id="one")
    agent.ask(1)
    await handle.result()
    await bed.dispatch(prompt="two", prompt_id="two")
    await agent.heard("session/cancel")
    again = await Bed.make(store=await crash(bed), replica_id="rep_2")
    events = await again.history()
    assert endings(events) == ["paused", "lost"]
    ended = {e["data"]["prompt_id"]: e["data"]["state"] for e in events if e["type"] == "prompt_ended"}
    assert ended == {"one": "failed", "two": "failed"}
    for prompt_id in ended:
        assert (await again.store.prompt("p", "s", prompt_id)).state == "failed"
    assert [row.status for row in await again.store.interactions("p", "s")] == ["expired"]
    assert (await again.turn())["ok"] is True
    await again.close()


async def test_events_outside_of_turns_do_not_move_a_cursor_back() -> None:
    """The seat of a paused chain is killed without a turn: those records are newer than the session's row."""
    bed = await Bed.make()
    plane: Any = bed.replica.plane
    handle, agent, _ = await running(bed)
    agent.ask(1)
    await handle.result()
    plane.down = True
    await bed.sessions.kill(CALLER, "s")
    plane.down = False
    await asyncio.sleep(30)
    everything = await bed.history()
    assert types(everything)[-1] == "session_idle"
    again = await Bed.make(store=await crash(bed), replica_id="rep_2")
    assert conversation(await again.history()) == conversation(everything)
    for index, event in enumerate(everything[-6:], start=len(everything) - 5):
        behind = await again.history(after=event["cursor"])
        assert list(map(cursor, behind)) == list(map(cursor, everything[index:])), "no resync, and nothing is missing"
    assert (await again.turn())["ok"] is True
    await again.close()


async def test_literal_secrets_are_gone_and_references_resolve() -> None:
    settings = {"secrets": {"VAULT": "from-the-vault"}}
    bed = await Bed.make(settings=settings)
    given: dict[str, dict[str, Any]] = {
        "literal": {"KEY": "literal-secret"},
        "ref": {"KEY": {"ref": "VAULT"}},
        "both": {"KEY": "literal-secret", "OTHER": {"ref": "VAULT"}},
    }
    for count, (session_id, secrets) in enumerate(given.items(), start=1):
        handle = await bed.dispatch(session_id, secrets=secrets)
        await (await bed.agent(count)).finish()
        await handle.result()
    again = await Bed.make(store=await crash(bed), replica_id="rep_2", settings=settings)
    handle = await again.dispatch("literal", prompt_id="x")
    result = await handle.result()
    assert (result["error"]["code"], result["error"]["retryable"]) == ("credentials_missing", True)
    assert "KEY" in result["error"]["message"]
    assert (await (await again.dispatch("both")).result())["error"]["message"].count("OTHER") == 0
    assert again.provider.sandboxes == []
    sent_again = await again.dispatch("literal", secrets={"KEY": "literal-secret"}, keep_on_disconnect=True)
    await (await again.agent()).finish()
    assert (await sent_again.result())["ok"] is True
    by_reference = await again.dispatch("ref", keep_on_disconnect=True)
    await (await again.agent(2)).finish()
    assert (await by_reference.result())["ok"] is True
    assert again.sandbox(2).spec.env["KEY"] == "from-the-vault"
    await again.close()


async def test_an_ending_that_the_store_refused_is_written_later() -> None:
    bed = await Bed.make()
    handle, agent, frame = await running(bed, prompt_id="x")
    bed.store.failing["end"] = 10
    agent.say("ok")
    agent.answer(frame)
    result = await handle.result()
    assert result["outcome"] == "completed"
    assert (await bed.store.turn("p", "s", handle.turn_id)).outcome is None
    await asyncio.sleep(30)
    assert (await bed.store.turn("p", "s", handle.turn_id)).outcome == "completed"
    row = await bed.store.prompt("p", "s", "x")
    assert (row.state, row.result) == ("done", result)
    again = await Bed.make(store=await crash(bed), replica_id="rep_2")
    assert endings(await again.history()) == ["completed"]
    await again.close()


async def test_no_turn_overtakes_an_ending_that_is_owed() -> None:
    bed = await Bed.make()
    handle, agent, frame = await running(bed)
    bed.store.failing["end"] = 4
    agent.say("ok")
    agent.answer(frame)
    await handle.result()
    with pytest.raises(RunnerError) as caught:
        await bed.dispatch(prompt="two")
    assert caught.value.code == "store_unavailable"
    assert (await bed.turn(nth=2))["start"] == "hit"
    events = await bed.history()
    assert endings(events) == ["completed", "completed"]
    assert_contiguous(events)
    assert (await bed.store.session("p", "s")).head_epoch == cursor(events[-1])[0]
    await bed.close()


async def test_a_store_that_raises_what_it_should_not_leaves_no_session_stuck() -> None:
    bed = await Bed.make()
    handle, agent, frame = await running(bed)
    bed.store.broken["end"] = ValueError("a bug")
    agent.say("ok")
    agent.answer(frame)
    assert (await handle.result())["outcome"] == "completed"
    bed.store.broken.clear()
    await asyncio.sleep(5)
    assert (await bed.turn(nth=2))["ok"] is True
    assert endings(await bed.history()) == ["completed", "completed"]
    await bed.close()


async def test_a_question_that_was_not_durable_at_once_can_be_answered_case_f15() -> None:
    bed = await Bed.make()
    bed.store.failing["append"] = 2
    handle, agent, frame = await running(bed)
    agent.ask(1)
    await handle.result()
    [question] = (await bed.sessions.view(CALLER, "s"))["open_interactions"]
    bed.store.failing.clear()
    assert (await bed.answer(question, decision="allow")).status == 200
    agent.say("ok")
    agent.answer(frame)
    await asyncio.sleep(1)
    assert endings(await bed.history()) == ["paused", "completed"]
    await bed.close()


# Case M4: the end of a runner.


async def test_a_drain_waits_settles_and_flushes_case_m4() -> None:
    bed = await Bed.make()
    short = await bed.dispatch("short", prompt_id="x")
    quick = await bed.agent(1)
    long = await bed.dispatch("long", prompt_id="x")
    slow = await bed.agent(2)
    parked = await bed.dispatch("parked", prompt_id="x", keep_on_disconnect=True)
    asking = await bed.agent(3)
    await asking.prompt()
    asking.ask(1)
    await parked.result()
    frame = await slow.prompt()
    slow.say("on my way")
    closing = asyncio.create_task(bed.close())
    await asyncio.sleep(1)
    assert not bed.sessions.has_capacity()
    assert bed.sessions.health()["draining"] is True
    with pytest.raises(RunnerError) as caught:
        await bed.dispatch("new")
    assert (caught.value.code, caught.value.retryable) == ("runner_at_capacity", True)
    [question] = (await bed.sessions.view(CALLER, "parked"))["open_interactions"]
    with pytest.raises(RunnerError) as caught:
        await bed.answer(question, "parked", decision="allow")
    assert (caught.value.code, caught.value.retryable) == ("runner_at_capacity", True)
    await quick.finish()
    assert (await short.result())["outcome"] == "completed"
    await slow.heard("session/cancel")
    assert asyncio.get_running_loop().time() == pytest.approx(30, abs=1)
    slow.answer(frame, "cancelled")
    result = await long.result()
    assert (result["outcome"], result["text"], result["error"]["code"]) == ("failed", "on my way", "execution_lost")
    assert "restarting" in result["error"]["message"]
    await closing
    assert asyncio.get_running_loop().time() < 35
    plane: Any = bed.replica.plane
    for session_id in ("short", "long", "parked"):
        lease = plane.lease("p", session_id)
        assert (lease.owner, lease.alive, lease.running) == (None, None, None)
    assert bed.provider.alive == set()
    store = bed.store
    store.unavailable = False
    again = await Bed.make(store=store, replica_id="rep_2")
    outcomes = {name: endings(await again.history(name)) for name in ("short", "long", "parked")}
    assert outcomes == {"short": ["completed"], "long": ["failed"], "parked": ["paused"]}
    assert (await again.sessions.view(CALLER, "parked"))["open_interactions"] == [question]
    assert (await again.cancel("parked", wait_seconds=5)).body["outcome"] == "stopped"
    for name in outcomes:
        events = await again.history(name)
        assert types(events).count("session_busy") == types(events).count("session_idle") == 1
        assert types(events).count("prompt_ended") == 1
        assert (await again.turn(name, agents=len(again.provider.sandboxes) + 1))["ok"] is True
    await again.close()


async def test_a_close_is_bounded_and_can_be_repeated() -> None:
    """An agent never settles, a start hangs, a teardown hangs, and the store and the plane are away."""
    bed = await Bed.make(settings={"turn": {"drain_seconds": 5}})
    stuck, _, _ = await running(bed)
    idle = await bed.dispatch("idle", keep_on_disconnect=True)
    await (await bed.agent(2)).finish()
    await idle.result()
    bed.provider.manners["gate:initialize"] = asyncio.Event()
    starting = await bed.dispatch("starting")
    await bed.agent(3)
    bed.provider.destroy_gate = asyncio.Event()
    began = asyncio.get_running_loop().time()
    closes = [asyncio.create_task(bed.close()) for _ in range(2)]
    await asyncio.wait(closes)
    assert [task.exception() for task in closes] == [None, None]
    assert asyncio.get_running_loop().time() - began < 5 + 15 + 15 + 20
    assert (await stuck.result())["error"]["code"] == "execution_lost"
    assert (await starting.result())["outcome"] == "failed"
    await bed.close()
    bed.store.unavailable = False
    again = await Bed.make(store=bed.store, replica_id="rep_2")
    for name in ("s", "idle", "starting"):
        assert len(endings(await again.history(name))) == 1
    await again.close()


async def test_a_drain_does_not_wait_for_what_was_refused() -> None:
    bed = await Bed.make()
    plane: Any = bed.replica.plane
    gate = plane.gates["running"] = Gate()
    plane.down = True
    refused = asyncio.create_task(bed.dispatch())
    await gate.reached.wait()
    closing = asyncio.create_task(bed.close())
    await asyncio.sleep(1)
    gate.open()
    with pytest.raises(RunnerError):
        await refused
    await closing
    assert asyncio.get_running_loop().time() < 5


async def test_what_was_shown_is_flushed_at_the_end() -> None:
    bed = await Bed.make()
    await bed.turn()
    handle, agent, _ = await running_again(bed)
    agent.ask(7)
    await handle.result()
    agent.ask(8, "t8")
    await asyncio.sleep(0)
    shown = await bed.history()
    await bed.close()
    bed.store.unavailable = False
    rows = await bed.store.records("p", "s", None, 1000)
    frames = ("message_delta", "tool_call", "tool_call_update")
    stored = [(row.epoch, row.n) for row in rows]
    assert [cursor(event) for event in shown if event["type"] not in frames and cursor(event) not in stored] == []


async def running_again(bed: Bed) -> tuple[Any, FakeAgent, dict[str, Any]]:
    handle = await bed.dispatch(prompt="two", keep_on_disconnect=True)
    agent = await bed.agent()
    return handle, agent, await agent.prompt(2)
