"""What a replica asks and tells besides beats: commands, announcements, owners, the plane's clock."""

from __future__ import annotations

import asyncio
import logging

import pytest

from runner.errors import RunnerError
from runner.leases.heartbeat import Heartbeats
from runner.leases.memory import MemoryLeasePlane
from runner.leases.plane_clock import PlaneClock
from runner.leases.port import BeatAnswer, Heartbeat, ReplicaInfo
from tests.leases.doubles import GatedPlane, ScriptedPlane
from tests.virtual_time import LoopClock

pytestmark = pytest.mark.virtual_time

COMMANDS = ({"command_id": "c1", "kind": "cancel"}, {"command_id": "c2", "kind": "kill"})
ME = ReplicaInfo("r1", "http://127.0.0.1:1")


def shell(plane, told: list | None = None) -> Heartbeats:
    return Heartbeats(
        plane,
        LoopClock(),
        beat_seconds=5,
        beat_timeout_seconds=3,
        on_lost=lambda turn, answer: None,
        on_commands=lambda *words: (told if told is not None else []).append(words),
    )


def beat(turn: str = "t1", **more) -> Heartbeat:
    return Heartbeat("p", "s", turn, "r1", **more)


def now() -> float:
    return asyncio.get_running_loop().time()


def carrying(*commands: dict) -> BeatAnswer:
    return BeatAnswer(True, True, "r1", 1, 20, commands)


async def test_commands_of_every_answer_are_passed_on():
    told: list = []
    plane = ScriptedPlane([carrying(*COMMANDS), carrying(), carrying(COMMANDS[1]), carrying(COMMANDS[0])])
    beats = shell(plane, told)
    await beats.first(beat())
    assert told == [("p", "s", COMMANDS)]
    await asyncio.sleep(11)
    assert told[1:] == [("p", "s", COMMANDS[1:])]
    await beats.end(beat(phase="paused"))
    assert told[2:] == [("p", "s", COMMANDS[:1])]
    await beats.close()


async def test_commands_that_cannot_be_handled_cost_no_beat(caplog: pytest.LogCaptureFixture):
    def fail(*words) -> None:
        raise ValueError("scripted")

    plane = ScriptedPlane(then=carrying(*COMMANDS))
    beats = Heartbeats(
        plane,
        LoopClock(),
        beat_seconds=5,
        beat_timeout_seconds=3,
        on_lost=lambda turn, answer: pytest.fail("lost"),
        on_commands=fail,
    )
    with caplog.at_level(logging.ERROR, "runner.leases"):
        assert (await beats.first(beat())).admitted
        await asyncio.sleep(11)
    assert [at for at, _ in plane.beats] == [0, 5, 10]
    assert caplog.messages == ["commands for session s could not be handled"] * 3
    await beats.close()


async def test_a_replica_is_announced_with_the_beats_and_whenever_something_changes():
    plane = ScriptedPlane(shared=True)
    beats = shell(plane)
    beats.announce(ME)
    await asyncio.sleep(7)
    moved = ReplicaInfo("r1", "http://127.0.0.1:2")
    beats.announce(moved)
    await asyncio.sleep(6)
    assert plane.announced == [(0, ME), (5, ME), (7, moved), (12, moved)]
    await beats.close()
    await asyncio.sleep(60)
    beats.announce(ME)
    await asyncio.sleep(60)
    assert len(plane.announced) == 4


async def test_an_announcement_survives_everything_and_is_repeated_soon(caplog: pytest.LogCaptureFixture):
    """Case M8, for what the others know of a replica."""
    plane = ScriptedPlane(shared=True, announcing=["raise", "crash", "hang"])
    beats = shell(plane)
    with caplog.at_level(logging.WARNING, "runner.leases"):
        beats.announce(ME)
        await asyncio.sleep(12)
    assert [at for at, _ in plane.announced] == [0, 1, 2, 6, 11]
    assert [message for message in caplog.messages if "could not be announced" in message] != []
    await beats.close()


async def test_a_plane_of_one_process_is_told_nothing():
    plane = ScriptedPlane()
    beats = shell(plane)
    beats.announce(ME)
    await asyncio.sleep(60)
    assert plane.announced == []
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_look_has_the_time_out_of_a_beat():
    plane = MemoryLeasePlane(LoopClock(), 20)
    beats = shell(plane)
    assert await beats.look("p", "s") is None
    await beats.first(beat())
    holder = await beats.look("p", "s")
    assert holder is not None
    assert holder.running == "t1"

    class Silent(GatedPlane):
        async def look(self, project, session_id):
            await asyncio.Event().wait()

    with pytest.raises(RunnerError) as caught:
        await shell(Silent()).look("p", "s")
    assert (caught.value.code, now()) == ("plane_unavailable", 3)
    await beats.close()


async def test_the_plane_s_clock_is_told_from_here():
    class Elsewhere(ScriptedPlane):
        async def beat(self, beat: Heartbeat) -> BeatAnswer:
            await asyncio.sleep(0.2)
            at = now() + 1_000_000.0
            await asyncio.sleep(0.3)
            return BeatAnswer(True, True, "r1", 1, 20, started_at=at, now=at)

    beats = shell(Elsewhere())
    assert beats.plane_now() == now()
    answer = await beats.first(beat())
    assert answer.started_at <= beats.plane_now()
    assert beats.plane_now() == pytest.approx(now() + 1_000_000.2)
    await asyncio.sleep(50)
    assert beats.plane_now() == pytest.approx(now() + 1_000_000.2)
    await beats.close()


def test_quick_answers_narrow_the_offset_and_slow_ones_do_not_widen_it():
    clock = PlaneClock()
    assert clock.at(7.0) == 7.0
    clock.learn(10.0, 12.0, 111.5)
    assert clock.at(20.0) == 121.5
    clock.learn(13.0, 13.25, 113.125)
    assert clock.at(20.0) == 120.125
    clock.learn(14.0, 17.0, 116.0)
    assert clock.at(20.0) == 120.125


def test_an_offset_that_contradicts_what_was_learned_begins_anew():
    clock = PlaneClock()
    clock.learn(10.0, 10.5, 110.25)
    clock.learn(20.0, 20.5, 5.25)
    assert clock.at(20.5) == 5.75
    clock.learn(30.0, 30.25, 500.0)
    assert clock.at(30.0) == 500.0
