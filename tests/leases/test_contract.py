"""What every lease plane promises (DESIGN 3.1): the same assertions for each backend."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.leases.port import BeatAnswer, Holder, LeasePlane, ReplicaInfo
from tests.leases.conftest import LEASE, Open, Planes, beat


async def admitted(plane: LeasePlane, *beats) -> BeatAnswer:
    """Send beats that all have to be granted; the last answer."""
    answer = None
    for one in beats:
        answer = await plane.beat(one)
        assert answer.admitted, one
    assert answer is not None
    return answer


async def refused(plane: LeasePlane, one) -> BeatAnswer:
    """Send a beat that has to be refused."""
    answer = await plane.beat(one)
    assert (answer.admitted, answer.is_current_turn, answer.epoch) == (False, False, 0), one
    return answer


async def held(planes: Planes) -> tuple[Any, ...] | None:
    """Owner, alive, running and epoch of the session, as the second replica sees them."""
    holder = await planes.two.look("p", "s")
    return None if holder is None else (holder.replica_id, holder.alive, holder.running, holder.epoch)


# -- the three answers -----------------------------------------------------------------------------------------------


async def test_a_second_turn_is_refused_and_the_running_one_s_leases_are_untouched(planes: Planes):
    """Case B2: of two messages one runs, and the other is told before anything was touched."""
    first = await admitted(planes.one, beat("t1", epoch_floor=4))
    assert first == BeatAnswer(True, True, "r1", 5, LEASE, started_at=1_000.0, now=1_000.0)
    before = await planes.two.look("p", "s")
    planes.clock.now += 3
    for replica, plane in (("r1", planes.one), ("r2", planes.two)):
        for phase in ("running", "paused", "parked"):
            answer = await refused(plane, beat("t2", replica, phase, epoch_floor=4))
            assert (answer.owner, answer.lease_seconds, answer.now) == ("r1", LEASE, 1_003.0)
    after = await planes.two.look("p", "s")
    assert before == Holder("r1", None, "t1", "t1", 5, 1_000.0, 1_000.0)
    assert after == Holder("r1", None, "t1", "t1", 5, 1_000.0, 1_003.0)
    planes.clock.now += LEASE - 3
    assert await held(planes) is None, "a refused beat renews nothing"


async def test_a_refused_turn_s_end_beat_clears_nothing(planes: Planes):
    await admitted(planes.one, beat("t1"))
    for replica, plane in (("r1", planes.one), ("r2", planes.two)):
        await refused(plane, beat("t2", replica))
        await refused(plane, beat("t2", replica, "ended"))
        await refused(plane, beat("t2", replica, "ended", seat_parked=True))
    assert await held(planes) == ("r1", "t1", "t1", 1)
    assert (await admitted(planes.one, beat("t1"))).epoch == 1


@pytest.mark.parametrize("phase", ["paused", "parked"])
async def test_the_resume_of_an_approval_is_admitted_while_its_seat_is_parked(planes: Planes, phase: str):
    await admitted(planes.one, beat("t1"), beat("t1", phase=phase))
    assert await held(planes) == ("r1", "t1" if phase == "paused" else None, None, 1)
    answer = await admitted(planes.one, beat("t2", predecessor="t1"))
    assert answer.epoch == 2
    assert await held(planes) == ("r1", "t2", "t2", 2)
    for gone in ("running", "paused", "parked", "ended"):
        await refused(planes.one, beat("t1", phase=gone))
    assert await held(planes) == ("r1", "t2", "t2", 2)


# -- owners ----------------------------------------------------------------------------------------------------------


async def test_of_many_first_beats_exactly_one_is_admitted(planes: Planes):
    """Case B2: the claim is atomic, also between replicas."""
    sides = {"r1": planes.one, "r2": planes.two}
    answers = await asyncio.gather(
        *(sides[replica].beat(beat(f"{replica}-{n}", replica)) for n in range(25) for replica in sides)
    )
    winners = [answer for answer in answers if answer.admitted]
    assert len(winners) == 1
    assert {answer.owner for answer in answers} == {winners[0].owner}


async def test_another_replica_neither_overwrites_nor_releases_case_b11(planes: Planes):
    """Case B11: whoever is not the owner is told who is, and changes nothing, in every phase."""
    await admitted(planes.one, beat("t1"))
    for state in ("running", "paused", "parked"):
        await admitted(planes.one, beat("t1", phase=state))
        before = await held(planes)
        for phase in ("running", "paused", "parked", "ended"):
            for turn in ("t1", "t2"):
                await planes.two.beat(beat(turn, "r2", phase, predecessor="t1" if turn == "t2" else None))
        assert await held(planes) == before
        assert (await refused(planes.two, beat("t3", "r2"))).owner == "r1"


async def test_a_lease_that_ran_out_goes_to_who_asks_and_the_late_owner_is_refused(planes: Planes):
    """Cases B10 and M9: what is not renewed is free after a lease, and only then; the epoch grows."""
    await admitted(planes.one, beat("t1"))
    for _ in range(5):
        planes.clock.now += LEASE - 1
        await refused(planes.two, beat("t2", "r2"))
        await admitted(planes.one, beat("t1", epoch=1))
    planes.clock.now += LEASE
    assert await held(planes) is None
    assert (await admitted(planes.two, beat("t2", "r2"))).epoch == 2
    for phase in ("running", "paused", "parked", "ended"):
        await refused(planes.one, beat("t1", phase=phase, epoch=1))
    assert await held(planes) == ("r2", "t2", "t2", 2)


async def test_epochs_grow_over_turns_owners_and_what_the_store_knows(planes: Planes):
    epochs = []
    for n, (plane, replica) in enumerate([(planes.one, "r1"), (planes.two, "r2")] * 3):
        floor = 40 if n == 3 else 0
        epochs.append((await admitted(plane, beat(f"t{n}", replica, epoch_floor=floor))).epoch)
        if n % 2:
            await admitted(plane, beat(f"t{n}", replica, "ended"))
        else:
            planes.clock.now += LEASE
    assert epochs == [1, 2, 3, 41, 42, 43]


async def test_a_hand_off_names_its_predecessor_and_nobody_slips_in(planes: Planes):
    await admitted(planes.one, beat("t1"))
    await refused(planes.one, beat("t2", predecessor="t0"))
    await refused(planes.two, beat("t2", "r2", predecessor="t1"))
    planes.clock.now += 5
    answer = await admitted(planes.one, beat("t2", predecessor="t1"))
    assert (answer.epoch, answer.started_at, answer.now) == (2, 1_005.0, 1_005.0)
    await refused(planes.one, beat("t1", phase="ended"))
    assert await held(planes) == ("r1", "t2", "t2", 2)


async def test_a_store_that_knows_better_refuses_a_hand_off(open_planes: Open):
    planes = await open_planes(asks_store=True)
    await admitted(planes.one, beat("t1"))
    await refused(planes.one, beat("t2", predecessor="t1"))
    planes.ended.add("t1")
    assert (await admitted(planes.one, beat("t2", predecessor="t1"))).epoch == 2


async def test_sessions_and_projects_do_not_know_each_other_case_j5(planes: Planes):
    await admitted(planes.one, beat("t1"))
    await admitted(planes.one, beat("t1", session="s2"))
    await admitted(planes.two, beat("t1", "r2", project="p2"))
    await admitted(planes.two, beat("t1", "r2", "ended", project="p2"))
    assert await held(planes) == ("r1", "t1", "t1", 1)
    assert await planes.one.look("p2", "s") is None


@pytest.mark.parametrize("project", ["a:b", "a:b:c", "ä €", "*"])
async def test_a_project_may_have_any_name(planes: Planes, project: str):
    await admitted(planes.one, beat("t1", project=project))
    assert (await planes.two.look(project, "s")) is not None
    assert await held(planes) is None


# -- endings, pauses, seats ------------------------------------------------------------------------------------------


async def test_an_ended_turn_never_comes_back(planes: Planes):
    await admitted(planes.one, beat("t1"), beat("t1", phase="ended"))
    assert await held(planes) is None
    for replica, plane in (("r1", planes.one), ("r2", planes.two)):
        for phase in ("running", "paused", "parked", "ended"):
            await refused(plane, beat("t1", replica, phase))
            await refused(plane, beat("t1", replica, phase, epoch=1))
    planes.clock.now += 6 * 86_400
    await refused(planes.one, beat("t1"))
    assert await held(planes) is None


@pytest.mark.parametrize("phase", ["running", "paused", "parked"])
async def test_what_is_renewed_lasts_for_days_case_n5(planes: Planes, phase: str):
    """Case N5: a parked approval 25 hours later is what it was; nothing has a time to live that beats do not extend."""
    await admitted(planes.one, beat("t1"), beat("t1", phase=phase))
    before = await held(planes)
    for _ in range(100):
        planes.clock.now += 900
        await admitted(planes.one, beat("t1", phase=phase, epoch=1))
    assert await held(planes) == before
    assert (await admitted(planes.one, beat("t1", phase=phase, epoch=1))).started_at == 1_000.0
    planes.clock.now += LEASE - 1
    await refused(planes.two, beat("t2", "r2"))


async def test_the_end_beat_keeps_the_owner_of_a_parked_seat_until_the_seat_is_gone(planes: Planes):
    await admitted(planes.one, beat("t1"), beat("t1", phase="ended", seat_parked=True))
    assert await held(planes) == ("r1", None, None, 1)
    await refused(planes.two, beat("t2", "r2"))
    await admitted(planes.one, beat("t1", phase="ended"))
    assert (await admitted(planes.two, beat("t2", "r2"))).epoch == 2


@pytest.mark.parametrize("phase", ["paused", "parked"])
async def test_a_take_over_that_never_became_durable_is_given_back_in_one_beat(planes: Planes, phase: str):
    await admitted(planes.one, beat("t1"), beat("t1", phase=phase), beat("t2", predecessor="t1"))
    await refused(planes.one, beat("t1", phase=phase))
    await admitted(planes.one, beat("t1", phase=phase, predecessor="t2", epoch=1))
    assert await held(planes) == ("r1", "t1" if phase == "paused" else None, None, 2)
    await refused(planes.one, beat("t2", predecessor="t1"))
    await refused(planes.two, beat("t3", "r2"))
    assert (await admitted(planes.one, beat("t3", predecessor="t1"))).epoch == 3


# -- a plane that lost its memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["running", "paused", "parked"])
async def test_a_plane_that_knows_nothing_grants_a_renewal_the_same_again(planes: Planes, phase: str):
    answer = await admitted(planes.one, beat("t1", phase=phase, epoch=7, epoch_floor=7, started_at=990.5))
    assert (answer.epoch, answer.started_at) == (7, 990.5)
    assert (await refused(planes.two, beat("t2", "r2"))).owner == "r1"
    planes.clock.now += LEASE
    assert (await admitted(planes.two, beat("t2", "r2"))).epoch == 8
    await refused(planes.one, beat("t1", phase=phase, epoch=7, epoch_floor=7))


async def test_a_turn_that_the_store_knows_as_ended_does_not_come_back(open_planes: Open):
    planes = await open_planes(asks_store=True)
    planes.ended.add("t1")
    await refused(planes.one, beat("t1", epoch=7, epoch_floor=7))
    assert await held(planes) is None
    assert (await admitted(planes.one, beat("t2", epoch_floor=7))).epoch == 8
    planes.ended.add("t2")
    assert (await admitted(planes.one, beat("t2", epoch=8))).epoch == 8
    planes.clock.now += LEASE
    await refused(planes.one, beat("t2", epoch=8))
    await admitted(planes.one, beat("t2", phase="parked", epoch=8))


# -- replicas --------------------------------------------------------------------------------------------------------


async def test_a_released_replica_holds_nothing_and_its_turns_stay_ended(planes: Planes):
    """Case M1: after a release nobody waits for a lease."""
    for n in range(3):
        await admitted(planes.one, beat(f"t{n}", session=f"s{n}"))
    await admitted(planes.one, beat("t1", session="s1", phase="paused"))
    await admitted(planes.two, beat("t9", "r2", session="s9"))
    assert await planes.one.take_lease("sweep", "r1", 60) is planes.names
    await planes.one.announce(ReplicaInfo("r1"))
    assert await planes.two.release_replica("r1") == 3
    assert await planes.two.release_replica("r1") == 0
    assert await planes.two.replicas() == []
    assert await planes.two.take_lease("sweep", "r2", 60) is planes.names
    for n in range(3):
        await refused(planes.one, beat(f"t{n}", session=f"s{n}", epoch=1))
        answer = await admitted(planes.two, beat("t5", "r2", session=f"s{n}"))
        assert answer.epoch == 2
    holder = await planes.one.look("p", "s9")
    assert holder is not None
    assert holder.running == "t9"


async def test_a_release_spares_what_somebody_else_took_over(planes: Planes):
    await admitted(planes.one, beat("t1"))
    planes.clock.now += LEASE
    await admitted(planes.two, beat("t2", "r2"))
    assert await planes.one.release_replica("r1") == 0
    assert await held(planes) == ("r2", "t2", "t2", 2)


async def test_a_replica_is_known_for_three_leases_after_it_was_announced(planes: Planes):
    one = ReplicaInfo("r1", "http://127.0.0.1:1", "boot", "/run/lock", 17)
    two = ReplicaInfo("r2")
    await planes.two.announce(two)
    await planes.one.announce(one)
    assert await planes.two.replicas() == [one, two]
    await admitted(planes.one, beat("t1"))
    holder = await planes.two.look("p", "s")
    assert holder is not None
    assert holder.advertise_url == "http://127.0.0.1:1"
    moved = ReplicaInfo("r1", "http://127.0.0.1:2", "boot", "/run/lock", 17)
    planes.clock.now += 2 * LEASE
    await planes.one.announce(moved)
    planes.clock.now += LEASE
    assert await planes.one.replicas() == [moved]
    await admitted(planes.one, beat("t1", epoch=1))
    planes.clock.now += 2 * LEASE - 0.5
    await admitted(planes.one, beat("t1", epoch=1))
    assert await planes.one.replicas() == [moved]
    planes.clock.now += 0.5
    assert await planes.one.replicas() == []
    assert (await planes.two.look("p", "s")) == Holder("r1", None, "t1", "t1", 1, 1_000.0, planes.clock.now)


async def test_a_turn_that_the_plane_does_not_remember_is_not_taken_for_gone(planes: Planes):
    """Case M8: an empty plane does not know whether the turn still runs; its owner's next beat says so."""
    assert (await refused(planes.two, beat("t2", "r2", left="t1"))).owner is None
    assert await held(planes) is None
    await admitted(planes.one, beat("t1", epoch=3))
    assert (await refused(planes.two, beat("t2", "r2", left="t1"))).owner == "r1"
    planes.clock.now += LEASE
    await refused(planes.two, beat("t2", "r2", left="t0"))
    assert (await admitted(planes.two, beat("t2", "r2", left="t1"))).epoch == 4
    await admitted(planes.two, beat("t2", "r2", "ended"))
    assert (await admitted(planes.one, beat("t3", left="t1"))).epoch == 5


