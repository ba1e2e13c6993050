"""A paused chain and several replicas: whoever is asked first goes on with it, and nobody twice (DESIGN 3.1, 3.8)."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from runner.errors import RunnerError
from tests.session.bed import CALLER, Bed, types
from tests.session.fake_agent import FakeAgent
from tests.session.gates import Gate
from tests.session.reading import assert_ordered
from tests.session.several import LEASE_SECONDS, Several

pytestmark = pytest.mark.virtual_time


async def paused(bed: Bed, count: int = 1, nth: int = 1) -> tuple[FakeAgent, list[str]]:
    handle = await bed.dispatch(prompt_id="one", keep_on_disconnect=True)
    agent = await bed.agent(nth)
    await agent.prompt()
    for n in range(count):
        agent.ask(n, f"t{n}", rawInput={"command": str(n)})
    assert (await handle.result())["outcome"] == "paused"
    return agent, (await bed.sessions.view(CALLER, "s"))["open_interactions"]


async def goes_on(bed: Bed, answering: asyncio.Task[Any], nth: int = 1, command: str = "0") -> None:
    """The replica's new agent asks the same again, gets the answer, and ends the turn."""
    agent = await bed.agent(nth)
    frame = await agent.prompt()
    agent.ask(9, "t9", rawInput={"command": command})
    assert (await answering).status == 200
    agent.say("ok")
    agent.answer(frame)
    await asyncio.sleep(1)


def outcomes(events: list[dict[str, Any]]) -> list[str]:
    return [event["data"]["outcome"] for event in events if event["type"] == "done"]


async def assert_over(several: Several, expected: list[str]) -> None:
    """Every replica tells the same: each turn one ending, no card, nobody running."""
    for bed in several.beds.values():
        events = await bed.history()
        assert_ordered(events)
        assert outcomes(events) == expected
        assert await bed.state() == "idle"
        assert (await bed.sessions.interactions(CALLER, "s", "pending"))["items"] == []
        closed = [event["data"]["interaction_id"] for event in events if event["type"] == "interaction_closed"]
        asked = [event["data"]["interaction_id"] for event in events if event["type"] == "interaction_requested"]
        assert sorted(closed) == sorted(asked)
        assert types(events).count("prompt_ended") == len({e["prompt_id"] for e in events if e["prompt_id"]})


@pytest.mark.parametrize("how", ["exit", "window", "death", "silence", "drain"])
async def test_any_replica_goes_on_with_a_cold_chain_case_f9(several: Several, how: str) -> None:
    one, two = await several.replica("a"), await several.replica("b")
    agent, [question] = await paused(one)
    if how == "exit":
        agent.exit(3)
        await asyncio.sleep(1)
    elif how == "window":
        await asyncio.sleep(601)
    elif how == "drain":
        several.beds.pop("a")
        one.replica.services.store.close = _nothing  # type: ignore[method-assign]
        await one.close()
    else:
        await several.kill("a", proven=how == "death")
        await asyncio.sleep(LEASE_SECONDS + 1 if how == "silence" else 3)
    view = await two.sessions.view(CALLER, "s")
    assert (view["state"], view["open_interactions"]) == ("awaiting_approval", [question])
    await goes_on(two, asyncio.create_task(two.answer(question, decision="allow")))
    await assert_over(several, ["paused", "completed"])
    again = await two.dispatch(prompt="hello", prompt_id="one")
    assert (await again.result())["outcome"] == "completed"


async def _nothing() -> None:
    return None


async def test_a_live_chain_is_not_resumed_elsewhere(several: Several) -> None:
    """Its agent waits there: the answer is refused here, and the question stays open for whom it is forwarded to."""
    one, two = await several.replica("a"), await several.replica("b")
    agent, [question] = await paused(one)
    with pytest.raises(RunnerError) as caught:
        await two.answer(question, decision="allow")
    assert (caught.value.code, caught.value.retryable) == ("owned_elsewhere", True)
    assert two.provider.sandboxes == []
    assert (await one.sessions.view(CALLER, "s"))["open_interactions"] == [question]
    assert (await one.answer(question, decision="allow")).status == 200
    assert (await agent.answered(0))["result"]["outcome"]["optionId"] == "yes"
    agent.say("ok")
    agent.answer(await agent.prompt())
    await asyncio.sleep(1)
    await assert_over(several, ["paused", "completed"])


