"""What lasts, and what ends in bounded time, where nobody is left to say so (cases M3, N5)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.errors import RunnerError
from tests.session.asking import paused
from tests.session.bed import CALLER, Bed
from tests.session.reading import assert_ordered
from tests.session.several import LEASE_SECONDS, Several

pytestmark = pytest.mark.virtual_time
DAY_AND_AN_HOUR = 25 * 3600
SLOW_BEATS = {"beat_seconds": 120, "lease_seconds": 600}
LOST_AFTER = 60


def outcomes(events: list[dict[str, Any]]) -> list[str]:
    return [event["data"]["outcome"] for event in events if event["type"] == "done"]


@pytest.mark.parametrize("window", [100_000, 600])
async def test_an_approval_is_answered_after_a_day_and_an_hour_case_n5(window: int) -> None:
    """Case N5: parked all the time, or long cold: the question is there, and the session nobody else's."""
    bed = await Bed.make(settings={"pool": {"approval_seconds": window}, "leases": SLOW_BEATS})
    _, agent, frame, [question] = await paused(bed)
    await asyncio.sleep(DAY_AND_AN_HOUR)
    assert await bed.state() == "awaiting_approval"
    assert (await bed.sessions.view(CALLER, "s"))["open_interactions"] == [question]
    if window > DAY_AND_AN_HOUR:
        reply = await bed.answer(question, decision="allow")
        assert (reply.status, reply.body["status"]) == (200, "consumed")
        assert (await agent.answered(0))["result"]["outcome"] == {"outcome": "selected", "optionId": "yes"}
        agent.answer(frame)
    else:
        answering = asyncio.create_task(bed.answer(question, decision="allow"))
        fresh = await bed.agent(2)
        frame = await fresh.prompt()
        fresh.ask(0, "t0")
        assert (await fresh.answered(0))["result"]["outcome"] == {"outcome": "selected", "optionId": "yes"}
        assert (await answering).body["status"] == "consumed"
        fresh.answer(frame)
    await asyncio.sleep(5)
    assert outcomes(await bed.history())[-1] == "completed"
    await bed.close()


async def running(bed: Bed) -> None:
    await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    await agent.prompt()
    agent.say("half an ans")
    await asyncio.sleep(1)


async def test_a_death_on_another_machine_is_found_in_bounded_time_and_told_once_case_m3(several: Several) -> None:
    """Case M3: nothing proves it; two others poll, sweep and serve, and one ending is written."""
    settings = {"records": {"lost_after_seconds": LOST_AFTER}}
    one = await several.replica("a")
    others = [await several.replica(name, **settings) for name in ("b", "c")]
    await running(one)
    shown = await others[0].history()
    await several.kill("a", proven=False)
    killed = asyncio.get_running_loop().time()
    while (await others[0].sessions.view(CALLER, "s"))["state"] == "running":
        await asyncio.sleep(1)
        assert asyncio.get_running_loop().time() - killed < LEASE_SECONDS + LOST_AFTER + 15
    await asyncio.sleep(300)
    for other in others:
        events = await other.history()
        assert outcomes(events) == ["lost"]
        assert_ordered(events)
        assert events[: len(shown)] == shown
    view = await others[1].sessions.view(CALLER, "s")
    assert (view["state"], view["last_turn"]["outcome"]) == ("idle", "lost")
    assert await several.plane.look("p", "s") is None
    assert (await others[1].turn(prompt="go on"))["ok"]


async def test_a_turn_is_not_lost_while_something_of_it_is_on_its_way_case_m3(several: Several) -> None:
    """Case M3: the sweep waits until the store has all that was handed over, then tells the one ending."""
    one = await several.replica("a")
    two = await several.replica("b", records={"lost_after_seconds": LOST_AFTER})
    on_its_way = True

    async def caught_up(project: str, session_id: str) -> None:
        if on_its_way:
            raise RunnerError("store_unavailable", "records of this session are on their way")

    several.store.caught_up = caught_up  # type: ignore[method-assign]
    await running(one)
    await several.kill("a", proven=False)
    await asyncio.sleep(LEASE_SECONDS + 4 * LOST_AFTER)
    assert [turn.outcome for turn in await several.store.open_turns()] == [None]
    on_its_way = False
    await asyncio.sleep(LOST_AFTER)
    assert outcomes(await two.history()) == ["lost"]
