"""What turns cost and sandboxes live, counted per turn and per session: nothing twice, and nothing over a restart."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.session.bed import CALLER, Bed
from tests.session.fake_agent import FakeAgent
from tests.session.resuming import LOADS, lose_seat

pytestmark = pytest.mark.virtual_time
TOKENS = {"inputTokens": 100, "outputTokens": 20, "totalTokens": 120}


async def usage(bed: Bed, session_id: str = "s") -> dict[str, Any]:
    """Of the session's view."""
    found: dict[str, Any] = (await bed.sessions.view(CALLER, session_id))["usage"]
    return found


async def finish(agent: FakeAgent, nth: int, cost: float | None = None, tokens: Any = None) -> None:
    """Answer the ``nth`` prompt; the agent tells its total cost and the turn's tokens."""
    frame = await agent.prompt(nth)
    agent.say("ok")
    if cost is not None:
        told = {"amount": cost, "currency": "USD"}
        agent.update(sessionUpdate="usage_update", used=10 * nth, size=1000, cost=told)
    agent.result(frame["id"], {"stopReason": "end_turn", **({"usage": tokens} if tokens else {})})


async def test_a_turn_and_its_session_have_what_the_agent_told(bed: Bed) -> None:
    first = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    await asyncio.sleep(2)
    await finish(agent, 1, 0.5, TOKENS)
    result = await first.result()
    assert result["usage"].pop("turn_seconds") == pytest.approx(2, abs=0.5)
    assert result["usage"].pop("sandbox_seconds") == pytest.approx(2, abs=0.5)
    assert result["usage"] == {
        "input_tokens": 100,
        "output_tokens": 20,
        "total_tokens": 120,
        "cost": {"USD": 0.5},
        "context": {"used": 10, "size": 1000},
    }
    await asyncio.sleep(10)
    second = await bed.dispatch(keep_on_disconnect=True)
    await finish(agent, 2, 0.75, TOKENS)
    assert (await second.result())["usage"]["cost"] == {"USD": 0.25}
    total = await usage(bed)
    assert (total["turns"], total["input_tokens"], total["cost"]) == (2, 200, {"USD": 0.75})
    assert total["context"] == {"used": 20, "size": 1000}
    assert total["warm_seconds"] == pytest.approx(10, abs=0.5)
    assert total["sandbox_seconds"] == pytest.approx(12, abs=1)
    stored = await bed.store.session("p", "s")
    assert stored.usage["turns"] == 2
    turn = await bed.store.last_turn("p", "s")
    assert turn.result["usage"]["input_tokens"] == 100


async def test_a_parked_seat_counts_while_it_lives_and_to_its_end(bed: Bed) -> None:
    await bed.turn()
    before = (await bed.store.session("p", "s")).updated_at
    await asyncio.sleep(30)
    assert (await usage(bed))["warm_seconds"] == pytest.approx(30, abs=0.5)
    await asyncio.sleep(90)
    assert (await usage(bed))["warm_seconds"] == pytest.approx(60, abs=0.5)
    stored = await bed.store.session("p", "s")
    assert stored.usage["warm_seconds"] == pytest.approx(60, abs=0.5)
    assert stored.usage["sandbox_seconds"] >= stored.usage["warm_seconds"]
    assert stored.updated_at == before


async def test_usage_survives_a_restart(bed: Bed) -> None:
    handle = await bed.dispatch(keep_on_disconnect=True)
    await finish(await bed.agent(), 1, 0.5, TOKENS)
    await handle.result()
    store = bed.store
    await bed.die()
    again = await Bed.make(store=store, replica_id="rep_2")
    assert (await usage(again))["input_tokens"] == 100
    handle = await again.dispatch(keep_on_disconnect=True)
    await finish(await again.agent(), 1, 0.2, TOKENS)
    assert (await handle.result())["usage"]["cost"] == {"USD": 0.2}
    total = await usage(again)
    assert (total["turns"], total["input_tokens"], total["cost"]) == (2, 200, {"USD": 0.7})
    await again.close()


async def test_a_paused_chain_is_not_counted_twice(bed: Bed) -> None:
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    agent.update(sessionUpdate="usage_update", used=5, size=10, cost={"amount": 0.5, "currency": "USD"})
    agent.ask(1)
    paused = await handle.result()
    assert paused["outcome"] == "paused"
    assert paused["usage"]["cost"] == {"USD": 0.5}
    await asyncio.sleep(100)
    (asked,) = (await bed.sessions.interactions(CALLER, "s", "pending"))["items"]
    await bed.answer(asked["interaction_id"], decision="allow")
    await agent.answered(1)
    agent.say("done")
    agent.update(sessionUpdate="usage_update", used=6, size=10, cost={"amount": 0.6, "currency": "USD"})
    agent.result(frame["id"], {"stopReason": "end_turn", "usage": TOKENS})
    while (await bed.state()) != "idle":
        await asyncio.sleep(0.01)
    total = await usage(bed)
    assert (total["turns"], total["input_tokens"], total["cost"]) == (2, 100, {"USD": 0.6})
    assert total["warm_seconds"] == pytest.approx(100, abs=0.5)


async def test_a_lost_turn_has_what_is_known_of_it(bed: Bed) -> None:
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    await agent.prompt()
    agent.update(sessionUpdate="usage_update", used=5, size=10, cost={"amount": 0.5, "currency": "USD"})
    await asyncio.sleep(5)
    agent.update(sessionUpdate="usage_update", used=6, size=10, cost={"amount": 0.75, "currency": "USD"})
    await asyncio.sleep(1)
    assert not handle.refused
    store = bed.store
    await bed.die()
    again = await Bed.make(store=store, replica_id="rep_2")
    turn = await store.last_turn("p", "s")
    assert turn.outcome == "lost"
    assert turn.result["usage"]["cost"] == {"USD": 0.75}
    assert turn.result["usage"]["context"] == {"used": 6, "size": 10}
    assert turn.result["usage"]["turn_seconds"] == pytest.approx(5, abs=0.5)
    total = await usage(again)
    assert (total["turns"], total["cost"]) == (1, {"USD": 0.75})
    await again.close()


async def test_a_start_that_fails_counts_its_sandbox_seconds(bed: Bed) -> None:
    bed.provider.manners["initialize"] = False
    handle = await bed.dispatch(keep_on_disconnect=True)
    result = await handle.result()
    assert result["outcome"] == "failed"
    assert result["usage"]["sandbox_seconds"] == pytest.approx(90, abs=1)
    assert (await usage(bed))["turns"] == 1


async def test_an_agent_that_goes_on_with_its_session_counts_its_cost_from_there(bed: Bed) -> None:
    bed.provider.manners.update(LOADS)
    handle = await bed.dispatch(keep_on_disconnect=True)
    await finish(await bed.agent(), 1, 0.5)
    await handle.result()
    await lose_seat(bed)
    handle = await bed.dispatch(keep_on_disconnect=True)
    await finish(await bed.agent(2), 1, 0.6)
    result = await handle.result()
    assert (result["start"], result["usage"]["cost"]) == ("resumed", {"USD": pytest.approx(0.1)})
    assert (await usage(bed))["cost"] == {"USD": pytest.approx(0.6)}
