"""Two things in one moment: whichever comes first, each turn has one ending and nobody's word is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.errors import RunnerError
from tests.session.asking import check, services
from tests.session.bed import CALLER, Bed
from tests.session.gates import Gate
from tests.session.reading import (
    lease,
)

pytestmark = pytest.mark.virtual_time


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
    assert await bed.state() == "idle", "what is on its way can be aborted"
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


async def test_a_retry_that_read_an_older_row_attaches_all_the_same_case_b5(bed: Bed) -> None:
    """The whole turn happens between the moment in which the store was read and the one in which it answers."""
    await bed.turn()
    bed.store.latency = 1.0
    retry = asyncio.create_task(bed.dispatch(prompt_id="x"))
    await asyncio.sleep(1.5)
    bed.store.latency = 0.0
    first = await bed.dispatch(prompt_id="x", keep_on_disconnect=True)
    await (await bed.agent()).finish(2)
    result = await first.result()
    again = await retry
    assert await again.result() == result
    assert len((await bed.agent()).all("session/prompt")) == 2
    await check(bed, ["completed", "completed"])


async def test_a_retry_that_looks_its_prompt_up_while_the_session_is_deleted(bed: Bed) -> None:
    first = await bed.dispatch(prompt_id="x", keep_on_disconnect=True)
    await (await bed.agent()).finish()
    await first.result()
    gate = bed.store.gates["prompt"] = Gate()
    retry = asyncio.create_task(bed.dispatch(prompt_id="x"))
    await gate.reached.wait()
    await bed.sessions.delete(CALLER, "s")
    gate.open()
    with pytest.raises(RunnerError) as caught:
        await retry
    assert caught.value.code == "session_ended"


async def test_who_attaches_to_a_dispatch_whose_client_left_hears_that_it_was_refused(bed: Bed) -> None:
    """The client goes away while the first beat is out; the same id is sent again; then the beat is refused."""
    plane: Any = bed.replica.plane
    gate = plane.gates["running"] = Gate()
    first = asyncio.create_task(bed.dispatch(prompt="one", prompt_id="one"))
    await gate.reached.wait()
    first.cancel()
    again = asyncio.create_task(bed.dispatch(prompt="one", prompt_id="one"))
    await asyncio.sleep(0.1)
    plane.down = True
    gate.open()
    with pytest.raises(RunnerError) as caught:
        await asyncio.wait_for(again, 60)
    assert caught.value.code == "plane_unavailable"
    plane.down = False
    del plane.gates["running"]


async def test_a_prompt_that_is_stopped_on_its_way_has_its_result_although_its_turn_never_came(bed: Bed) -> None:
    """The beat of its turn gets no answer; who attached to it meanwhile is told that it was cancelled."""
    await bed.turn(prompt="before")
    plane: Any = bed.replica.plane
    gate = plane.gates["running"] = Gate()
    first = asyncio.create_task(bed.dispatch(prompt="one", prompt_id="one", keep_on_disconnect=True))
    await gate.reached.wait()
    await bed.cancel()
    again = await bed.dispatch(prompt="one", prompt_id="one", keep_on_disconnect=True)
    plane.down = True
    gate.open()
    with pytest.raises(RunnerError):
        await first
    assert (await asyncio.wait_for(again.result(), 60))["outcome"] == "cancelled"
    plane.down = False
