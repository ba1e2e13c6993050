"""The beat shell on virtual time: first beats, renewals, losses, end beats."""

from __future__ import annotations

import asyncio
import logging
from itertools import pairwise

import pytest

from runner.errors import RunnerError
from runner.leases.heartbeat import END_TRIES, LAPSED, Heartbeats
from runner.leases.memory import MemoryLeasePlane
from runner.leases.port import BeatAnswer, Heartbeat
from tests.leases.doubles import ScriptedPlane, Step
from tests.virtual_time import LoopClock

pytestmark = pytest.mark.virtual_time

NOT_CURRENT = BeatAnswer(False, False, "r2", 0, 20)


def beat(turn: str = "t1", session: str = "s", **more) -> Heartbeat:
    return Heartbeat("p", session, turn, "r1", **more)


class Replica:
    """A beat shell with its losses."""

    def __init__(self, plane, rivals: bool = False) -> None:
        self.lost: list[tuple[float, str, BeatAnswer]] = []
        self.beats = Heartbeats(
            plane,
            LoopClock(),
            beat_seconds=5,
            beat_timeout_seconds=3,
            on_lost=lambda turn, answer: self.lost.append((now(), turn, answer)),
            rivals=lambda: rivals,
        )


def now() -> float:
    return asyncio.get_running_loop().time()


async def unavailable(replica: Replica, one: Heartbeat) -> None:
    with pytest.raises(RunnerError) as caught:
        await replica.beats.first(one)
    assert caught.value.code == "plane_unavailable"


async def test_an_admitted_turn_is_renewed_until_it_ends():
    plane = ScriptedPlane(epoch=4)
    replica = Replica(plane)
    answer = await replica.beats.first(beat(predecessor="t0", epoch_floor=3))
    assert (answer.admitted, answer.epoch) == (True, 4)
    await asyncio.sleep(16)
    assert plane.of("t1") == [(0, "running"), (5, "running"), (10, "running"), (15, "running")]
    assert plane.beats[1][1].predecessor is None
    assert plane.beats[1][1].epoch_floor == 4
    assert replica.beats.holds("p", "s", "t1")
    await replica.beats.end(beat(phase="ended"))
    assert not replica.beats.holds("p", "s", "t1")
    await asyncio.sleep(60)
    assert plane.of("t1")[4:] == [(16, "ended")]
    assert len(replica.beats) == 0


async def test_a_refused_turn_is_not_renewed():
    plane = ScriptedPlane(["refuse"])
    replica = Replica(plane)
    assert not (await replica.beats.first(beat())).admitted
    await asyncio.sleep(30)
    assert len(plane.beats) == 1
    assert replica.lost == []


async def test_a_plane_that_never_answers_is_unavailable_after_the_beat_timeout():
    replica = Replica(ScriptedPlane(["hang"]))
    await unavailable(replica, beat())
    assert now() == 3


@pytest.mark.parametrize("step", ["raise", "crash"])
async def test_a_plane_that_fails_is_unavailable_at_once(step: Step):
    replica = Replica(ScriptedPlane([step]))
    await unavailable(replica, beat())
    assert now() == 0
    assert len(replica.beats) == 0


@pytest.mark.parametrize("cut", ["timeout", "cancel"])
async def test_a_grant_whose_answer_was_lost_is_given_back(cut: str):
    """The plane took the beat, its answer never came: the session does not stay locked for a lease."""
    inner = MemoryLeasePlane(LoopClock(), 20)
    lost_answer = asyncio.Event()

    class Plane(ScriptedPlane):
        async def beat(self, beat: Heartbeat) -> BeatAnswer:
            answer = await inner.beat(beat)
            if beat.turn_id == "t1" and beat.phase == "running":
                await lost_answer.wait()
            return answer

    replica = Replica(Plane())
    first = asyncio.create_task(replica.beats.first(beat()))
    await asyncio.sleep(1)
    assert inner.lease("p", "s").running == "t1"
    if cut == "cancel":
        first.cancel()
    await asyncio.wait([first])
    await asyncio.sleep(0.1)
    assert inner.lease("p", "s").owner is None
    assert (await replica.beats.first(beat("t2"))).admitted


