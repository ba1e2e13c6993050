"""A replica that forgets what is too old: what goes by itself, and what nobody may lose (DESIGN 3.9)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.rules.transcript import LEFT_OUT
from tests.session.asking import paused
from tests.session.bed import CALLER, Bed, types
from tests.session.reading import assert_ordered, cursor

pytestmark = pytest.mark.virtual_time
DAY = 24 * 3600
SETTINGS: dict[str, Any] = {
    "records": {"retention_days": 1},
    "leases": {"beat_seconds": 120, "lease_seconds": 600},
}


async def test_the_history_begins_later_and_the_session_goes_on() -> None:
    bed = await Bed.make(settings=SETTINGS)
    old = await bed.turn(prompt="of old")
    first = await bed.history()
    await asyncio.sleep(DAY - 7200)
    young = await bed.turn(prompt="young", agents=2)
    await asyncio.sleep(3 * 3600 + 60)
    rows = await bed.store.records("p", "s", None, 1000)
    assert {row.turn_id for row in rows} == {young["turn_id"], None}
    assert await bed.store.turn("p", "s", old["turn_id"]) is not None
    again = await bed.dispatch(prompt="of old", prompt_id=old["prompt_ids"][0])
    assert await again.result() == old, "a retry still gets its answer"
    restarted = await Bed.make(settings=SETTINGS, store=bed.store, replica_id="rep_2")
    events = await restarted.history()
    assert_ordered(events)
    assert "of old" not in str(events)
    assert "young" in str(events)
    back = await restarted.history(after=first[2]["cursor"])
    assert types(back)[0] == "resync"
    assert [event for event in back if event["type"] != "resync"] == events
    newest = cursor(events[-1])
    result = await restarted.turn(prompt="and now")
    assert result["start"] == "cold"
    told = str((await restarted.agent()).frames)
    assert LEFT_OUT in told, "a history without its begin does not pretend to be whole"
    assert "young" in told
    assert "of old" not in told
    fresh = await restarted.history(after=events[-1]["cursor"])
    assert min(map(cursor, fresh)) > newest
    await bed.close()
    bed.store.unavailable = False
    await restarted.close()


async def test_everything_of_an_idle_session_goes_and_no_cursor_comes_back() -> None:
    bed = await Bed.make(settings=SETTINGS)
    await bed.turn()
    await asyncio.sleep(1)
    events = await bed.history()
    await asyncio.sleep(2 * DAY)
    assert await bed.store.records("p", "s", None, 1000) == []
    view = await bed.sessions.view(CALLER, "s")
    assert (view["state"], view["last_turn"]["outcome"]) == ("idle", "completed")
    await bed.die()
    restarted = await Bed.make(settings=SETTINGS, store=bed.store, replica_id="rep_2")
    assert await restarted.history() == []
    assert await restarted.history(after=events[-1]["cursor"]) == [], "who had everything misses nothing"
    assert (await restarted.turn())["ok"]
    fresh = await restarted.history()
    assert all(cursor(event) > cursor(events[-1]) for event in fresh)
    assert types(fresh)[0] == "session_busy"
    assert types(fresh)[-1] == "session_idle"
    await restarted.close()


async def test_a_question_keeps_its_turns_until_it_is_answered() -> None:
    """Nobody may lose what a human is still asked about."""
    bed = await Bed.make(settings=SETTINGS)
    _, _, _, [question] = await paused(bed)
    await asyncio.sleep(1)
    asked = await bed.store.records("p", "s", None, 1000)
    await asyncio.sleep(3 * DAY)
    assert (await bed.store.records("p", "s", None, 1000))[: len(asked)] == asked
    assert await bed.store.pruned_to("p", "s") is None
    answering = asyncio.create_task(bed.answer(question, decision="allow"))
    fresh = await bed.agent(2)
    frame = await fresh.prompt()
    fresh.ask(0, "t0")
    await fresh.answered(0)
    assert (await answering).body["status"] == "consumed"
    fresh.answer(frame)
    await asyncio.sleep(2 * DAY)
    assert await bed.store.records("p", "s", None, 1000) == []
    await bed.close()


async def test_a_killed_session_that_was_busy_for_longer_than_that_is_idle_again() -> None:
    """What told that it is busy stays as long as it is; so that it is over is told too."""
    bed = await Bed.make(settings=SETTINGS)
    first = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    await bed.dispatch(prompt="next", on_busy="queue", queue_mode="fifo", keep_on_disconnect=True)
    agent.say("ok")
    agent.answer(frame)
    assert (await first.result())["ok"]
    await agent.prompt(2)
    for _ in range(500):
        agent.say("still here ")
        await asyncio.sleep(200)
    busy, *_ = await bed.store.records("p", "s", None, 1000)
    assert (busy.type, await bed.store.pruned_to("p", "s") is not None) == ("session_busy", True)
    await bed.die()
    restarted = await Bed.make(settings=SETTINGS, store=bed.store, replica_id="rep_2")
    assert types(await restarted.history())[-1] == "session_idle"
    assert (await restarted.sessions.view(CALLER, "s"))["last_turn"]["outcome"] == "lost"
    await restarted.close()
