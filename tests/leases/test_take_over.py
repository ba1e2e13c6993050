"""A turn that takes over from a paused chain or a parked seat, and what becomes of those when it fails."""

from __future__ import annotations

import asyncio

import pytest

from runner.errors import RunnerError
from runner.leases.heartbeat import Heartbeats
from runner.leases.port import BeatAnswer, Heartbeat
from runner.rules.lease import SessionLease
from tests.leases.doubles import LEASE, GatedPlane
from tests.virtual_time import LoopClock

pytestmark = pytest.mark.virtual_time

PHASES = pytest.mark.parametrize("phase", ["paused", "parked"])


def beat(turn: str = "t1", **more) -> Heartbeat:
    return Heartbeat("p", "s", turn, "r1", **more)


def now() -> float:
    return asyncio.get_running_loop().time()


class Replica:
    """A beat shell over a plane that can be held, with its losses and commands."""

    def __init__(self) -> None:
        self.plane = GatedPlane()
        self.lost: list[str] = []
        self.commands: list[tuple] = []
        self.beats = Heartbeats(
            self.plane,
            LoopClock(),
            beat_seconds=5,
            beat_timeout_seconds=3,
            on_lost=lambda turn, answer: self.lost.append(turn),
            rivals=lambda: True,
            on_commands=lambda *words: self.commands.append(words),
        )

    @property
    def lease(self) -> SessionLease:
        return self.plane.lease("p", "s")

    def stands(self, turn: str, phase: str) -> bool:
        """Whether the session is that turn's pause or parked seat, here and at the plane."""
        lease = self.lease
        alive = turn if phase == "paused" else None
        there = (lease.owner, lease.alive, lease.running, lease.last_turn) == ("r1", alive, None, turn)
        return there and self.beats.holds("p", "s", turn) and self.lost == []

    async def stood(self, phase: str) -> None:
        """The first turn ended so."""
        assert (await self.beats.first(beat())).admitted
        assert await self.beats.end(beat(phase=phase)) is not None
        assert self.stands("t1", phase)


@pytest.fixture
def replica() -> Replica:
    return Replica()


@PHASES
async def test_a_take_over_that_did_not_become_durable_goes_back(replica: Replica, phase: str):
    await replica.stood(phase)
    assert (await replica.beats.first(beat("t2", predecessor="t1"))).epoch == 2
    await replica.beats.give_back(beat("t2", phase="ended"))
    assert replica.stands("t1", phase)
    await asyncio.sleep(300)
    assert replica.stands("t1", phase)
    assert (await replica.beats.first(beat("t3", predecessor="t1"))).epoch == 3
    await asyncio.sleep(60)
    assert replica.lease.running == "t3"


@PHASES
async def test_going_back_is_tried_until_the_plane_answers(replica: Replica, phase: str):
    await replica.stood(phase)
    await replica.beats.first(beat("t2", predecessor="t1"))
    replica.plane.down = True
    await replica.beats.give_back(beat("t2", phase="ended"))
    await asyncio.sleep(7)
    assert replica.lost == []
    replica.plane.down = False
    await asyncio.sleep(1.1)
    assert replica.stands("t1", phase)


@PHASES
async def test_a_cancelled_give_back_is_done_all_the_same(replica: Replica, phase: str):
    await replica.stood(phase)
    await replica.beats.first(beat("t2", predecessor="t1"))
    gate = replica.plane.asks["t1", phase] = asyncio.Event()
    giving = asyncio.create_task(replica.beats.give_back(beat("t2", phase="ended")))
    await asyncio.sleep(0.1)
    giving.cancel()
    await asyncio.wait([giving])
    gate.set()
    await asyncio.sleep(0.1)
    assert replica.stands("t1", phase)


async def test_without_a_former_one_it_is_ended(replica: Replica):
    assert (await replica.beats.first(beat())).admitted
    await replica.beats.give_back(beat(phase="ended", seat_parked=True))
    assert replica.lease.owner is None
    assert len(replica.beats) == 0
    assert replica.plane.sent[-1][1:] == ("t1", "ended", None)


@PHASES
async def test_a_seat_that_was_lost_meanwhile_is_not_given_back_to(replica: Replica, phase: str):
    await replica.stood(phase)
    await replica.beats.first(beat("t2", predecessor="t1"))
    await replica.beats.end(beat(phase="ended"))
    assert replica.lease.running == "t2"
    await replica.beats.give_back(beat("t2", phase="ended"))
    assert replica.lease.owner is None
    assert len(replica.beats) == 0


@PHASES
async def test_a_lease_that_was_lost_during_the_take_over_is_lost_for_what_stood_too(replica: Replica, phase: str):
    await replica.stood(phase)
    await replica.beats.first(beat("t2", predecessor="t1"))
    replica.plane.down = True
    await asyncio.sleep(21)
    assert replica.lost == ["t2"]
    await replica.beats.give_back(beat("t2", phase="ended"))
    assert replica.lost == ["t2", "t1"]


