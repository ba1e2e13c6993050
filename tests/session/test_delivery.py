"""A prompt whose frame may have been read is not sent again by itself."""

from __future__ import annotations

import asyncio

import pytest

from tests.session.bed import Bed

pytestmark = pytest.mark.virtual_time


async def test_a_frame_that_was_cut_off_fails_as_delivery_unknown(bed: Bed) -> None:
    await bed.turn(prompt="A")
    agent = await bed.agent()
    agent.transport.agent.reading_stopped = True
    handle = await bed.dispatch(prompt="B", on_busy="queue", keep_on_disconnect=True)
    waits = await bed.dispatch(prompt="C", on_busy="queue", keep_on_disconnect=True)
    while not agent.transport.unsent:
        await asyncio.sleep(0.01)
    agent.exit(9)
    assert (await handle.result())["error"]["code"] == "delivery_unknown"
    second = await bed.agent(2)
    frame = await second.prompt()
    assert [block["text"] for block in frame["params"]["prompt"]][-1] == "C"
    assert "B" not in [block["text"] for block in frame["params"]["prompt"]]
    await second.finish()
    assert (await waits.result())["ok"]
