"""What a new agent without memory is told of its session (DESIGN 3.5, ``context_lost``)."""

from __future__ import annotations

import asyncio

import pytest

from tests.session.bed import Bed
from tests.session.resuming import first_turn, lose_seat, next_turn, prompt_texts

pytestmark = pytest.mark.virtual_time


async def test_the_record_that_is_told_masks_what_was_masked(bed: Bed) -> None:
    handle = await bed.dispatch(prompt="use hunter2-secret", keep_on_disconnect=True, secrets={"KEY": "hunter2-secret"})
    agent = await bed.agent()
    frame = await agent.prompt()
    agent.update(sessionUpdate="tool_call", toolCallId="t", title="ls", kind="execute", status="in_progress")
    agent.say("I used hunter2-secret")
    await bed.cancel()
    agent.answer(frame, "cancelled")
    assert (await handle.result())["outcome"] == "cancelled"
    await asyncio.sleep(601)
    _, agent = await next_turn(bed)
    told = prompt_texts(agent)[0]
    assert "hunter2" not in told
    assert "No result: the call was interrupted." in told
    assert "The user stopped this turn." in told


async def test_a_long_session_is_told_from_its_end(bed: Bed) -> None:
    for n in range(1, 31):
        handle = await bed.dispatch(prompt=f"question {n}.", keep_on_disconnect=True)
        await (await bed.agent()).finish(n, f"answer {n}. " + "x" * 5000)
        await handle.result()
    await lose_seat(bed)
    _, agent = await next_turn(bed)
    told = prompt_texts(agent)[0]
    assert len(told.encode()) <= 64 * 1024
    assert "question 30." in told
    assert "question 1." not in told
    assert "The oldest part of the conversation is left out." in told


async def test_records_that_cannot_be_read_are_told_to_be_missing(bed: Bed) -> None:
    await first_turn(bed)
    await lose_seat(bed)
    handle = await bed.dispatch(prompt="next", keep_on_disconnect=True)
    bed.store.unavailable = True
    agent = await bed.agent(2)
    frame = await agent.prompt()
    told = prompt_texts(agent)[0]
    assert "could not be read and is missing" in told
    bed.store.unavailable = False
    agent.say("ok")
    agent.answer(frame)
    assert (await handle.result())["ok"]
