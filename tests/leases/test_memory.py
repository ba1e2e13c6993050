"""The plane in one process: the rule over a bounded map."""

from __future__ import annotations

import asyncio

import pytest

from runner.leases.memory import MemoryLeasePlane
from runner.leases.port import Heartbeat, LeasePlane
from tests.virtual_time import LoopClock

pytestmark = pytest.mark.virtual_time


def beat(turn: str, session: str = "s", project: str = "p", **more) -> Heartbeat:
    return Heartbeat(project, session, turn, **{"replica_id": "r", **more})


async def test_of_many_first_beats_exactly_one_is_admitted(clock: LoopClock):
    """Case B2, in one process: the claim is atomic."""
    plane: LeasePlane = MemoryLeasePlane(clock, 20)
    answers = await asyncio.gather(*(plane.beat(beat(f"t{n}")) for n in range(50)))
    assert [answer.admitted for answer in answers] == [True] + [False] * 49


async def test_sessions_and_projects_do_not_know_each_other(clock: LoopClock):
    """Case J5."""
    plane = MemoryLeasePlane(clock, 20)
    assert (await plane.beat(beat("t1"))).admitted
    assert (await plane.beat(beat("t1", session="s2"))).admitted
    assert (await plane.beat(beat("t1", project="p2"))).admitted
    await plane.beat(beat("t1", project="p2", phase="ended"))
    assert plane.lease("p", "s").running == "t1"


async def test_time_is_the_given_clock(clock: LoopClock):
    plane = MemoryLeasePlane(clock, 20)
    await plane.beat(beat("t1"))
    await asyncio.sleep(19.9)
    assert plane.lease("p", "s").owner == "r"
    assert not (await plane.beat(beat("t2", replica_id="r2"))).admitted
    await asyncio.sleep(0.1)
    assert plane.lease("p", "s").owner is None
    assert (await plane.beat(beat("t2", replica_id="r2"))).epoch == 2


async def test_a_store_that_knows_better_refuses_a_hand_off(clock: LoopClock):
    ended: set[str] = set()

    async def has_ended(project: str, session_id: str, turn_id: str) -> bool:
        return turn_id in ended

    plane = MemoryLeasePlane(clock, 20, has_ended=has_ended)
    await plane.beat(beat("t1"))
    assert not (await plane.beat(beat("t2", predecessor="t1"))).admitted
    ended.add("t1")
    assert (await plane.beat(beat("t2", predecessor="t1"))).epoch == 2


async def test_releasing_a_replica_frees_all_its_sessions(clock: LoopClock):
    plane = MemoryLeasePlane(clock, 20)
    for n in range(3):
        await plane.beat(beat(f"t{n}", session=f"s{n}"))
    await plane.beat(beat("t9", session="s9", replica_id="r2"))
    assert await plane.release_replica("r") == 3
    assert await plane.release_replica("r") == 0
    assert (await plane.beat(beat("t5", session="s0", replica_id="r2"))).admitted
    assert plane.lease("p", "s9").running == "t9"


async def test_only_sessions_that_hold_nothing_are_forgotten(clock: LoopClock):
    plane = MemoryLeasePlane(clock, 20, keep=10)
    await plane.beat(beat("live", session="live"))
    for n in range(200):
        if n % 50 == 0:
            await plane.beat(beat("live", session="live"))
        await plane.beat(beat(f"t{n}", session=f"s{n}"))
        await plane.beat(beat(f"t{n}", session=f"s{n}", phase="ended"))
    assert len(plane) <= 12
    assert plane.lease("p", "live").running == "live"
