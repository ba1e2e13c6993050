"""A turn whose ending no record tells of gets that record, once, whatever became of its session (DESIGN 3.9)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.ids import record_id
from runner.session.missing_endings import GRACE_MS, MissingEndings
from runner.store.port import Ending, RecordKey
from tests.session.bed import CALLER, Bed
from tests.session.gates import SlowStore
from tests.session.reading import assert_ordered
from tests.session.several import LEASE_SECONDS, Several

pytestmark = pytest.mark.virtual_time
LATER = GRACE_MS / 1000 + 1


class Forgetful(SlowStore):
    """Loses the last record of the turns that end: as if it had been refused, or lost on its way."""

    losing = True

    async def end(self, ending: Ending) -> bool:
        written = await super().end(ending)
        if written and self.losing:
            assert ending.records[-1].type == "done"
            del self._records[ending.turn.project, ending.turn.session_id, *cursor_of(ending)]
            self._record_ids.remove((ending.turn.project, ending.records[-1].record_id))
        return written


class Forgotten(Several):
    """Replicas over such a store."""

    def __init__(self) -> None:
        super().__init__()
        self.store: Forgetful = Forgetful()


def cursor_of(ending: Ending) -> tuple[int, int]:
    last = ending.records[-1]
    return last.epoch, last.n


def endings(bed: Bed) -> MissingEndings:
    services = bed.replica.services
    return MissingEndings(services.store, services.clock, services.owners, bed.sessions._registry.written_here)


async def told(bed: Any, session_id: str = "s") -> list[tuple[str, str]]:
    rows = await bed.store.records("p", session_id, None, 1000)
    return [(row.turn_id, row.record_id) for row in rows if row.type == "done"]


def done_of(events: list[dict[str, Any]]) -> list[str]:
    return [event["turn_id"] for event in events if event["type"] == "done"]


@pytest.fixture
async def several() -> AsyncIterator[Forgotten]:
    world = Forgotten()
    yield world
    await world.close()


async def test_a_session_that_has_moved_on_gets_the_ending_of_an_earlier_turn() -> None:
    store = Forgetful()
    bed = await Bed.make(store=store)
    first = await bed.turn()
    store.losing = False
    second = await bed.turn(nth=2)
    await asyncio.sleep(LATER)
    assert [name for name, _ in await told(bed)] == [second["turn_id"]]
    await endings(bed).sweep()
    names = await told(bed)
    assert names[1] == (first["turn_id"], record_id("s", first["turn_id"], 0))
    await endings(bed).sweep()
    assert await told(bed) == names, "once"
    third = await bed.turn(nth=3)
    assert done_of(await bed.history()) == [first["turn_id"], second["turn_id"], third["turn_id"]], "none twice"
    again = await Bed.make(store=store, replica_id="rep_2")
    events = await again.history()
    assert_ordered(events)
    assert done_of(events) == [second["turn_id"], first["turn_id"], third["turn_id"]]
    told_late = next(event for event in events if (event["turn_id"], event["type"]) == (first["turn_id"], "done"))
    assert told_late["data"] == {"turn_id": first["turn_id"], "outcome": "completed"}
    assert await store.quarantined("p", 9) == []
    await bed.close()
    store.unavailable = False
    await again.close()


async def test_who_follows_a_session_that_ran_elsewhere_sees_it_live() -> None:
    store = Forgetful()
    first = await (before := await Bed.make(store=store)).turn()
    await before.die()
    bed = await Bed.make(store=store, replica_id="rep_2")
    follower = await bed.sessions.follow(CALLER, "s", None, True)
    await asyncio.sleep(LATER)
    await endings(bed).sweep()
    seen = b""
    while b'"type":"done"' not in seen:
        seen += await follower.next(60) or b""
    assert first["turn_id"].encode() in seen.splitlines()[-1]
    follower.close()
    await bed.close()


async def test_it_is_written_while_a_newer_turn_runs() -> None:
    store = Forgetful()
    bed = await Bed.make(store=store)
    first = await bed.turn()
    store.losing = False
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt(2)
    agent.say("one ")
    await asyncio.sleep(LATER)
    await endings(bed).sweep()
    agent.say("two")
    agent.answer(frame)
    result = await handle.result()
    assert result["text"] == "one two"
    events = await bed.history()
    assert_ordered(events)
    assert done_of(events) == [first["turn_id"], result["turn_id"]]
    assert [name for name, _ in await told(bed)] == [first["turn_id"], result["turn_id"]]
    assert await store.quarantined("p", 9) == []
    await bed.close()


async def test_the_replica_s_own_sweep_does_it() -> None:
    store = Forgetful()
    bed = await Bed.make(store=store)
    first = await bed.turn()
    await asyncio.sleep(LATER + 120)
    assert [name for name, _ in await told(bed)] == [first["turn_id"]]
    await bed.close()


async def test_a_turn_that_ended_just_now_is_left_alone() -> None:
    store = Forgetful()
    bed = await Bed.make(store=store)
    await bed.turn()
    sweep = endings(bed)
    await sweep.sweep()
    assert await told(bed) == []
    await asyncio.sleep(LATER)
    await sweep.sweep()
    assert len(await told(bed)) == 1
    await bed.close()


async def test_what_retention_deleted_is_not_told_again() -> None:
    store = SlowStore()
    bed = await Bed.make(store=store)
    await bed.turn()
    rows = await store.records("p", "s", None, 1000)
    await store.delete_records([RecordKey("p", row.record_id) for row in rows])
    await asyncio.sleep(LATER)
    await endings(bed).sweep()
    assert await told(bed) == []
    await bed.close()


async def test_a_session_that_nobody_holds_is_written_by_whoever_sweeps(several: Forgotten) -> None:
    one, two = await several.replica("a"), await several.replica("b")
    first = await one.turn()
    await several.kill("a", proven=False)
    await asyncio.sleep(max(LEASE_SECONDS, LATER) + 60)
    assert [name for name, _ in await told(several)] == [first["turn_id"]], "the sweep of the other one"
    several.store.losing = False
    assert (await two.turn())["ok"], "and the session goes on"
    assert_ordered(await two.history())


async def test_a_session_that_another_replica_holds_waits(several: Forgotten) -> None:
    one, two = await several.replica("a", pool={"idle_seconds": 300}), await several.replica("b")
    first = await one.turn()
    other = MissingEndings(
        several.store, two.replica.services.clock, two.replica.services.owners, two.sessions._registry.written_here
    )
    await asyncio.sleep(LATER)
    several.store.losing = False
    if not await told(several):
        await other.sweep()
    names = [name for name, _ in await told(several)]
    assert names in ([], [first["turn_id"]])
    live = one.pool.live(("p", "s"))
    assert live is not None
    one.pool.dismiss(live, "test")
    await asyncio.sleep(LEASE_SECONDS + 1)
    await other.sweep()
    assert [name for name, _ in await told(several)] == [first["turn_id"]]


async def test_a_lease_that_still_names_the_turn_is_let_go_and_no_other(several: Forgotten) -> None:
    one, two = await several.replica("a"), await several.replica("b")
    first = await one.turn()
    turn = await several.store.turn("p", "s", first["turn_id"])
    assert turn is not None
    owners = two.replica.services.owners
    holder = await several.plane.look("p", "s")
    await owners.let_go(turn)
    assert await several.plane.look("p", "s") == holder, "a parked seat names no turn"
    handle = await one.dispatch(keep_on_disconnect=True)
    await (await one.agent()).prompt(2)
    await owners.let_go(turn)
    running = await several.plane.look("p", "s")
    assert running is not None
    assert running.running is not None, "a newer turn is left alone"
    goes_on = await several.store.turn("p", "s", running.running)
    assert goes_on is not None
    await owners.let_go(goes_on)
    after = await several.plane.look("p", "s")
    assert after is not None
    assert after.running == running.running, "it goes on"
    await one.cancel()
    await handle.result()


async def test_an_outage_puts_it_off() -> None:
    store = Forgetful()
    bed = await Bed.make(store=store)
    await bed.turn()
    sweep = endings(bed)
    await asyncio.sleep(LATER)
    store.unavailable = True
    with pytest.raises(RunnerError):
        await sweep.sweep()
    store.unavailable = False
    await sweep.sweep()
    assert len(await told(bed)) == 1
    await bed.close()
