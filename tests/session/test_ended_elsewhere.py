"""A turn that another replica ended first: its own replica says what the store says, and keeps nothing of it."""

from __future__ import annotations

import asyncio

import pytest

from runner.session.reconcile import close_session
from tests.session.bed import Bed

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
