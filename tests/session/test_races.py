"""Two things in one moment: whichever comes first, each turn has one ending and nobody's word is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.session.services import Services
from tests.session.bed import CALLER, Bed, types
from tests.session.fake_agent import FakeAgent
from tests.session.gates import Gate
from tests.session.reading import assert_ordered

pytestmark = pytest.mark.virtual_time


def services(bed: Bed) -> Services:
    return bed.replica.services


def lease(bed: Bed, session_id: str = "s") -> Any:
    plane: Any = bed.replica.plane
    return plane.lease("p", session_id)


async def asking(bed: Bed, count: int = 1, **fields: Any) -> tuple[Any, FakeAgent, dict[str, Any]]:
    """A turn whose agent asks, not paused yet."""
    handle = await bed.dispatch(keep_on_disconnect=True, **fields)
    agent = await bed.agent()
    frame = await agent.prompt()
    for n in range(count):
        agent.ask(n, f"t{n}")
    return handle, agent, frame


async def paused(bed: Bed, count: int = 1, **fields: Any) -> tuple[Any, FakeAgent, dict[str, Any], list[str]]:
    handle, agent, frame = await asking(bed, count, **fields)
    assert (await handle.result())["outcome"] == "paused"
    return handle, agent, frame, (await bed.sessions.view(CALLER, "s"))["open_interactions"]


async def check(bed: Bed, outcomes: list[str]) -> None:
    """One ending each, one prompt_ended each, busy and idle in turns, cursors in order, no lease but a seat's."""
    await asyncio.sleep(1)
    events = await bed.history()
    assert_ordered(events)
    assert [event["data"]["outcome"] for event in events if event["type"] == "done"] == outcomes
    ended = [event["data"]["prompt_id"] for event in events if event["type"] == "prompt_ended"]
    assert len(ended) == len(set(ended))
    beats = [kind for kind in types(events) if kind in ("session_busy", "session_idle")]
    assert beats == ["session_busy", "session_idle"] * (len(beats) // 2)
    closed = [event["data"]["interaction_id"] for event in events if event["type"] == "interaction_closed"]
    asked = [event["data"]["interaction_id"] for event in events if event["type"] == "interaction_requested"]
    assert sorted(closed) == sorted(asked)
    rows = await bed.store.interactions("p", "s")
    assert {row.status for row in rows} <= {"consumed", "cancelled", "expired"}
    assert (await bed.state(), lease(bed).running) == ("idle", None)
    assert {seat.seat_id for seat in bed.pool.book.seats.values()} == bed.provider.alive


# Case B6: a new prompt and the Stop that the user believes came before it.


@pytest.mark.parametrize("first", ["prompt", "cancel", "both"])
async def test_a_prompt_and_a_stop_in_either_order_case_b6(bed: Bed, first: str) -> None:
    one = await bed.dispatch(prompt="one", keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    agent.say("part")
    if first == "prompt":
        two = await bed.dispatch(prompt="two", prompt_id="two")
        await bed.cancel(expected_execution_id=one.turn_id)
    elif first == "cancel":
        await bed.cancel(expected_execution_id=one.turn_id)
        two = await bed.dispatch(prompt="two", prompt_id="two")
    else:
        two, _ = await asyncio.gather(bed.dispatch(prompt="two", prompt_id="two"), bed.cancel())
    assert two.refused is not None, "the client still has the text"
    assert await bed.store.prompt("p", "s", "two") is None
    await agent.heard("session/cancel")
    agent.answer(frame, "cancelled")
    assert (await one.result())["outcome"] == "cancelled"
    again = await bed.dispatch(prompt="two", prompt_id="two", keep_on_disconnect=True)
    frame = await agent.prompt(2)
    assert frame["params"]["prompt"] == [{"type": "text", "text": "two"}]
    agent.say("done")
    agent.answer(frame)
    result = await again.result()
    assert (result["outcome"], result["start"], result["text"]) == ("completed", "hit", "done")
    await check(bed, ["cancelled", "completed"])


async def test_a_prompt_without_the_stop_is_refused_until_the_turn_ends_case_b6(bed: Bed) -> None:
    one = await bed.dispatch(prompt="one", keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    for _ in range(5):
        two = await bed.dispatch(prompt="two", prompt_id="two")
        assert two.refused is not None
        assert two.refused.code == "session_turn_in_use"
        await asyncio.sleep(1)
    agent.say("all of it")
    agent.answer(frame)
    assert (await one.result())["text"] == "all of it"
    again = await bed.dispatch(prompt="two", prompt_id="two", keep_on_disconnect=True)
    await agent.finish(2)
    assert (await again.result())["ok"] is True
    await check(bed, ["completed", "completed"])


@pytest.mark.parametrize("call", ["admit", "end"])
async def test_a_stop_while_the_next_prompt_knocks_case_b6(bed: Bed, call: str) -> None:
    """The Stop of turn 1 arrives while turn 2 is being admitted, or while turn 1 is being written down."""
    one = await bed.dispatch(prompt="one", keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    gate = Gate()
    if call == "end":
        bed.store.gates["end"] = gate
    agent.say("ok")
    agent.answer(frame)
    if call == "end":
        await gate.reached.wait()
        reply = await bed.cancel(expected_execution_id=one.turn_id)
        two = await bed.dispatch(prompt="two")
        assert two.refused is not None
        gate.open()
        assert (await one.result())["outcome"] == "completed"
        assert reply.body["outcome"] == "not_running"
        assert (await bed.turn(prompt="two", nth=2))["ok"] is True
        await check(bed, ["completed", "completed"])
        return
    await one.result()
    bed.store.gates["admit"] = gate
    dispatching = asyncio.create_task(bed.dispatch(prompt="two", keep_on_disconnect=True))
    await gate.reached.wait()
    with pytest.raises(RunnerError) as caught:
        await bed.cancel(expected_execution_id=one.turn_id)
    assert caught.value.code == "execution_mismatch"
    gate.open()
    await agent.finish(2)
    assert (await (await dispatching).result())["outcome"] == "completed"
    await check(bed, ["completed", "completed"])


# A pause, and what comes in that moment.


async def test_a_stop_while_the_pause_is_written_stops_the_chain_case_f11(bed: Bed) -> None:
    gate = bed.store.gates["end"] = Gate()
    handle, agent, frame = await asking(bed)
    await gate.reached.wait()
    stopping = asyncio.create_task(bed.cancel(wait_seconds=20))
    await asyncio.sleep(1)
    gate.open()
    await agent.heard("session/cancel")
    agent.answer(frame, "cancelled")
    assert (await stopping).body["outcome"] == "stopped"
    assert (await agent.answered(0))["result"] == {"outcome": {"outcome": "cancelled"}}
    assert (await handle.result())["outcome"] == "paused"
    await check(bed, ["paused", "cancelled"])
    assert (await bed.turn(nth=2))["start"] == "hit"


async def test_an_answer_while_the_pause_is_written_resumes(bed: Bed) -> None:
    gate = bed.store.gates["end"] = Gate()
    _, agent, frame = await asking(bed)
    await gate.reached.wait()
    [question] = (await bed.sessions.view(CALLER, "s"))["open_interactions"]
    answering = asyncio.create_task(bed.answer(question, decision="allow"))
    await asyncio.sleep(1)
    gate.open()
    assert (await answering).status == 200
    assert (await agent.answered(0))["result"]["outcome"]["optionId"] == "yes"
    agent.say("ran it")
    agent.answer(frame)
    await check(bed, ["paused", "completed"])


async def test_a_kill_while_the_pause_is_written(bed: Bed) -> None:
    gate = bed.store.gates["end"] = Gate()
    await asking(bed)
    await gate.reached.wait()
    killing = asyncio.create_task(bed.sessions.kill(CALLER, "s"))
    await asyncio.sleep(1)
    gate.open()
    assert (await killing).body["outcome"] == "stopped"
    assert bed.provider.alive == set()
    await check(bed, ["paused", "cancelled"])


@pytest.mark.parametrize("order", ["answer first", "stop first"])
async def test_an_answer_and_a_stop_at_once_case_f11(bed: Bed, order: str) -> None:
    _, agent, frame, [question] = await paused(bed)
    calls = [bed.answer(question, decision="allow"), bed.cancel()]
    replies = asyncio.gather(*(calls if order == "answer first" else reversed(calls)), return_exceptions=True)
    await agent.heard("session/cancel")
    agent.answer(frame, "cancelled")
    for reply in await replies:
        assert not isinstance(reply, BaseException) or isinstance(reply, RunnerError)
    assert len([f for f in agent.frames if "method" not in f and f.get("id") == 0]) == 1, "one answer on the wire"
    await check(bed, ["paused", "cancelled"])
    assert (await bed.turn(nth=2))["start"] == "hit"


async def test_a_second_answer_while_the_first_resumes_case_f8(bed: Bed) -> None:
    _, agent, frame, [one, two] = await paused(bed, 2)
    gate = bed.store.gates["admit"] = Gate()
    first = asyncio.create_task(bed.answer(one, decision="allow"))
    await gate.reached.wait()
    second = asyncio.create_task(bed.answer(two, decision="deny"))
    await asyncio.sleep(1)
    gate.open()
    assert [(await first).status, (await second).status] == [200, 200]
    assert (await agent.answered(0))["result"]["outcome"]["optionId"] == "yes"
    assert (await agent.answered(1))["result"]["outcome"]["optionId"] == "no"
    agent.say("ok")
    agent.answer(frame)
    await check(bed, ["paused", "completed"])


@pytest.mark.parametrize("fails", [True, False])
async def test_a_permission_that_is_asked_while_the_chain_resumes(bed: Bed, fails: bool) -> None:
    """What the agent says in that moment is held; it may not take the cursors of the turn that is being admitted."""
    _, agent, frame, [one] = await paused(bed)
    gate = bed.store.gates["admit"] = Gate()
    answering = asyncio.create_task(bed.answer(one, decision="allow"))
    await gate.reached.wait()
    agent.ask(5, "t5")
    agent.say("meanwhile ")
    await asyncio.sleep(1)
    if fails:
        bed.store.failing["admit"] = 1
    gate.open()
    if fails:
        with pytest.raises(RunnerError):
            await answering
        await asyncio.sleep(1)
        assert await bed.state() == "awaiting_approval"
        assert len((await bed.sessions.view(CALLER, "s"))["open_interactions"]) == 2
        assert (await bed.answer(one, decision="allow")).status == 200
    else:
        assert (await answering).status == 200
    await asyncio.sleep(1)
    assert await bed.state() == "awaiting_approval"
    [two] = (await bed.sessions.view(CALLER, "s"))["open_interactions"]
    await bed.answer(two, decision="deny")
    agent.say("done")
    agent.answer(frame)
    outcomes = ["paused", "paused", "completed"]
    await check(bed, outcomes)


@pytest.mark.parametrize("how", ["exit", "expire"])
@pytest.mark.parametrize("who", ["answer", "prompt", "refused"])
async def test_a_seat_that_is_lost_while_a_turn_is_admitted(bed: Bed, how: str, who: str) -> None:
    one, agent, _, [question] = await paused(bed, prompt_id="one")
    gate = bed.store.gates["admit"] = Gate()
    if who == "refused":
        bed.store.failing["admit"] = 1
    if how == "expire":
        await asyncio.sleep(599)
    coming = asyncio.create_task(
        bed.answer(question, decision="allow")
        if who != "prompt"
        else bed.dispatch(prompt="two", keep_on_disconnect=True)
    )
    await gate.reached.wait()
    if how == "exit":
        agent.exit(3)
    await asyncio.sleep(5)
    assert bed.provider.alive == set() or how == "exit"
    gate.open()
    if who == "prompt":
        handle: Any = await coming
        await (await bed.agent(2)).finish()
        result = await handle.result()
        assert (result["outcome"], result["start"]) == ("completed", "cold")
    else:
        with pytest.raises(RunnerError):
            await coming
    await check(bed, {"answer": ["paused", "failed"], "prompt": ["paused", "completed"], "refused": ["paused"]}[who])
    state = "aborted" if (who, how) == ("prompt", "exit") else "failed"
    ended = [e["data"] for e in await bed.history() if e["type"] == "prompt_ended"]
    assert ended[0] == {"prompt_id": "one", "state": state}
    assert (await bed.store.prompt("p", "s", "one")).state == state
    assert (await bed.turn(agents=len(bed.provider.sandboxes) + (who != "prompt"), nth=1 + (who == "prompt")))["ok"]
    assert one.prompt_id == "one"


async def test_a_stop_while_a_chain_is_withdrawn_starts_no_other_agent(bed: Bed) -> None:
    await paused(bed)
    bed.provider.start_gate = asyncio.Event()
    two = await bed.dispatch(prompt="two", keep_on_disconnect=True)
    await asyncio.sleep(1)
    began = asyncio.get_running_loop().time()
    reply = await bed.cancel(wait_seconds=30)
    assert reply.body["outcome"] == "stopped"
    assert asyncio.get_running_loop().time() - began < 10
    result = await two.result()
    assert (result["outcome"], "cancel_settled" in result) == ("cancelled", False)
    assert len(bed.provider.sandboxes) == 1
    await check(bed, ["paused", "cancelled"])
    bed.provider.start_gate = None
    assert (await bed.turn(agents=2))["reason"] == "not_settled"


@pytest.mark.parametrize("reason", ["cancel", "kill"])
async def test_a_stop_before_a_new_prompt_began_still_withdraws_the_chain(bed: Bed, reason: str) -> None:
    _, agent, frame, _ = await paused(bed)
    gate = bed.store.gates["admit"] = Gate()
    two = asyncio.create_task(bed.dispatch(prompt="two", keep_on_disconnect=True))
    await gate.reached.wait()
    stop = bed.cancel() if reason == "cancel" else bed.sessions.kill(CALLER, "s")
    stopping = asyncio.create_task(stop)
    await asyncio.sleep(1)
    gate.open()
    if reason == "cancel":
        await agent.heard("session/cancel")
        agent.answer(frame, "cancelled")
    assert (await (await two).result())["outcome"] == "cancelled"
    await stopping
    assert len(agent.all("session/prompt")) == 1, "the new prompt was never sent"
    await check(bed, ["paused", "cancelled"])
    assert bool(bed.provider.alive) is (reason == "cancel")


# Stops of a start.


@pytest.mark.parametrize("unproven", [0, 4])
async def test_a_failed_start_counts_until_it_is_proven_gone(unproven: int) -> None:
    bed = await Bed.make(settings={"acp": {"start_seconds": 5}, "pool": {"max_seats": 1}})
    bed.provider.manners["session/new"] = False
    bed.provider.unproven = unproven
    handle = await bed.dispatch()
    assert (await handle.result())["error"]["code"] == "harness_unresponsive"
    assert bed.pool.book.taken == len(bed.provider.alive) == bool(unproven)
    bed.provider.manners.clear()
    result = await bed.turn(agents=2)
    assert (result["ok"], result["reason"]) == (True, "harness_unresponsive")
    assert bed.provider.alive == {seat.seat_id for seat in bed.pool.book.seats.values()}
    await bed.close()


async def test_a_provider_that_does_not_keep_its_deadline_is_given_up_case_c14() -> None:
    bed = await Bed.make(settings={"acp": {"start_seconds": 5}})
    bed.provider.start_gate = asyncio.Event()
    handle = await bed.dispatch()
    assert (await handle.result())["error"]["code"] == "sandbox_start_failed"
    assert asyncio.get_running_loop().time() == pytest.approx(10, abs=1)
    bed.provider.start_gate = None
    assert (await bed.turn())["reason"] == "sandbox_start_failed"
    await bed.close()


async def test_a_stop_while_settings_are_applied_is_heard_and_the_agent_not_trusted(bed: Bed) -> None:
    bed.provider.manners["new"] = {"modes": {"currentModeId": "a", "availableModes": [{"id": "a"}, {"id": "b"}]}}
    await bed.turn()
    bed.provider.manners["gate:session/set_mode"] = asyncio.Event()
    handle = await bed.dispatch(prompt="two", mode="b", keep_on_disconnect=True)
    await (await bed.agent()).heard("session/set_mode")
    began = asyncio.get_running_loop().time()
    assert (await bed.cancel(wait_seconds=20)).body["outcome"] == "stopped"
    assert asyncio.get_running_loop().time() == began
    assert (await handle.result())["outcome"] == "cancelled"
    bed.provider.manners.pop("gate:session/set_mode")
    third = await bed.turn(agents=2)
    assert (third["reason"], third["context_lost"]) == ("not_settled", True)
    await check(bed, ["completed", "cancelled", "completed"])


# The ends of sessions and seats.


async def test_kill_of_a_paused_chain_needs_no_plane(bed: Bed) -> None:
    plane: Any = bed.replica.plane
    one, _, _, [question] = await paused(bed, prompt_id="one")
    plane.down = True
    await bed.sessions.kill(CALLER, "s")
    assert bed.provider.alive == set()
    plane.down = False
    await asyncio.sleep(30)
    with pytest.raises(RunnerError) as caught:
        await bed.answer(question, decision="allow")
    assert caught.value.code == "interaction_closed"
    await check(bed, ["paused"])
    assert one.state == "failed"
    assert (await bed.turn(agents=2))["ok"] is True


@pytest.mark.parametrize("end", ["kill", "expire", "exit"])
async def test_a_seat_that_goes_takes_its_lease_along(bed: Bed, end: str) -> None:
    await bed.turn()
    assert lease(bed).owner == "rep_1"
    if end == "kill":
        await bed.sessions.kill(CALLER, "s")
    elif end == "exit":
        (await bed.agent()).exit(0)
    else:
        await asyncio.sleep(61)
    await asyncio.sleep(0.1)
    assert (lease(bed).owner, len(services(bed).beats)) == (None, 0)


async def test_a_parked_seat_whose_lease_is_lost_goes(bed: Bed) -> None:
    await bed.turn()
    services(bed).beats._on_lost("turn_1", Any)  # type: ignore[arg-type]
    handle = await bed.dispatch(prompt="two", keep_on_disconnect=True)
    await (await bed.agent(1)).finish(2)
    assert (await handle.result())["start"] == "hit", "another turn's lease"
    last = (await bed.sessions.view(CALLER, "s"))["last_turn"]["turn_id"]
    services(bed).beats._on_lost(last, Any)  # type: ignore[arg-type]
    await asyncio.sleep(0.1)
    assert bed.provider.alive == set()
    assert (await bed.turn(agents=2))["reason"] == "lease_lost"


@pytest.mark.parametrize("call", ["save_session", "delete_session_content", "append"])
async def test_a_delete_that_failed_can_be_tried_again(bed: Bed, call: str) -> None:
    await bed.turn()
    handle = await bed.dispatch(prompt="two", keep_on_disconnect=True)
    await (await bed.agent()).prompt(2)
    bed.store.failing[call] = 1
    if call == "append":
        bed.store.failing["end"] = 4
    with pytest.raises(RunnerError) as caught:
        await bed.sessions.delete(CALLER, "s")
    assert caught.value.code == "store_unavailable"
    bed.store.failing.clear()
    if call == "save_session":
        assert (await bed.store.session("p", "s")).ended_at is None, "not even by the ending of its turn"
    assert (await handle.result())["outcome"] == "cancelled"
    assert (await bed.sessions.delete(CALLER, "s")).status == 200
    assert bed.provider.removed == [("p", "s")]
    assert (await bed.store.session("p", "s")).ended_at is not None
    with pytest.raises(RunnerError) as caught:
        await bed.dispatch(prompt="three")
    assert caught.value.code == "session_ended"
    assert bed.provider.alive == set()


async def test_a_disconnect_does_not_stop_a_delete_half_way(bed: Bed) -> None:
    await bed.turn()
    gate = bed.store.gates["save_session"] = Gate()
    deleting = asyncio.create_task(bed.sessions.delete(CALLER, "s"))
    await gate.reached.wait()
    deleting.cancel()
    await asyncio.wait([deleting])
    gate.open()
    await asyncio.sleep(1)
    assert bed.provider.removed == [("p", "s")]


async def test_a_prompt_that_is_being_looked_up_finds_the_session_ended(bed: Bed) -> None:
    await bed.turn()
    gate = bed.store.gates["prompt"] = Gate()
    coming = asyncio.create_task(bed.dispatch(prompt="two", prompt_id="two"))
    await gate.reached.wait()
    await bed.sessions.delete(CALLER, "s")
    gate.open()
    with pytest.raises(RunnerError) as caught:
        await coming
    assert caught.value.code == "session_ended"
    assert bed.provider.alive == set()


async def test_a_new_session_whose_first_dispatch_fails_is_still_one_session(bed: Bed) -> None:
    """A second dispatch was on its way in: its turn must be seen and stopped like any other."""
    gate = bed.store.gates["prompt"] = Gate()
    coming = asyncio.create_task(bed.dispatch(prompt="two", prompt_id="two", keep_on_disconnect=True))
    await gate.reached.wait()
    with pytest.raises(RunnerError):
        await bed.dispatch(harness="nope")
    with pytest.raises(RunnerError) as caught:
        await bed.state()
    assert caught.value.code == "not_found"
    gate.open()
    handle = await coming
    agent = await bed.agent()
    frame = await agent.prompt()
    assert await bed.state() == "running"
    assert (await bed.cancel()).body["turn_id"] == handle.turn_id
    await agent.heard("session/cancel")
    agent.answer(frame, "cancelled")
    assert (await handle.result())["outcome"] == "cancelled"
    await check(bed, ["cancelled"])


@pytest.mark.parametrize("late", ["answer", "cancel"])
async def test_a_turn_that_comes_too_late_to_resume_its_chain_is_refused(bed: Bed, late: str) -> None:
    """Its beat was slow: a new prompt has withdrawn the chain and ended meanwhile."""
    plane: Any = bed.replica.plane
    _, agent, frame, [question] = await paused(bed)
    gate = plane.gates["running"] = Gate()
    slow = asyncio.create_task(
        bed.answer(question, decision="allow") if late == "answer" else bed.cancel(wait_seconds=2)
    )
    await gate.reached.wait()
    del plane.gates["running"]
    two = await bed.dispatch(prompt="two", keep_on_disconnect=True)
    await agent.heard("session/cancel")
    agent.answer(frame, "cancelled")
    await agent.finish(2)
    assert (await two.result())["ok"] is True
    gate.open()
    if late == "answer":
        with pytest.raises(RunnerError):
            await slow
    else:
        assert (await slow).body["outcome"] == "not_running"
    await check(bed, ["paused", "completed"])
    assert (await bed.turn(nth=3))["start"] == "hit"


async def test_a_paused_agent_that_floods_is_ended(bed: Bed) -> None:
    one, agent, _, _ = await paused(bed)
    for _ in range(40):
        agent.say("x" * 1_000_000)
        await asyncio.sleep(0)
    await asyncio.sleep(1)
    assert bed.provider.alive == set()
    assert one.state == "failed"
    await check(bed, ["paused"])


async def test_a_chain_that_goes_on_by_itself_waits_for_the_plane(bed: Bed) -> None:
    """Nobody can admit its turn: it is tried again, not in one loop step after the other."""
    plane: Any = bed.replica.plane
    one, agent, frame, _ = await paused(bed)
    plane.down = True
    minted = services(bed).ids.mint("turn")
    agent.say("changed my mind")
    agent.answer(frame)
    await asyncio.sleep(30)
    assert int(services(bed).ids.mint("turn").split("_")[1]) - int(minted.split("_")[1]) < 40
    plane.down = False
    await asyncio.sleep(5)
    assert one.state == "done"
    await check(bed, ["paused", "completed"])