@PHASES
async def test_a_turn_that_took_over_for_good_is_lost_alone(replica: Replica, phase: str):
    await replica.stood(phase)
    await replica.beats.first(beat("t2", predecessor="t1"))
    replica.plane.down = True
    await asyncio.sleep(21)
    await replica.beats.end(beat("t2", phase="ended"))
    await replica.beats.give_back(beat("t2", phase="ended"))
    assert replica.lost == ["t2"]


@PHASES
async def test_a_refused_turn_leaves_what_stands(replica: Replica, phase: str):
    await replica.stood(phase)
    replica.plane._leases["p", "s"] = SessionLease(owner="r2", alive="x", running="x", expires_at=1e9, epoch=9)
    assert not (await replica.beats.first(beat("t2"))).admitted
    replica.plane._leases["p", "s"] = SessionLease()
    await asyncio.sleep(6)
    assert replica.stands("t1", phase)


@PHASES
@pytest.mark.parametrize("lost", ["answers", "asks"])
@pytest.mark.parametrize("how", ["timeout", "cancel"])
async def test_a_first_beat_without_an_answer_leaves_what_stood(replica: Replica, phase: str, lost: str, how: str):
    """Whether the plane took it or not: the chain or seat stands again, and the turn can never come late."""
    await replica.stood(phase)
    gate = asyncio.Event()
    getattr(replica.plane, lost)["t2", "running"] = gate
    first = asyncio.create_task(replica.beats.first(beat("t2", predecessor="t1")))
    await asyncio.sleep(1)
    assert replica.lease.running == ("t2" if lost == "answers" else None)
    if how == "cancel":
        first.cancel()
    with pytest.raises((RunnerError, asyncio.CancelledError)):
        await first
    await asyncio.sleep(0.1)
    assert replica.stands("t1", phase)
    late = await super(GatedPlane, replica.plane).beat(beat("t2", predecessor="t1"))
    assert not late.admitted
    await asyncio.sleep(60)
    assert replica.stands("t1", phase)


@PHASES
async def test_of_several_first_beats_without_an_answer_the_one_that_took_is_found(replica: Replica, phase: str):
    await replica.stood(phase)
    replica.plane.down = True
    for turn in ("t2", "t3"):
        with pytest.raises(RunnerError):
            await replica.beats.first(beat(turn))
    taken = await super(GatedPlane, replica.plane).beat(beat("t3", predecessor="t1"))
    assert taken.admitted
    replica.plane.down = False
    await asyncio.sleep(3)
    assert replica.stands("t1", phase)


@PHASES
async def test_a_take_over_is_no_loss_however_late_its_answer_is(replica: Replica, phase: str):
    """The plane grants the new turn, refuses a renewal of the old one, and the second answer is here first."""
    await replica.stood(phase)
    gate = replica.plane.answers["t2", "running"] = asyncio.Event()
    await asyncio.sleep(4)
    renewal = replica.plane.asks["t1", phase] = asyncio.Event()
    await asyncio.sleep(2)
    first = asyncio.create_task(replica.beats.first(beat("t2", predecessor="t1")))
    await asyncio.sleep(0.1)
    renewal.set()
    await asyncio.sleep(1)
    assert replica.lost == []
    gate.set()
    assert (await first).admitted
    await asyncio.sleep(60)
    assert replica.lost == []
    assert replica.lease.running == "t2"


async def test_an_end_of_what_is_in_doubt_ends_all_of_it(replica: Replica):
    await replica.stood("parked")
    replica.plane.answers["t2", "running"] = asyncio.Event()
    with pytest.raises(RunnerError):
        await replica.beats.first(beat("t2"))
    await replica.beats.end(beat(phase="ended"))
    await asyncio.sleep(0.1)
    assert replica.lease.owner is None


async def test_a_second_turn_of_this_replica_is_refused_without_asking(replica: Replica):
    """Also while the plane has forgotten the first one: the second must not bury it."""
    assert (await replica.beats.first(beat())).admitted
    replica.plane._leases.clear()
    sent = len(replica.plane.sent)
    assert await replica.beats.first(beat("t2")) == BeatAnswer(False, False, "r1", 0, LEASE)
    assert len(replica.plane.sent) == sent
    await asyncio.sleep(6)
    assert (replica.lease.running, replica.lease.epoch) == ("t1", 1)
    assert (await replica.beats.first(beat("t2", predecessor="t1"))).epoch == 2


