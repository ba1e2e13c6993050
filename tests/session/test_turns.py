"""One turn through the real session shell: its events, its result, its warmth."""

from __future__ import annotations

import asyncio

import pytest

from tests.session.bed import Bed, types

pytestmark = pytest.mark.virtual_time


async def test_a_turn_streams_and_its_seat_serves_the_next(bed: Bed) -> None:
    handle = await bed.dispatch(prompt="hello", keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    assert frame["params"]["prompt"] == [{"type": "text", "text": "hello"}]
    agent.say("Hi ")
    agent.say("there")
    agent.answer(frame)
    result = await handle.result()
    assert result["ok"] is True
    assert result["text"] == "Hi there"
    assert result["start"] == "cold"
    assert result["reason"] == "miss"
    events = await bed.events(handle)
    assert types(events) == [
        "turn_admitted",
        "environment",
        "environment",
        "user_message",
        "message_delta",
        "message_delta",
        "message",
        "prompt_ended",
        "done",
    ]
    cursors = [event["cursor"] for event in events]
    assert cursors == [f"1.{n}" for n in range(2, 11)]
    second = await bed.turn(nth=2)
    assert second["start"] == "hit"
    assert "context_lost" not in second


async def test_the_first_frame_of_a_session_is_durable_at_once(bed: Bed) -> None:
    """A runner that is killed right behind the claim must not forget that the agent was told something."""
    handle = await bed.dispatch(prompt="hello", keep_on_disconnect=True)
    agent = await bed.agent()
    await agent.prompt()
    for _ in range(20):
        await asyncio.sleep(0)
    stored = [row.type for row in await bed.store.records("p", "s", None, 100)]
    assert "user_message" in stored
    await agent.finish()
    assert (await handle.result())["ok"] is True


@pytest.mark.parametrize("more", [0, 1])
async def test_a_failed_turn_says_when_memory_was_short_in_it(bed: Bed, more: int) -> None:
    """An agent whose helper the kernel killed knows only that it is gone."""
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    sandbox = bed.provider.sandboxes[-1]
    frame = await agent.prompt()
    sandbox.memory_kills = 1
    agent.say("It was killed, I did it another way.")
    agent.answer(frame)
    assert (await handle.result())["ok"]
    handle = await bed.dispatch(keep_on_disconnect=True)
    frame = await agent.prompt(2)
    sandbox.memory_kills += more
    agent.error(frame["id"], -32603, "a process exited.")
    error = (await handle.result())["error"]
    assert error["code"] == "harness_protocol_error"
    told = " The sandbox had no memory left: a process of it had to be killed ([local] memory_bytes)."
    assert error["message"].removesuffix(told).endswith("a process exited.")
    assert error["message"].endswith(told) == bool(more)
