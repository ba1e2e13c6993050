"""The store did what it was asked and its answer was lost: that counts as if it had been answered (DESIGN 3.9)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.session.reconcile import close_session
from runner.store.port import CommandRow, Ending
from tests.session.bed import CALLER, Bed, drained, types
from tests.session.several import Several

pytestmark = pytest.mark.virtual_time

SHOWN = {
    "completed": ["message", "prompt_ended", "done", "session_idle"],
    "failed": ["message", "error", "prompt_ended", "done", "session_idle"],
}


async def ended(bed: Bed, how: str) -> tuple[Any, dict[str, Any]]:
    """A turn that says ``ok`` and ends, while somebody follows the session."""
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    agent.say("ok")
    if how == "completed":
        agent.answer(frame)
    else:
        agent.exit(1)
    result = await handle.result()
    assert result["outcome"] == how
    return handle, result


async def check_shown(bed: Bed, handle: Any, how: str) -> None:
    """Stream, late readers and the store say the same; nothing was set aside."""
    assert await bed.store.quarantined("p", 10) == []
    history = types(await bed.history())
    assert history[-len(SHOWN[how]) :] == SHOWN[how]
    assert history.count("done") == 1
    stream = types(await bed.events(handle))
    assert stream[-1] == "done" and stream.count("done") == 1
    assert ("error" in stream) is (how == "failed")
    row = await bed.store.turn("p", "s", handle.turn_id)
    assert row.outcome == how


@pytest.mark.parametrize("lost", [1, 2, 3, 4])
@pytest.mark.parametrize("how", ["completed", "failed"])
async def test_an_ending_without_an_answer_is_shown(bed: Bed, how: str, lost: int) -> None:
    """Three tries are made at once; what is not known behind them is owed, and found written later."""
    bed.store.unanswered["end"] = lost
    handle, _ = await ended(bed, how)
    session = bed.sessions._registry.known(("p", "s"))
    assert session is not None and session.outbox.owes_endings is (lost >= 3)
    await asyncio.sleep(3)
    assert not session.outbox.owes_endings
    await check_shown(bed, handle, how)
    assert (await bed.turn(agents=1 if how == "completed" else 2, nth=2 if how == "completed" else 1))["ok"] is True


async def test_an_owed_ending_that_was_written_is_nobody_elses(bed: Bed, caplog: pytest.LogCaptureFixture) -> None:
    """Neither the first try nor the looks at what became of it were answered."""
    bed.store.unanswered["end"] = 1
    bed.store.failing["turn"] = 2
    handle, _ = await ended(bed, "completed")
    session = bed.sessions._registry.known(("p", "s"))
    assert session is not None and session.outbox.owes_endings
    await asyncio.sleep(3)
    assert not session.outbox.owes_endings
    assert "its ending was dropped" not in caplog.text
    await check_shown(bed, handle, "completed")
    assert (await bed.turn(nth=2))["ok"] is True


async def test_a_follower_gets_the_ending_that_had_no_answer(bed: Bed) -> None:
    bed.store.unanswered["end"] = 1
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    reader = await bed.sessions.follow(CALLER, "s", None, True)
    agent.say("ok")
    agent.answer(frame)
    await handle.result()
    seen = b""
    while b"session_idle" not in seen:
        lines = await reader.next(5)
        assert lines is not None, "the follower was told nothing"
        seen += lines
    reader.close()
    assert seen.count(b'"type":"done"') == 1


async def test_an_ending_of_somebody_else_is_no_lost_answer(bed: Bed) -> None:
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    [turn] = await bed.store.open_turns()
    await close_session(bed.store, bed.replica.services.clock, ("p", "s"), turn)
    bed.store.failing["end"] = 1
    agent.say("ok")
    agent.answer(frame)
    assert (await handle.result())["outcome"] == "lost"
    assert {row.reason for _, row in await bed.store.quarantined("p", 10)} == {"ended_otherwise"}


async def test_a_turn_whose_admission_had_no_answer_runs(bed: Bed) -> None:
    bed.store.unanswered["admit"] = 1
    result = await bed.turn()
    assert result["ok"] is True
    assert types(await bed.history()).count("turn_admitted") == 1
    assert await bed.store.quarantined("p", 10) == []
    assert len(bed.provider.sandboxes) == 1
    assert (await bed.turn(nth=2))["ok"] is True


async def test_an_admission_that_failed_once_is_tried_again(bed: Bed) -> None:
    bed.store.failing["admit"] = 1
    assert (await bed.turn())["ok"] is True
    assert types(await bed.history()).count("turn_admitted") == 1


async def test_an_admission_that_nobody_can_look_up_is_refused_and_has_an_ending() -> None:
    """It may have been written: whoever comes next ends it, and a retry of the prompt is told so."""
    several = Several()
    a = await several.replica("a")
    several.store.unanswered["admit"] = 2
    with pytest.raises(RunnerError) as caught:
        await a.dispatch(prompt_id="one", keep_on_disconnect=True)
    assert caught.value.code == "store_unavailable"
    again = await a.dispatch(prompt_id="one", keep_on_disconnect=True)
    assert (await again.result())["outcome"] == "lost"
    assert await several.store.open_turns() == []
    assert (await a.turn())["ok"] is True
    await several.close()


@pytest.mark.parametrize("state", ["pending", "claimed", "applied"])
async def test_the_stops_of_a_lost_turn_end_with_it(bed: Bed, state: str) -> None:
    """One transaction: no reader finds the turn ended and its Stop without an outcome."""
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    await agent.prompt()
    store, clock = bed.store, bed.replica.services.clock
    for name, turn_id in (("mine", handle.turn_id), ("other", "turn_other")):
        await store.submit_command(CommandRow("p", "s", name, "cancel", "pending", turn_id, clock.now_ms()))
        if state != "pending":
            await store.claim_command("p", name, "rep_1", clock.now_ms(), clock.now_ms() + 15_000, 3)
        if state == "applied":
            await store.settle_command("p", name, "applied", None, clock.now_ms())
    [turn] = await store.open_turns()
    real, endings = store.end, []

    async def end(ending: Ending) -> bool:
        endings.append(ending)
        return bool(await real(ending))

    store.end = end
    await close_session(store, clock, ("p", "s"), turn)
    store.end = real
    [ending] = endings
    assert [row.command_id for row in ending.commands] == ["mine"]
    mine, other = await store.command("p", "mine"), await store.command("p", "other")
    assert (mine.state, mine.outcome) == ("applied" if state == "applied" else "obsolete", "lost")
    ended_turn = await store.turn("p", "s", turn.turn_id)
    assert mine.finished_at == ended_turn.ended_at
    assert (other.state, other.finished_at) == (state, None)


async def test_a_boot_ends_the_stops_of_a_lost_turn_at_once() -> None:
    bed = await Bed.make()
    handle = await bed.dispatch(keep_on_disconnect=True)
    await (await bed.agent()).prompt()
    at = bed.replica.services.clock.now_ms()
    await bed.store.submit_command(CommandRow("p", "s", "cmd", "cancel", "pending", handle.turn_id, at))
    for task in list(bed.replica.services.tasks._live):
        task.cancel()
    await asyncio.sleep(0)
    await bed.replica.services.beats.close()
    after = await Bed.make(store=bed.store, replica_id="rep_2")
    row = await bed.store.command("p", "cmd")
    assert (row.state, row.outcome) == ("obsolete", "lost")
    assert types(await drained(await after.sessions.follow(CALLER, "s", None, False))).count("done") == 1
    await after.close()
    bed.provider.sandboxes[0].agent.exit(137)
    await bed.replica.services.pool.close(5)
