"""A turn that another replica ended first says what the store says; one that may not be ended yet keeps its lease."""

from __future__ import annotations

import asyncio

import pytest

from runner.session.reconcile import close_session
from tests.session.bed import Bed
from tests.session.several import LEASE_SECONDS, Several

pytestmark = pytest.mark.virtual_time


@pytest.mark.parametrize("stopped", [False, True], ids=["answered", "stopped"])
async def test_the_first_ending_counts_everywhere(bed: Bed, stopped: bool) -> None:
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    [turn] = await bed.store.open_turns()
    await close_session(bed.store, bed.replica.services.clock, ("p", "s"), turn)
    command_id = None
    if stopped:
        reply = await bed.cancel()
        assert reply.body["outcome"] is None
        command_id = reply.body["command_id"]
    agent.say("ok")
    agent.answer(frame, "cancelled" if stopped else "end_turn")
    result = await handle.result()
    assert (result["outcome"], result["error"]["code"]) == ("lost", "execution_lost")
    row = await bed.store.turn("p", "s", turn.turn_id)
    assert (row.outcome, row.result) == ("lost", result)
    assert bed.pool.live(("p", "s")) is None
    if command_id is not None:
        await asyncio.sleep(1)
        command = await bed.store.command("p", command_id)
        assert (command.state, command.outcome) == ("obsolete", "lost")


async def test_the_lease_is_kept_until_the_ending_is_durable() -> None:
    several = Several()
    bed = await several.replica("a")
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    several.store.failing["end"] = 1000
    await agent.finish()
    assert (await handle.result())["outcome"] == "completed"
    await asyncio.sleep(LEASE_SECONDS + 5)
    assert several.plane.lease("p", "s").running == handle.turn_id, "renewed: nobody else may end it as lost"
    several.store.failing.clear()
    await asyncio.sleep(3)
    assert (await bed.store.turn("p", "s", handle.turn_id)).outcome == "completed"
    assert several.plane.lease("p", "s").running is None
    await several.close()
