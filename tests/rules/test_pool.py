"""The pool's book: who serves a turn, who must go, what is never touched (DESIGN 3.5)."""

from __future__ import annotations

import pytest

from runner.rules import pool as module
from runner.rules.pool import CLAIMED_SECONDS, Book, BookError, Cold, Full, Hit, Key, Refused, Seat
from runner.rules.reuse import FACETS, Parked
from runner.terms import SeatState

FACTS = dict.fromkeys(FACETS, "1")
IDLE = Parked(SeatState.IDLE, 60.0)
ASKING = Parked(SeatState.AWAITING_APPROVAL, 600.0)
A, B, C, D = (("p", name) for name in "abcd")


class Desk:
    """A book and a clock; names seats by session and generation."""

    def __init__(self, max_seats: int = 4) -> None:
        self.book = Book(max_seats)
        self.now = 0.0

    def ask(self, key: Key, facts: dict[str, str] | None = None, expire_ms: int | None = None):
        name = f"{key[1]}{self.book.generations.get(key, 0) + 1}"
        now_ms = int(self.now * 1000)
        return self.book.checkout(key, name, "local", facts or FACTS, self.now, now_ms, expire_ms, f"turn-{name}")

    def seat(self, key: Key, parked: Parked | None = IDLE, **more) -> Seat:
        """A seat of its own for the session, parked unless told otherwise."""
        got = self.ask(key, **more)
        assert isinstance(got, Cold)
        for gone in got.waits:
            self.book.torn(gone)
        if parked is not None:
            self.book.park(got.seat, parked, self.now)
        return got.seat


def cold(got: object) -> Cold:
    assert isinstance(got, Cold)
    return got


def test_a_first_turn_is_a_miss():
    got = cold(Desk().ask(A))
    assert (got.reason, got.goners, got.waits) == ("miss", (), ())
    assert (got.seat.state, got.seat.generation, got.seat.turn_id) == (SeatState.BUSY, 1, "turn-a1")


def test_a_parked_seat_serves_the_next_turn_and_is_busy_again():
    desk = Desk()
    seat = desk.seat(A)
    got = desk.ask(A)
    assert got == Hit(seat)
    assert (seat.state, seat.start, seat.reason, seat.turn_id) == (SeatState.BUSY, "hit", "hit", "turn-a2")
    assert desk.ask(A) == Refused()


@pytest.mark.parametrize("parked", [None, ASKING])
def test_a_second_turn_that_meets_a_taken_seat_is_refused_and_touches_nothing(parked: Parked | None):
    desk = Desk(1)
    seat = desk.seat(A, parked)
    desk.now = 10_000.0
    state = seat.state
    assert desk.ask(A, {**FACTS, "env": "2"}) == Refused()
    assert desk.book.seats == {A: seat}
    assert (seat.state, desk.book.taken) == (state, 1)


@pytest.mark.parametrize("facet", FACETS)
def test_a_changed_facet_is_named_and_rebuilds_case_c12(facet: str):
    desk = Desk()
    old = desk.seat(A)
    got = cold(desk.ask(A, {**FACTS, facet: "2"}))
    assert (got.reason, got.goners, got.waits) == (f"changed:{facet}", (old,), (old.seat_id,))
    assert got.seat.generation == 2
    assert (got.seat.start, got.seat.reason) == ("cold", f"changed:{facet}")


def test_another_tenants_session_of_the_same_name_is_a_miss_case_c12():
    desk = Desk()
    desk.seat(("p", "s"))
    assert cold(desk.ask(("q", "s"))).reason == "miss"


def test_secrets_about_to_expire_are_not_reused():
    desk = Desk()
    desk.seat(A, expire_ms=100_000)
    desk.now = 39.0
    assert isinstance(desk.ask(A), Hit)
    desk = Desk()
    desk.seat(A, expire_ms=100_000)
    desk.now = 40.0
    assert cold(desk.ask(A)).reason == "credentials_expiring"


def test_the_earlier_of_both_expiries_counts():
    desk = Desk()
    desk.seat(A, expire_ms=1_000_000)
    assert cold(desk.ask(A, expire_ms=50_000)).reason == "credentials_expiring"
    desk = Desk()
    desk.seat(A, expire_ms=50_000)
    assert cold(desk.ask(A, expire_ms=1_000_000)).reason == "credentials_expiring"


def test_an_expired_seat_never_hits_even_before_the_reaper_came():
    desk = Desk()
    seat = desk.seat(A)
    desk.now = 60.0
    got = cold(desk.ask(A))
    assert (got.reason, got.goners) == ("expired", (seat,))


def test_time_counts_from_the_end_of_the_turn_case_c10():
    desk = Desk()
    seat = desk.seat(A, parked=None)
    desk.now = 120.0
    desk.book.park(seat, IDLE, desk.now)
    desk.now = 121.0
    assert desk.book.expired(desk.now) == []
    assert desk.book.next_expiry() == 180.0
    assert isinstance(desk.ask(A), Hit)


def test_a_busy_seat_never_expires_case_c11():
    desk = Desk()
    desk.seat(A, parked=None)
    asking = desk.seat(B, ASKING)
    assert desk.book.next_expiry() == 600.0
    assert desk.book.expired(599.0) == []
    assert desk.book.expired(600.0) == [asking]


def test_the_oldest_idle_seat_makes_room():
    desk = Desk(3)
    desk.seat(A)
    desk.now = 5.0
    oldest = desk.seat(B, Parked(SeatState.IDLE, 1000.0))
    desk.now = 8.0
    assert isinstance(desk.ask(A), Hit)
    desk.book.park(desk.book.seats[A], IDLE, desk.now)
    desk.seat(C, ASKING)
    got = cold(desk.ask(D))
    assert (got.goners, got.waits, got.reason) == ((oldest,), ("b1",), "miss")
    assert B not in desk.book.seats
    assert cold(Desk.ask(desk, B)).reason == "evicted"


