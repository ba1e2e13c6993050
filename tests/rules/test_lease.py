"""The decision of one beat (DESIGN 3.1.4): the table case by case, then what holds for every sequence."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runner.rules.lease import (
    FREE,
    REFUSALS,
    TOMBSTONES_KEPT,
    BeatAnswer,
    Heartbeat,
    Move,
    Phase,
    SessionLease,
    comes_back,
    decide,
    move,
    release,
)

LEASE = 20.0


def beat(turn: str, replica: str = "r1", phase: Phase = "running", **more) -> Heartbeat:
    return Heartbeat("p", "s", turn, replica, phase, **more)


def after(*beats: Heartbeat, lease: SessionLease = FREE, now: float = 0.0) -> SessionLease:
    for one in beats:
        lease, answer = decide(lease, one, now, LEASE)
        assert answer.admitted, one
    return lease


def refused(lease: SessionLease, one: Heartbeat, now: float = 0.0) -> BeatAnswer:
    unchanged, answer = decide(lease, one, now, LEASE)
    assert unchanged is lease
    assert (answer.admitted, answer.is_current_turn, answer.epoch) == (False, False, 0)
    return answer


def test_the_first_beat_takes_the_three_keys_and_stamps_the_start_once():
    lease, answer = decide(FREE, beat("t1", epoch_floor=7), 5.0, LEASE)
    assert answer == BeatAnswer(True, True, "r1", 8, LEASE, started_at=5.0, now=5.0)
    assert (lease.owner, lease.alive, lease.running) == ("r1", "t1", "t1")
    assert (lease.expires_at, lease.started_at) == (25.0, 5.0)
    lease, answer = decide(lease, beat("t1"), 9.0, LEASE)
    assert (answer.epoch, lease.expires_at, lease.started_at) == (8, 29.0, 5.0)
    assert (answer.started_at, answer.now) == (5.0, 9.0)
    assert (refused(lease, beat("t2"), now=9.5).started_at, refused(lease, beat("t2"), now=9.5).now) == (0.0, 9.5)
    assert decide(lease, beat("t1", phase="ended"), 12.0, LEASE)[1].started_at == 5.0


def test_a_second_turn_is_refused_and_changes_nothing_case_b1():
    lease = after(beat("t1"))
    assert refused(lease, beat("t2")).owner == "r1"
    refused(lease, beat("t2", phase="ended"))
    refused(lease, beat("t2", phase="paused"))
    refused(lease, beat("t2", phase="parked"))


def test_another_replica_is_refused_and_told_the_owner_case_b11():
    lease = after(beat("t1"))
    for phase in ("running", "paused", "parked", "ended"):
        assert refused(lease, beat("t2", "r2", phase)).owner == "r1"
        assert refused(lease, beat("t1", "r2", phase)).owner == "r1"


def test_another_replica_is_refused_while_paused_or_parked():
    paused = after(beat("t1"), beat("t1", phase="paused"))
    assert refused(paused, beat("t2", "r2")).owner == "r1"
    parked = after(beat("t1"), beat("t1", phase="ended", seat_parked=True))
    assert refused(parked, beat("t2", "r2")).owner == "r1"


def test_an_ended_turn_never_comes_back():
    lease = after(beat("t1"), beat("t1", phase="ended"))
    assert lease == SessionLease(epoch=1, ended=("t1",))
    for phase in ("running", "paused", "parked", "ended"):
        refused(lease, beat("t1", phase=phase))
    _, answer = decide(lease, beat("t2", "r2"), 0.0, LEASE)
    assert (answer.admitted, answer.epoch) == (True, 2)


def test_the_end_beat_keeps_the_owner_of_a_parked_seat_until_the_seat_is_gone():
    lease, answer = decide(after(beat("t1")), beat("t1", phase="ended", seat_parked=True), 1.0, LEASE)
    assert (answer.admitted, answer.is_current_turn, answer.owner) == (True, False, "r1")
    assert (lease.owner, lease.alive, lease.running, lease.expires_at) == ("r1", None, None, 21.0)
    lease, answer = decide(lease, beat("t1", phase="parked"), 9.0, LEASE)
    assert (answer.admitted, lease.expires_at) == (True, 29.0)
    refused(lease, beat("t0", phase="parked"))
    refused(lease, beat("t1", "r2", phase="parked"))
    assert after(beat("t1", phase="ended"), lease=lease).owner is None


def test_a_parked_beat_that_overtakes_the_end_beat_ends_the_turn():
    lease = after(beat("t1"), beat("t1", phase="parked"))
    assert (lease.owner, lease.alive, lease.running, lease.ended) == ("r1", None, None, ("t1",))


def test_a_pause_releases_running_and_keeps_alive():
    lease, answer = decide(after(beat("t1")), beat("t1", phase="paused"), 3.0, LEASE)
    assert (lease.owner, lease.alive, lease.running, lease.expires_at) == ("r1", "t1", None, 23.0)
    assert (answer.admitted, answer.is_current_turn, answer.epoch) == (True, True, 1)
    lease = after(beat("t1", phase="paused"), lease=lease, now=9.0)
    assert lease.expires_at == 29.0
    late = after(beat("t1"), lease=lease, now=9.0)
    assert (late.alive, late.running, late.parked) == ("t1", None, False)


def test_a_resume_is_admitted_while_its_predecessor_is_paused():
    paused = after(beat("t1"), beat("t1", phase="paused"))
    for resume in (beat("t2"), beat("t2", predecessor="t1")):
        lease, answer = decide(paused, resume, 0.0, LEASE)
        assert (answer.admitted, answer.epoch, lease.alive, lease.running) == (True, 2, "t2", "t2")
        for phase in ("running", "paused", "parked", "ended"):
            refused(lease, beat("t1", phase=phase))


def test_a_hand_off_swaps_in_one_step_without_an_end_beat():
    running = after(beat("t1"))
    lease, answer = decide(running, beat("t2", predecessor="t1"), 1.0, LEASE)
    assert (answer.admitted, answer.epoch) == (True, 2)
    assert (lease.alive, lease.running, lease.started_at, lease.ended) == ("t2", "t2", 1.0, ("t1",))
    refused(lease, beat("t1"))
    refused(lease, beat("t1", phase="ended"))


def test_a_hand_off_needs_a_predecessor_that_ended_is_mine_and_holds():
    running = after(beat("t1"))
    refused(running, beat("t2", predecessor="t0"))
    refused(running, beat("t2", "r2", predecessor="t1"))
    unchanged, answer = decide(running, beat("t2", predecessor="t1"), 0.0, LEASE, predecessor_ended=False)
    assert unchanged is running
    assert not answer.admitted


def test_a_late_end_beat_of_the_predecessor_clears_nothing():
    lease = after(beat("t1"), beat("t1", phase="ended", seat_parked=True), beat("t2"))
    refused(lease, beat("t1", phase="ended"))
    refused(lease, beat("t1", phase="parked"))


def test_the_three_keys_expire_together_and_another_replica_takes():
    for lease in (
        after(beat("t1")),
        after(beat("t1"), beat("t1", phase="paused")),
        after(beat("t1"), beat("t1", phase="parked")),
    ):
        refused(lease, beat("t2", "r2"), now=19.99)
        taken, answer = decide(lease, beat("t2", "r2"), 20.0, LEASE)
        assert (answer.admitted, answer.owner, answer.epoch) == (True, "r2", 2)
        assert refused(taken, beat("t1"), now=60.0).owner is None


@pytest.mark.parametrize("phase", ["running", "paused", "parked"])
def test_a_lapsed_lease_that_nobody_took_comes_back_with_its_epoch(phase: Phase):
    """DESIGN 3.1.7: a single replica rides an outage out."""
    lease = after(beat("t1"))
    if phase != "running":
        lease = after(beat("t1", phase=phase), lease=lease)
    back, answer = decide(lease, beat("t1", phase=phase), 500.0, LEASE)
    assert (answer.admitted, answer.owner, answer.epoch) == (True, "r1", 1)
    assert (back.alive, back.running) == (lease.alive, lease.running)
    assert (back.expires_at, back.started_at) == (520.0, 0.0)


FORGETFUL = [FREE, SessionLease(epoch=3), SessionLease(epoch=3, last_turn="t0", last_replica="r2", ended=("t",))]


@pytest.mark.parametrize("lease", FORGETFUL)
@pytest.mark.parametrize("phase", ["running", "paused", "parked"])
def test_a_plane_that_lost_its_memory_grants_the_same_again(lease: SessionLease, phase: Phase):
    back, answer = decide(lease, beat("t1", phase=phase, epoch=5, epoch_floor=5, started_at=7.0), 90.0, LEASE)
    assert (answer.admitted, answer.owner, answer.epoch, answer.started_at) == (True, "r1", 5, 7.0)
    assert (back.owner, back.expires_at, back.epoch, back.started_at) == ("r1", 110.0, 5, 7.0)
    held = {"running": ("t1", "t1", False), "paused": ("t1", None, False), "parked": (None, None, True)}
    assert (back.alive, back.running, back.parked) == held[phase]
    assert refused(back, beat("t2", "r2"), now=100.0).owner == "r1"
    again, answer = decide(back, beat("t1", phase=phase, epoch=5, epoch_floor=5, started_at=7.0), 95.0, LEASE)
    assert (answer.epoch, again.started_at, again.expires_at) == (5, 7.0, 115.0)


def test_a_start_in_the_future_of_a_plane_whose_clock_began_anew_is_not_believed():
    assert decide(FREE, beat("t1", epoch=5, started_at=900.0), 3.0, LEASE)[1].started_at == 3.0
    assert decide(FREE, beat("t1", epoch=5), 3.0, LEASE)[1].started_at == 3.0


@pytest.mark.parametrize("phase", ["running", "paused", "parked", "ended"])
def test_a_renewal_that_was_overtaken_while_the_plane_forgot_is_stale(phase: Phase):
    """A newer turn took the empty plane, ended and left no word of the old one: its epoch is past all the same."""
    newer = after(beat("t2", "r2", epoch_floor=5), beat("t2", "r2", "ended"))
    assert newer.epoch == 6
    refused(newer, beat("t1", phase=phase, epoch=5, epoch_floor=5))
    refused(newer, beat("t1", phase=phase, epoch=6, epoch_floor=6))
    refused(FREE, beat("t1", phase=phase, epoch=5, epoch_floor=6))


def test_an_end_beat_to_a_plane_that_forgot_leaves_a_tombstone():
    lease = after(beat("t1", phase="ended", epoch=5))
    assert lease == SessionLease(epoch=5, ended=("t1",))
    refused(lease, beat("t1", epoch=5))
    kept = after(beat("t1", phase="ended", epoch=5, seat_parked=True))
    assert (kept.owner, kept.alive, kept.parked) == ("r1", None, True)


def test_the_store_s_word_on_a_turn_that_comes_back_is_its_tombstone():
    lapsed = after(beat("t1"))
    for lease, one in (
        (FREE, beat("t1", epoch=5)),
        (lapsed.at(50.0), beat("t1")),
        (lapsed.at(50.0), beat("t1", epoch=1)),
    ):
        assert comes_back(lease, one)
        assert move(lease, one) is Move.TAKE
        assert move(lease, one, turn_ended=True) is Move.REFUSE_ENDED
    for lease, one in (
        (FREE, beat("t1")),
        (lapsed, beat("t1", epoch=1)),
        (lapsed.at(50.0), beat("t2")),
        (FREE, beat("t1", phase="parked", epoch=5)),
        (after(beat("t1", "r2")), beat("t1", epoch=1)),
    ):
        assert not comes_back(lease, one)
        assert move(lease, one, turn_ended=True) is move(lease, one)


@pytest.mark.parametrize("phase", ["paused", "parked"])
@pytest.mark.parametrize("lapsed", [False, True])
def test_what_a_turn_that_never_became_durable_took_is_given_back_in_one_step(phase: Phase, lapsed: bool):
    before = after(beat("t1"), beat("t1", phase=phase))
    taken = after(beat("t2", predecessor="t1"), lease=before, now=1.0)
    refused(taken, beat("t1", phase=phase), now=2.0)
    at = 50.0 if lapsed else 2.0
    back, answer = decide(taken, beat("t1", phase=phase, predecessor="t2"), at, LEASE)
    assert (answer.admitted, answer.is_current_turn, back.epoch) == (True, phase == "paused", 2)
    assert (back.owner, back.alive, back.running) == ("r1", "t1" if phase == "paused" else None, None)
    assert (back.parked, back.expires_at) == (phase == "parked", at + LEASE)
    refused(back, beat("t2", predecessor="t1"), now=at)
    refused(back, beat("t2", phase="ended"), now=at)
    assert after(beat("t1", phase=phase), lease=back, now=at + 5).expires_at == at + 25
    assert decide(back, beat("t3", predecessor="t1"), at, LEASE)[1].epoch == 3


def test_only_what_the_named_turn_took_is_given_back():
    before = after(beat("t1"), beat("t1", phase="paused"))
    refused(after(beat("t2"), lease=before), beat("t1", phase="paused", predecessor="t9"))
    refused(after(beat("t2"), lease=before), beat("t1", "r2", phase="paused", predecessor="t2"))
    stood = after(beat("t1", phase="paused", predecessor="t2"), lease=before)
    assert stood.alive == "t1"
    refused(stood, beat("t2", predecessor="t1"))


def test_the_same_turn_from_another_replica_gets_a_new_epoch():
    _, answer = decide(after(beat("t1")), beat("t1", "r2"), 30.0, LEASE)
    assert (answer.admitted, answer.epoch) == (True, 2)


def test_a_turn_is_only_taken_for_gone_by_a_plane_that_remembers_it():
    for remembered in (
        after(beat("t1")).at(20.0),
        after(beat("t1"), beat("t1", phase="ended")),
        release(after(beat("t1")), "r1"),
        after(beat("x", "r2"), lease=after(beat("t1")), now=20.0).at(40.0),
    ):
        assert move(remembered, beat("t2", "r2", left="t1")) is Move.TAKE
    for forgetful in (*FORGETFUL, after(beat("t0")).at(20.0)):
        assert move(forgetful, beat("t2", "r2", left="t1")) is Move.REFUSE_FORGOTTEN
        assert refused(forgetful, beat("t2", "r2", left="t1"), now=20.0).owner is None
        assert move(forgetful, beat("t2", "r2")) is Move.TAKE
    assert move(after(beat("t1")), beat("t2", "r2", left="t1")) is Move.REFUSE_OWNED
    assert move(after(beat("t1")), beat("t2", left="t9")) is Move.REFUSE_RUNNING


def test_a_lapsed_lease_can_still_be_ended():
    lease = after(beat("t1"))
    assert after(beat("t1", phase="ended"), lease=lease, now=50.0).ended == ("t1",)
    assert after(beat("t1", phase="ended", seat_parked=True), lease=lease, now=50.0).owner == "r1"


def test_releasing_a_replica_buries_its_turn():
    lease = after(beat("t1"))
    assert release(lease, "r2") is lease
    freed = release(lease, "r1")
    assert freed == SessionLease(epoch=1, ended=("t1",))
    assert release(freed, "r1") is freed


def test_tombstones_are_bounded():
    lease = FREE
    for n in range(3 * TOMBSTONES_KEPT):
        lease = after(beat(f"t{n}"), beat(f"t{n}", phase="ended"), lease=lease)
    assert len(lease.ended) == TOMBSTONES_KEPT
    refused(lease, beat(f"t{3 * TOMBSTONES_KEPT - 1}"))


TURNS = st.sampled_from([f"t{n}" for n in range(6)])
REPLICAS = st.sampled_from(["r1", "r2"])
BEATS = st.builds(
    beat,
    TURNS,
    REPLICAS,
    st.sampled_from(["running", "running", "paused", "parked", "ended"]),
    predecessor=st.none() | TURNS,
    epoch_floor=st.integers(0, 5),
    seat_parked=st.booleans(),
    epoch=st.just(0) | st.integers(0, 8),
    started_at=st.sampled_from([0.0, 1.5]),
    left=st.none() | TURNS,
)


class LeaseStory(RuleBasedStateMachine):
    """Any beats of two replicas over any time."""

    def __init__(self) -> None:
        super().__init__()
        self.lease = FREE
        self.now = 0.0
        self.holder: tuple[str, str] | None = None
        self.granted = 0
        self.seen: set[str | None] = set()

    @rule(seconds=st.sampled_from([0.0, 1.0, 5.0, 19.0, 20.0, 90.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(one=BEATS, settled=st.booleans())
    def beats(self, one: Heartbeat, settled: bool) -> None:
        before = self.lease.at(self.now)
        chosen = move(before, one, turn_ended=settled)
        lease, answer = decide(self.lease, one, self.now, LEASE, turn_ended=settled)
        assert answer.now == self.now
        if not answer.admitted:
            assert chosen in REFUSALS
            assert lease is self.lease
            return
        assert chosen not in REFUSALS
        assert before.owner in (None, one.replica_id), "a live owner is never overruled"
        assert answer.owner == lease.owner
        assert answer.is_current_turn == (lease.alive == one.turn_id)
        if one.left is not None and before.owner is None and lease.running is not None:
            assert one.left in self.seen, "a turn that the plane never saw is not taken for gone"
        if before.running is not None and lease.running not in (None, before.running):
            assert one.predecessor == before.running, "only a hand-off that names it replaces a running turn"
        if one.phase != "running":
            assert before.alive in (None, one.turn_id) or (chosen is Move.RESTORE and before.alive == one.predecessor)
            assert lease.running is None
        assert before.started_at in (0.0, lease.started_at) or before.last_turn != one.turn_id or lease.owner is None
        if lease.running is not None:
            self._running(one, answer)
        self.lease = lease
        self.seen |= {one.turn_id, one.predecessor}

    def _running(self, one: Heartbeat, answer: BeatAnswer) -> None:
        assert one.turn_id not in self.lease.ended, "a tombstoned turn never runs again"
        if self.holder == (one.turn_id, one.replica_id):
            assert answer.epoch >= self.granted
        else:
            assert answer.epoch > self.granted
            assert answer.epoch > one.epoch_floor or answer.epoch == one.epoch == one.epoch_floor
        self.holder, self.granted = (one.turn_id, one.replica_id), answer.epoch

    @rule(replica=REPLICAS)
    def released(self, replica: str) -> None:
        lease = release(self.lease, replica)
        if self.lease.owner != replica:
            assert lease is self.lease
        self.lease = lease

    @rule()
    def the_plane_forgets(self) -> None:
        self.lease, self.holder, self.granted, self.seen = FREE, None, 0, set()

    @precondition(lambda self: self.lease.owner is not None)
    @rule()
    def the_lease_runs_out_and_a_new_turn_takes_it(self) -> None:
        self.now = max(self.now, self.lease.expires_at)
        lease, answer = decide(self.lease, beat("new", "r3"), self.now, LEASE)
        assert answer.admitted
        assert answer.epoch == self.lease.epoch + 1
        assert replace(lease, ended=()).running == "new"

    @invariant()
    def keys_belong_together(self) -> None:
        lease = self.lease
        assert lease.running in (None, lease.alive)
        assert lease.alive is None or lease.owner is not None
        assert lease.epoch >= self.granted
        assert len(lease.ended) <= TOMBSTONES_KEPT
        if lease.running is not None:
            assert lease.running not in lease.ended


TestLeaseStory = LeaseStory.TestCase
