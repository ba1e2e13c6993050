"""The moment of a pause, and of its end: an answer, a Stop, a prompt, the seat, the agent itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.errors import RunnerError
from tests.session.asking import asking, check, paused, services
from tests.session.bed import CALLER, Bed
from tests.session.gates import Gate

pytestmark = pytest.mark.virtual_time


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
        bed.store.failing["admit"] = 2
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
@pytest.mark.parametrize("who", ["prompt", "refused"])
async def test_a_seat_that_is_lost_while_a_turn_is_admitted(bed: Bed, how: str, who: str) -> None:
    """A new prompt withdraws the chain all the same; behind a refused turn it waits on, cold."""
    one, agent, _, [question] = await paused(bed, prompt_id="one")
    gate = bed.store.gates["admit"] = Gate()
    if who == "refused":
        bed.store.failing["admit"] = 2
    if how == "expire":
        await asyncio.sleep(599)
    coming = asyncio.create_task(
        bed.answer(question, decision="allow")
        if who == "refused"
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
        await check(bed, ["paused", "completed"])
    else:
        with pytest.raises(RunnerError):
            await coming
        await asyncio.sleep(1)
        assert await bed.state() == "awaiting_approval"
        assert bed.provider.alive == set()
        assert (await bed.cancel(wait_seconds=5)).body["outcome"] == "stopped"
        await check(bed, ["paused", "cancelled"])
    ended = [e["data"] for e in await bed.history() if e["type"] == "prompt_ended"]
    assert ended[0] == {"prompt_id": "one", "state": "aborted"}
    assert (await bed.store.prompt("p", "s", "one")).state == one.state == "aborted"
    started = len(bed.provider.sandboxes)
    assert (await bed.turn(agents=started + (who != "prompt"), nth=1 + (who == "prompt")))["ok"]


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