async def test_a_later_not_current_answer_is_told_once_and_ends_the_renewal():
    """DESIGN 3.1.7: a cancel, not a refusal."""
    plane = ScriptedPlane(["admit", "admit", NOT_CURRENT])
    replica = Replica(plane)
    await replica.beats.first(beat())
    await asyncio.sleep(60)
    assert replica.lost == [(10, "t1", NOT_CURRENT)]
    assert len(plane.beats) == 3


async def test_the_loop_survives_errors_and_rides_an_outage_out():
    """Case M8, single replica: errors and black holes cost beats, not the turn."""
    outage: list[Step] = ["raise"] * 60
    plane = ScriptedPlane(["admit", "raise", "crash", "hang", *outage])
    replica = Replica(plane)
    await replica.beats.first(beat())
    await asyncio.sleep(200)
    assert replica.lost == []
    assert not plane.steps
    last_three = [at for at, _ in plane.of("t1")[-3:]]
    assert [b - a for a, b in pairwise(last_three)] == [5, 5]
    assert replica.beats.holds("p", "s", "t1")


@pytest.mark.parametrize("step", ["raise", "crash", "hang"])
async def test_an_owner_notices_by_itself_when_another_owner_became_possible(step: Step):
    """Case M8: with rivals the lease's own end is the end, whatever the plane does."""
    plane = ScriptedPlane(["admit", "admit"], then=step)
    replica = Replica(plane, rivals=True)
    await replica.beats.first(beat())
    await asyncio.sleep(24.9)
    assert replica.lost == []
    await asyncio.sleep(60)
    assert replica.lost == [(25, "t1", LAPSED)]
    assert plane.beats[-1][0] <= 25


async def test_a_slow_answer_counts_from_when_its_beat_was_sent():
    """The plane may have decided at once: what it granted ends there before it would here."""
    gate = asyncio.Event()
    replica = Replica(ScriptedPlane([gate], then="raise"), rivals=True)
    first = asyncio.create_task(replica.beats.first(beat()))
    await asyncio.sleep(2)
    gate.set()
    assert (await first).admitted
    await asyncio.sleep(17.9)
    assert replica.beats.holds("p", "s", "t1")
    await asyncio.sleep(0.2)
    assert not replica.beats.holds("p", "s", "t1")
    assert replica.lost == [(20, "t1", LAPSED)]


async def test_one_silent_session_does_not_delay_the_others():
    plane = ScriptedPlane(["admit", "admit", "hang"])
    replica = Replica(plane)
    await replica.beats.first(beat("t1", "s1"))
    await replica.beats.first(beat("t2", "s2"))
    await asyncio.sleep(5.5)
    assert plane.of("t1") == [(0, "running"), (5, "running")]
    assert plane.of("t2") == [(0, "running"), (5, "running")]
    await asyncio.sleep(5)
    assert plane.of("t2")[-1] == (10, "running")
    assert plane.of("t1")[-1] == (9, "running")


async def test_a_failing_listener_stops_nothing(caplog: pytest.LogCaptureFixture):
    plane = ScriptedPlane(["admit", "admit", "refuse"])

    def fail(turn: str, answer: BeatAnswer) -> None:
        raise ValueError("scripted")

    beats = Heartbeats(plane, LoopClock(), beat_seconds=5, beat_timeout_seconds=3, on_lost=fail)
    await beats.first(beat("t1", "s1"))
    await beats.first(beat("t2", "s2"))
    with caplog.at_level(logging.ERROR, "runner.leases"):
        await asyncio.sleep(11)
    assert "telling about the lost lease of turn t1 failed" in caplog.messages
    assert plane.of("t2") == [(0, "running"), (5, "running"), (10, "running")]


async def test_a_failing_question_about_rivals_stops_nothing(caplog: pytest.LogCaptureFixture):
    calls = 0

    def rivals() -> bool:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ValueError("scripted")
        return True

    plane = ScriptedPlane(["admit"], then="raise", lease_seconds=4)
    lost: list[str] = []
    beats = Heartbeats(
        plane,
        LoopClock(),
        beat_seconds=5,
        beat_timeout_seconds=3,
        on_lost=lambda turn, answer: lost.append(turn),
        rivals=rivals,
    )
    with caplog.at_level(logging.ERROR, "runner.leases"):
        await beats.first(beat())
        await asyncio.sleep(30)
    assert lost == ["t1"]
    assert calls == 2