def test_a_seat_that_is_handed_over_is_nobody_elses_until_its_turn_had_time_to_come():
    desk = Desk(1)
    desk.seat(A, Parked(SeatState.IDLE, 1000.0, claimed=True))
    assert desk.ask(B) == Full()
    assert isinstance(desk.ask(A), Hit)
    desk.book.park(desk.book.seats[A], Parked(SeatState.IDLE, 1000.0, claimed=True), desk.now)
    desk.now += CLAIMED_SECONDS
    assert cold(desk.ask(B)).goners[0].key == A


@pytest.mark.parametrize("parked", [None, ASKING])
def test_a_full_house_evicts_nobody_busy_and_nobody_who_waits_for_an_answer(parked: Parked | None):
    desk = Desk(2)
    seats = {A: desk.seat(A, parked), B: desk.seat(B, parked)}
    desk.now = 1e6
    assert desk.ask(C) == Full()
    assert desk.book.seats == seats
    assert (desk.book.tearing, desk.book.generations.get(C)) == ({}, None)


def test_one_teardown_makes_room_for_one_newcomer_only():
    desk = Desk(1)
    desk.seat(A)
    assert cold(desk.ask(B)).waits == ("a1",)
    assert desk.book.taken == 2
    assert desk.ask(C) == Full()
    desk.book.torn("a1")
    assert desk.ask(C) == Full()


def test_a_newcomer_waits_for_teardowns_under_way_before_it_evicts():
    desk = Desk(2)
    leaving = desk.seat(A)
    desk.seat(B)
    desk.book.remove(leaving, "expired")
    got = cold(desk.ask(C))
    assert (got.goners, got.waits) == ((), ("a1",))


def test_a_session_waits_for_its_own_old_sandbox_even_when_there_is_room():
    desk = Desk(10)
    seat = desk.seat(A)
    desk.book.remove(seat, "survivors")
    got = cold(desk.ask(A))
    assert (got.reason, got.waits, got.seat.generation) == ("survivors", ("a1",), 2)


def test_its_own_changed_seat_is_the_room_a_session_needs():
    desk = Desk(1)
    old = desk.seat(A)
    got = cold(desk.ask(A, {**FACTS, "recipe": "2"}))
    assert (got.goners, got.waits) == ((old,), ("a1",))


def test_a_removed_seat_counts_until_its_teardown_is_proven_case_d10():
    desk = Desk(1)
    seat = desk.seat(A, parked=None)
    desk.book.remove(seat, "kill")
    assert (seat.state, desk.book.taken, desk.book.holds(seat)) == (SeatState.DESTROYED, 1, False)
    desk.book.torn(seat.seat_id)
    desk.book.torn(seat.seat_id)
    assert desk.book.taken == 0


def test_a_verdict_is_shown_once():
    desk = Desk()
    desk.book.remove(desk.seat(A), "harness_exited")
    desk.book.torn("a1")
    assert cold(desk.ask(A)).reason == "harness_exited"
    assert desk.book.verdicts == {}
    desk.book.remove(desk.book.seats[A], "kill")
    assert cold(desk.ask(A)).reason == "kill"


def test_only_the_paused_seat_can_be_claimed_for_its_answer():
    desk = Desk()
    assert desk.book.claim_paused(A, "t") is None
    desk.seat(A)
    assert desk.book.claim_paused(A, "t") is None
    asking = desk.seat(B, ASKING)
    assert desk.book.claim_paused(B, "t9") is asking
    assert (asking.state, asking.turn_id, asking.start) == (SeatState.BUSY, "t9", "hit")
    assert desk.book.claim_paused(B, "t9") is None


def test_moves_that_the_book_forbids_change_nothing():
    desk = Desk()
    idle = desk.seat(A)
    with pytest.raises(BookError, match="idle cannot be parked"):
        desk.book.park(idle, ASKING, 7.0)
    assert (idle.state, idle.expires_at) == (SeatState.IDLE, 60.0)
    desk.book.remove(idle, "kill")
    for move in (lambda: desk.book.park(idle, IDLE, 1.0), lambda: desk.book.remove(idle, "again")):
        with pytest.raises(BookError, match="not in the book"):
            move()
    assert desk.book.verdicts == {A: "kill"}


def test_an_old_generation_cannot_move_the_new_one():
    desk = Desk()
    old = desk.seat(A)
    desk.book.remove(old, "kill")
    desk.book.torn("a1")
    new = desk.seat(A, parked=None)
    with pytest.raises(BookError):
        desk.book.remove(old, "late")
    assert desk.book.holds(new)


def test_what_is_remembered_of_sessions_without_a_seat_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "REMEMBERED", 3)
    desk = Desk(2)
    holder = desk.seat(("p", "holder"), parked=None)
    for name in ("a", "b", "a", "c", "d", "e"):
        seat = desk.seat(("p", name))
        desk.book.remove(seat, "kill")
        desk.book.torn(seat.seat_id)
    assert set(desk.book.generations) == {holder.key, D, ("p", "e")}
    assert set(desk.book.verdicts) == {D, ("p", "e")}
    assert desk.seat(A).generation > 2, "an old seat of a forgotten session can never be taken for a new one"


def test_an_ended_session_is_forgotten():
    desk = Desk()
    desk.book.remove(desk.seat(A), "delete")
    desk.book.torn("a1")
    desk.book.forget(A)
    assert (desk.book.verdicts, desk.book.generations) == ({}, {})
