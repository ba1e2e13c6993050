"""A crash between the batch of a turn and its frame."""

from __future__ import annotations

import pytest

from tests.session.bed import Bed
from tests.session.prompt_abort.stage import Stage
from tests.session.test_restart import crash

pytestmark = pytest.mark.virtual_time


@pytest.mark.parametrize("aborted", ["B", "C"])
async def test_what_was_aborted_before_the_crash_is_ended_once(aborted: str) -> None:
    """A turn had read B and C when one was aborted: the restart fails the other one alone."""
    stage = await Stage.make()
    await stage.active("B", "C")
    stage.hold_mark()
    await stage.finish(1)
    await stage.calm()
    assert stage.abort(aborted) is True
    await stage.calm()
    second = await Bed.make(store=await crash(stage.bed), replica_id="rep_2")
    stage.bed.provider.alive.clear()
    events = await second.history()
    told = [event["data"] for event in events if event["type"] == "prompt_ended"]
    other = "C" if aborted == "B" else "B"
    assert [(data["prompt_id"], data["state"]) for data in told] == [
        ("A", "done"),
        (aborted, "cancelled"),
        (other, "failed"),
    ]
    for name, state in ((aborted, "cancelled"), (other, "failed")):
        row = await second.store.prompt("p", "s", name)
        assert (row.state, row.result["outcome"]) == (state, "cancelled" if state == "cancelled" else "lost")
    assert stage.frames == [["A"]]
    await second.close()
