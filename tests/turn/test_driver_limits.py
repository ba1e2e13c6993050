"""Limits of a driven turn: what is open, what speaks, what has a human to wait for (DESIGN 4.1)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.session.bed import Bed

pytestmark = pytest.mark.virtual_time


@pytest.fixture
async def bed() -> AsyncIterator[Bed]:
    made = await Bed.make()
    yield made
    await made.close()


@pytest.mark.parametrize("status", ["pending", "in_progress"])
async def test_an_open_tool_call_is_not_quiet_although_it_never_says_that_it_runs(bed: Bed, status: str):
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    agent.say("I build it now.")
    agent.update(sessionUpdate="tool_call", toolCallId="t", title="build", status=status)
    await asyncio.sleep(600)
    agent.update(sessionUpdate="tool_call_update", toolCallId="t", status="completed")
    agent.answer(frame)
    assert (await handle.result())["outcome"] == "completed"


async def test_quiet_counts_from_the_ending_of_the_last_tool_call(bed: Bed):
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    await agent.prompt()
    agent.update(sessionUpdate="tool_call", toolCallId="t", title="build", status="pending")
    await asyncio.sleep(600)
    agent.update(sessionUpdate="tool_call_update", toolCallId="t", status="completed")
    result = await handle.result()
    assert result["error"]["code"] == "limit_quiet"
    assert asyncio.get_running_loop().time() == pytest.approx(900, abs=1)