async def test_a_named_lease_has_one_holder_until_it_runs_out(planes: Planes):
    """Case M9: what a dead holder took is free again after a short time."""
    if not planes.names:
        assert not await planes.one.take_lease("sweep", "r1", 10)
        return
    assert await planes.one.take_lease("sweep", "r1", 10)
    assert await planes.two.take_lease("other", "r2", 10)
    assert not await planes.two.take_lease("sweep", "r2", 10)
    planes.clock.now += 9
    assert await planes.one.take_lease("sweep", "r1", 10)
    planes.clock.now += 9
    assert not await planes.two.take_lease("sweep", "r2", 10)
    planes.clock.now += 1
    assert await planes.two.take_lease("sweep", "r2", 10)
    assert not await planes.one.take_lease("sweep", "r1", 10)


async def test_notes_reach_who_listens_in_their_order(planes: Planes):
    note = {"kind": "command", "project": "p", "session_id": "s", "command_id": "c ä", "n": 0}
    assert not await planes.two.push("r1", note)
    got: asyncio.Queue[Any] = asyncio.Queue()
    await planes.one.listen("r1", got.put_nowait)
    for n in range(20):
        assert await planes.two.push("r1", {**note, "n": n})
    assert not await planes.two.push("r3", note)
    async with asyncio.timeout(5):
        assert [await got.get() for _ in range(20)] == [{**note, "n": n} for n in range(20)]
    assert got.empty()


async def test_a_listener_that_fails_hears_the_next_note(planes: Planes):
    got: asyncio.Queue[Any] = asyncio.Queue()

    def fails_once(note: Any) -> None:
        if note["n"] == 0:
            raise ValueError("scripted")
        got.put_nowait(note)

    await planes.one.listen("r1", fails_once)
    await planes.two.push("r1", {"project": "p", "n": 0})
    await planes.two.push("r1", {"project": "p", "n": 1})
    async with asyncio.timeout(5):
        assert await got.get() == {"project": "p", "n": 1}