@pytest.mark.parametrize("verdicts", [("allow", "deny"), ("deny", "allow"), ("allow", "allow")])
async def test_two_replicas_and_two_verdicts_case_f12(several: Several, verdicts: tuple[str, str]) -> None:
    one, two = await several.replica("a"), await several.replica("b")
    agent, [question] = await paused(one)
    agent.exit(3)
    await asyncio.sleep(1)
    calls = [
        asyncio.create_task(bed.answer(question, decision=word)) for bed, word in zip((one, two), verdicts, strict=True)
    ]
    await asyncio.sleep(1)
    started = [bed for bed, agents in ((one, 2), (two, 1)) if len(bed.provider.sandboxes) == agents]
    assert len(started) == 1, "one of them goes on"
    winner = calls[0] if started[0] is one else calls[1]
    await goes_on(started[0], winner, 2 if started[0] is one else 1)
    loser = calls[1] if winner is calls[0] else calls[0]
    with pytest.raises(RunnerError) as caught:
        await loser
    assert caught.value.code in ("interaction_conflict", "owned_elsewhere", "interaction_closed")
    await assert_over(several, ["paused", "completed"])


async def test_two_questions_answered_at_two_replicas_case_f8(several: Several) -> None:
    """One goes on with the session; the other one's answer is kept open, and given where the session is now."""
    one, two = await several.replica("a"), await several.replica("b")
    agent, [first, second] = await paused(one, 2)
    agent.exit(3)
    await asyncio.sleep(1)
    answering = asyncio.create_task(two.answer(first, decision="allow"))
    agent = await two.agent()
    frame = await agent.prompt()
    with pytest.raises(RunnerError) as caught:
        await one.answer(second, decision="deny")
    assert caught.value.code == "owned_elsewhere"
    assert [item["status"] for item in (await one.sessions.interactions(CALLER, "s", None))["items"]] == [
        "answered",
        "pending",
    ]
    agent.ask(8, "t8", rawInput={"command": "0"})
    assert (await answering).status == 200
    agent.ask(9, "t9", rawInput={"command": "1"})
    await asyncio.sleep(1)
    assert (await two.answer(second, decision="deny")).status == 200
    assert (await agent.answered(9))["result"]["outcome"]["optionId"] == "no"
    agent.answer(frame)
    await asyncio.sleep(1)
    await assert_over(several, ["paused", "paused", "completed"])


async def test_a_chain_that_went_on_elsewhere_is_not_gone_on_with_from_memory(several: Several) -> None:
    """The first replica remembers a cold chain; another one resumed it, paused again, and lost its agent too."""
    one, two = await several.replica("a"), await several.replica("b")
    agent, [first, second] = await paused(one, 2)
    agent.exit(3)
    await asyncio.sleep(1)
    answering = asyncio.create_task(two.answer(first, decision="allow"))
    agent = await two.agent()
    await agent.prompt()
    agent.ask(8, "t8", rawInput={"command": "0"})
    assert (await answering).status == 200
    agent.ask(9, "t9", rawInput={"command": "1"})
    await asyncio.sleep(1)
    assert await two.state() == "awaiting_approval"
    agent.exit(3)
    await asyncio.sleep(1)
    assert (await one.sessions.view(CALLER, "s"))["open_interactions"] == [second]
    await goes_on(one, asyncio.create_task(one.answer(second, decision="deny")), 2, "1")
    await assert_over(several, ["paused", "paused", "completed"])


@pytest.mark.parametrize("what", ["stop", "prompt", "kill"])
async def test_a_cold_chain_ends_at_any_replica_case_f11(several: Several, what: str) -> None:
    one, two = await several.replica("a"), await several.replica("b")
    agent, [question] = await paused(one)
    agent.exit(3)
    await asyncio.sleep(1)
    if what == "prompt":
        handle = await two.dispatch(prompt="never mind", prompt_id="two", keep_on_disconnect=True)
        await (await two.agent()).finish()
        assert (await handle.result())["ok"]
        await assert_over(several, ["paused", "completed"])
    else:
        call = two.cancel(wait_seconds=5) if what == "stop" else two.sessions.kill(CALLER, "s")
        assert (await call).body["outcome"] == "stopped"
        assert two.provider.sandboxes == []
        await assert_over(several, ["paused", "cancelled"])
    with pytest.raises(RunnerError) as caught:
        await one.answer(question, decision="allow")
    assert caught.value.code == "interaction_closed"


async def test_a_cold_chain_expires_once_whoever_sweeps(several: Several) -> None:
    one, two = await several.replica("a"), await several.replica("b")
    agent, [question] = await paused(one)
    agent.exit(3)
    await asyncio.sleep(1)
    row = await several.store.interaction("p", question)
    assert row is not None
    soon = dataclasses.replace(row, expires_at=two.replica.services.clock.now_ms() + 5000)
    await several.store.append([], [soon])
    await asyncio.sleep(30)
    await assert_over(several, ["paused", "failed"])
    assert [item["status"] for item in (await one.sessions.interactions(CALLER, "s", None))["items"]] == ["expired"]


