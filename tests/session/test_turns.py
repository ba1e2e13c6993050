"""One turn through the real session shell: its events, its result, its warmth."""

from __future__ import annotations

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