# -- a plane without memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["running", "paused", "parked"])
async def test_a_plane_that_forgot_learns_it_with_the_next_beat(replica: Replica, phase: str):
    await asyncio.sleep(100)
    answer = await replica.beats.first(beat(epoch_floor=6))
    assert (answer.epoch, answer.started_at) == (7, 100)
    await asyncio.sleep(3)
    if phase != "running":
        await replica.beats.end(beat(phase=phase))
    replica.plane._leases.clear()
    await asyncio.sleep(5.1)
    assert (replica.lease.owner, replica.lease.epoch, replica.lease.started_at) == ("r1", 7, 100)
    assert replica.lease.running == ("t1" if phase == "running" else None)
    granted = replica.beats.granted("p", "s")
    assert granted is not None
    assert (granted.epoch, granted.started_at) == (7, 100)
    assert replica.lost == []


async def test_the_end_of_a_turn_is_learned_by_a_plane_that_forgot(replica: Replica):
    await replica.beats.first(beat(epoch_floor=6))
    replica.plane._leases.clear()
    await replica.beats.end(beat(phase="ended"))
    assert replica.lease.ended == ("t1",)
    assert replica.beats.granted("p", "s") is None


# -- without the plane -----------------------------------------------------------------------------------------------


async def unfenced(replica: Replica, one: Heartbeat) -> BeatAnswer:
    replica.plane.down = True
    with pytest.raises(RunnerError):
        await replica.beats.first(one)
    return replica.beats.unfenced(one)


async def test_an_unfenced_turn_counts_once_the_plane_grants_it(replica: Replica):
    """DESIGN 3.1.7."""
    answer = await unfenced(replica, beat(epoch_floor=3))
    assert (answer.admitted, answer.owner, answer.epoch) == (True, "r1", 4)
    await asyncio.sleep(100)
    assert replica.beats.holds("p", "s", "t1")
    assert replica.beats.fenced("p", "s", "t1") is None
    assert replica.lost == []
    replica.plane.down = False
    await asyncio.sleep(1.1)
    assert replica.beats.fenced("p", "s", "t1")
    assert (replica.lease.running, replica.lease.epoch) == ("t1", 4)
    assert all(phase == "running" for _, _, phase, _ in replica.plane.sent), "nothing was given back"
    replica.plane.down = True
    await asyncio.sleep(25)
    assert replica.lost == ["t1"], "from then on it is a turn like any other"


@pytest.mark.parametrize("rival", ["running", "ended"])
async def test_an_unfenced_turn_that_was_overtaken_is_lost(replica: Replica, rival: str):
    await unfenced(replica, beat())
    other = Heartbeat("p", "s", "x", "r2")
    assert (await super(GatedPlane, replica.plane).beat(other)).epoch == 1
    if rival == "ended":
        await super(GatedPlane, replica.plane).beat(Heartbeat("p", "s", "x", "r2", "ended"))
    replica.plane.down = False
    await asyncio.sleep(1.1)
    assert replica.lost == ["t1"]
    assert not replica.beats.holds("p", "s", "t1")
    assert replica.beats.fenced("p", "s", "t1") is False, "what it spooled does not count"


@PHASES
async def test_an_unfenced_turn_takes_its_session_over(replica: Replica, phase: str):
    await replica.stood(phase)
    answer = await unfenced(replica, beat("t2", predecessor="t1", epoch_floor=1))
    assert answer.epoch == 2
    replica.plane.down = False
    await asyncio.sleep(1.1)
    assert (replica.lease.running, replica.lease.epoch) == ("t2", 2)
    await asyncio.sleep(60)
    assert replica.lost == []


@PHASES
async def test_what_an_unfenced_turn_gives_back_has_the_lease_that_it_had(replica: Replica, phase: str):
    await replica.stood(phase)
    await unfenced(replica, beat("t2", predecessor="t1", epoch_floor=1))
    await replica.beats.give_back(beat("t2", phase="ended"))
    assert replica.beats.holds("p", "s", "t1")
    await asyncio.sleep(21)
    assert replica.lost == ["t1"]


@pytest.mark.parametrize("phase", ["paused", "parked", "ended"])
async def test_an_unfenced_turn_that_ended_meanwhile_is_granted_late(replica: Replica, phase: str):
    await unfenced(replica, beat())
    assert await replica.beats.end(beat(phase=phase)) is None
    await asyncio.sleep(2)
    replica.plane.down = False
    await asyncio.sleep(6)
    assert replica.lost == []
    assert replica.lease.epoch == 1
    assert "t1" in replica.lease.ended
    assert replica.lease.owner == (None if phase == "ended" else "r1")


async def test_an_unfenced_turn_s_epoch_is_above_what_this_replica_was_granted(replica: Replica):
    await replica.stood("parked")
    await replica.beats.first(beat("t2"))
    await replica.beats.give_back(beat("t2", phase="ended"))
    answer = await unfenced(replica, beat("t3", epoch_floor=1))
    replica.plane.down = False
    await asyncio.sleep(2)
    assert answer.epoch == replica.lease.epoch == 3
    assert replica.lost == []