@pytest.mark.parametrize("sent", [False, True])
async def test_an_answer_that_died_with_its_replica_case_f2(several: Several, sent: bool) -> None:
    """Before the new agent had anything the answer comes back; behind that nobody knows what it did."""
    one, two = await several.replica("a"), await several.replica("b")
    agent, [question] = await paused(one)
    agent.exit(3)
    await asyncio.sleep(1)
    if not sent:
        one.provider.start_gate = asyncio.Event()
    answering = asyncio.create_task(one.answer(question, decision="allow"))
    if sent:
        await (await one.agent(2)).prompt()
    await asyncio.sleep(1)
    await several.kill("a")
    answering.cancel()
    await asyncio.sleep(3)
    assert outcomes(await two.history()) == ["paused", "lost"]
    [item] = (await two.sessions.interactions(CALLER, "s", None))["items"]
    if sent:
        assert (item["status"], await two.state()) == ("expired", "idle")
        return
    assert item["status"] == "pending"
    assert "runner stopped" in item["last_error"]
    assert (await two.sessions.view(CALLER, "s"))["open_interactions"] == [question]
    assert (await two.sessions.sessions(CALLER, 5, None))["items"][0]["state"] == "awaiting_approval"
    await goes_on(two, asyncio.create_task(two.answer(question, decision="deny")))
    await assert_over(several, ["paused", "lost", "completed"])


async def test_a_claim_of_a_dead_replica_is_shown_again_by_the_sweep_case_f2(several: Several) -> None:
    """It died between the claim and its turn: nobody has to know the question's id to find it."""
    one, two = await several.replica("a"), await several.replica("b")
    agent, [question] = await paused(one)
    agent.exit(3)
    await asyncio.sleep(1)
    gate = several.store.gates["admit"] = Gate()
    answering = asyncio.create_task(one.answer(question, decision="allow"))
    await gate.reached.wait()
    answering.cancel()
    await several.kill("a")
    del several.store.gates["admit"]
    assert (await two.sessions.interactions(CALLER, None, "pending"))["items"] == []
    await asyncio.sleep(25)
    [item] = (await two.sessions.interactions(CALLER, None, "pending"))["items"]
    assert (item["interaction_id"], "runner stopped" in item["last_error"]) == (question, True)
    assert (await two.sessions.view(CALLER, "s"))["open_interactions"] == [question]
    await goes_on(two, asyncio.create_task(two.answer(question, decision="deny")))
    await assert_over(several, ["paused", "completed"])


@pytest.mark.parametrize("how", ["stop", "prompt"])
async def test_a_warm_chain_that_ended_elsewhere_is_not_ended_again(several: Several, how: str) -> None:
    """The plane is away for the other replica, so it asks nobody; the one with the agent hears of it later."""
    one, two = await several.replica("a"), await several.replica("b")
    await paused(one)
    side = several.sides["b"]

    async def away(*args: Any) -> Any:
        raise RunnerError("plane_unavailable", "The plane is away.")

    side.open.clear()
    side.look = side.push = side.replicas = away  # type: ignore[attr-defined, method-assign, assignment]
    if how == "stop":
        assert (await two.cancel(wait_seconds=20)).body["outcome"] == "stopped"
    else:
        assert (await two.turn(prompt="two"))["ok"]
    del side.look, side.push, side.replicas
    side.open.set()
    await asyncio.sleep(10)
    assert (await one.dispatch(prompt="three")).refused is not None, "the store knows of a newer turn"
    assert (await one.turn(prompt="three", agents=2))["ok"]
    assert len(one.provider.alive) == 1, "the agent of that chain is gone"
    await asyncio.sleep(1)
    ends = ["cancelled"] if how == "stop" else ["completed"]
    await assert_over(several, ["paused", *ends, "completed"])


async def test_a_refused_resume_writes_nothing_into_the_session_of_its_owner(several: Several) -> None:
    """Its calls are open at the agent that waits there; a cursor that is given out twice costs a record (case B11)."""
    one, two = await several.replica("a"), await several.replica("b")
    agent, [question] = await paused(one)
    before = await several.store.records("p", "s", None, 100)
    with pytest.raises(RunnerError) as caught:
        await two.answer(question, decision="allow")
    assert caught.value.code == "owned_elsewhere"
    await asyncio.sleep(2)
    assert await several.store.records("p", "s", None, 100) == before
    assert (await one.answer(question, decision="allow")).status == 200
    agent.update(sessionUpdate="tool_call_update", toolCallId="t0", status="completed")
    agent.say("ok")
    agent.answer(agent.all("session/prompt")[0])
    await asyncio.sleep(1)
    await assert_over(several, ["paused", "completed"])
    assert await several.store.quarantined("p", 10) == []