async def test_a_pause_keeps_beating_as_paused_until_the_session_is_taken_over():
    inner = MemoryLeasePlane(LoopClock(), 20)
    replica = Replica(inner)
    await replica.beats.first(beat())
    answer = await replica.beats.end(beat(phase="paused"))
    assert answer is not None
    assert answer.is_current_turn
    await asyncio.sleep(300)
    assert (inner.lease("p", "s").alive, inner.lease("p", "s").running) == ("t1", None)
    assert (await replica.beats.first(beat("t2", predecessor="t1"))).epoch == 2
    await asyncio.sleep(60)
    assert inner.lease("p", "s").running == "t2"
    assert replica.lost == []


async def test_a_parked_seat_keeps_its_owner_until_it_is_given_up():
    inner = MemoryLeasePlane(LoopClock(), 20)
    replica = Replica(inner)
    await replica.beats.first(beat())
    await replica.beats.end(beat(phase="parked"))
    await asyncio.sleep(300)
    assert inner.lease("p", "s").owner == "r1"
    await replica.beats.end(beat(phase="ended"))
    assert inner.lease("p", "s").owner is None
    assert len(replica.beats) == 0


async def test_an_end_beat_waits_at_most_the_timeout_and_is_retried_behind():
    plane = ScriptedPlane(["admit", "hang", "raise", "admit"])
    replica = Replica(plane)
    await replica.beats.first(beat())
    assert await replica.beats.end(beat(phase="ended")) is None
    assert now() == 3
    await asyncio.sleep(60)
    assert plane.of("t1")[1:] == [(0, "ended"), (3, "ended"), (8, "ended")]


async def test_the_retries_of_an_end_beat_are_bounded(caplog: pytest.LogCaptureFixture):
    plane = ScriptedPlane(["admit"], then="raise")
    replica = Replica(plane)
    await replica.beats.first(beat())
    with caplog.at_level(logging.WARNING, "runner.leases"):
        assert await replica.beats.end(beat(phase="ended")) is None
        await asyncio.sleep(600)
    assert len(plane.of("t1")) == 2 + END_TRIES
    assert "given up" in caplog.text


async def test_a_failed_pause_beat_is_retried_by_the_renewal():
    plane = ScriptedPlane(["admit", "raise"])
    replica = Replica(plane)
    await replica.beats.first(beat())
    assert await replica.beats.end(beat(phase="paused")) is None
    await asyncio.sleep(6.5)
    assert plane.of("t1")[1:] == [(0, "paused"), (1, "paused"), (6, "paused")]


async def test_a_renewal_that_was_out_when_the_turn_ended_says_nothing():
    gate = asyncio.Event()
    plane = ScriptedPlane(["admit", gate])
    replica = Replica(plane)
    await replica.beats.first(beat())
    await asyncio.sleep(6)
    await replica.beats.end(beat(phase="ended"))
    gate.set()
    await asyncio.sleep(30)
    assert replica.lost == []
    assert plane.of("t1") == [(0, "running"), (5, "running"), (6, "ended")]


async def test_a_cancelled_end_beat_is_still_sent():
    plane = ScriptedPlane(["admit", "hang"])
    replica = Replica(plane)
    await replica.beats.first(beat())
    ending = asyncio.create_task(replica.beats.end(beat(phase="ended")))
    await asyncio.sleep(1)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    await asyncio.sleep(0)
    assert plane.of("t1")[1:] == [(0, "ended"), (1, "ended")]


async def test_the_end_beat_of_a_lost_or_foreign_turn_starts_no_renewal():
    plane = ScriptedPlane(["admit", NOT_CURRENT])
    replica = Replica(plane)
    await replica.beats.first(beat())
    await asyncio.sleep(6)
    await replica.beats.end(beat(phase="parked"))
    await replica.beats.end(beat("t9", phase="paused"))
    assert len(replica.beats) == 0


async def test_an_idle_shell_has_no_timer_and_close_leaves_no_task():
    plane = ScriptedPlane(["admit", "admit", "hang"])
    replica = Replica(plane)
    await replica.beats.first(beat())
    await asyncio.sleep(11)
    await replica.beats.close()
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
    await replica.beats.first(beat())
    await asyncio.sleep(60)
    assert len(plane.beats) == 4
