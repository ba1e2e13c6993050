"""What runs, waits or is kept, and the clocks that may end it: the turn's, the approval's, the lease's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.session.asking import paused
from tests.session.bed import Bed, types

pytestmark = pytest.mark.virtual_time


async def test_silence_of_a_running_turn_is_no_idleness_case_c4(bed: Bed) -> None:
    """16 minutes without a word: its seat stays, and its lease is renewed all the time."""
    handle = await bed.dispatch(keep_on_disconnect=True, limits={"first_update_seconds": None})
    agent = await bed.agent()
    frame = await agent.prompt()
    plane: Any = bed.replica.plane
    for _ in range(16):
        await asyncio.sleep(60)
        assert plane.lease("p", "s").running == handle.turn_id
    agent.say("at last")
    agent.answer(frame)
    assert (await handle.result())["ok"]
    assert (await bed.turn(nth=2))["start"] == "hit"


async def test_an_open_approval_is_bounded_by_its_window_alone_cases_c4_n6(bed: Bed) -> None:
    """The seat, the lease and what is remembered of both end together; the question does not (cases C4 and N6)."""
    handle, agent, _, [question] = await paused(bed)
    plane: Any = bed.replica.plane
    await asyncio.sleep(590)
    assert plane.lease("p", "s").alive == handle.turn_id
    assert bed.pool.live(("p", "s")) is not None
    await asyncio.sleep(20)
    assert bed.pool.live(("p", "s")) is None
    assert plane.lease("p", "s").owner is None
    assert bed.provider.alive == set()
    await asyncio.sleep(600)
    answering = asyncio.create_task(bed.answer(question, decision="allow"))
    second = await bed.agent(2)
    frame = await second.prompt()
    second.ask("again")
    reply = await answering
    assert reply.status == 200
    assert (await second.answered("again"))["result"]["outcome"]["optionId"] == "yes"
    second.say("done")
    second.answer(frame)
    await asyncio.sleep(1)
    assert [event["data"]["outcome"] for event in await bed.history() if event["type"] == "done"] == [
        "paused",
        "completed",
    ]
    assert agent is not second


async def test_an_answer_that_belongs_to_another_prompt_is_recorded_as_it_came_case_b7(bed: Bed) -> None:
    """It cannot be repaired here: nothing is sent again, so no user message runs twice."""
    first = await bed.dispatch(prompt="what is new?", keep_on_disconnect=True)
    agent = await bed.agent()
    await agent.finish(1, "the background job has ended")
    assert (await first.result())["text"] == "the background job has ended"
    second = await bed.dispatch(prompt="and now?", keep_on_disconnect=True)
    await agent.finish(2, "what is new is this")
    assert (await second.result())["text"] == "what is new is this"
    await asyncio.sleep(60)
    sent = [frame["params"]["prompt"][0]["text"] for frame in agent.all("session/prompt")]
    assert sent == ["what is new?", "and now?"]
    assert types(await bed.history()).count("user_message") == 2
