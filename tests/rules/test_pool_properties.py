"""What holds for the book whatever comes: seats are bounded, busy is sacred, the oldest goes first."""

from __future__ import annotations

import pytest
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from runner.rules.pool import Book, BookError, Cold, Full, Hit, Key, Refused, Seat
from runner.rules.reuse import FACETS, Parked, changed_facet
from runner.terms import SeatState

KEYS = st.sampled_from([(project, name) for project in "pq" for name in "abc"])
FACTS = st.builds(
    lambda facet, value: {**dict.fromkeys(FACETS, "0"), facet: value}, st.sampled_from(FACETS), st.sampled_from("01")
)
WINDOWS = st.builds(
    Parked, st.sampled_from([SeatState.IDLE, SeatState.AWAITING_APPROVAL]), st.sampled_from([0.0, 10.0, 60.0])
)


class Shell(RuleBasedStateMachine):
    """A pool whose sandboxes start only when the teardowns they wait for are proven."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.minted = 0
        self.waiting: dict[str, set[str]] = {}
        self.newest: dict[Key, int] = {}

    @initialize(max_seats=st.integers(1, 4))
    def book_of(self, max_seats: int) -> None:
        self.book = Book(max_seats)

    def untouchable(self) -> dict[Key, Seat]:
        free = (SeatState.IDLE, SeatState.SPARE)
        return {key: seat for key, seat in self.book.seats.items() if seat.state not in free}

    @rule(key=KEYS, facts=FACTS)
    def checkout(self, key: Key, facts: dict[str, str]) -> None:
        before, untouchable = dict(self.book.seats), self.untouchable()
        own, taken = before.get(key), self.book.taken
        stale = own is not None and (own.expires_at <= self.now or changed_facet(own.facets, facts) is not None)
        self.minted += 1
        got = self.book.checkout(key, f"seat{self.minted}", "local", facts, self.now, 0)
        match got:
            case Refused():
                assert key in untouchable
                assert self.book.seats == before
            case Full():
                assert self.book.seats == before
                assert self.book.taken == taken
            case Hit(seat):
                assert seat is own
                assert not stale
                assert seat.state is SeatState.BUSY
            case Cold():
                assert own is None or stale
                self.booked(key, got, before, untouchable)

    def booked(self, key: Key, got: Cold, before: dict[Key, Seat], untouchable: dict[Key, Seat]) -> None:
        assert got.seat.generation > self.newest.get(key, 0)
        self.newest[key] = got.seat.generation
        assert not [goner for goner in got.goners if goner.key in untouchable]
        idle = [seat for seat in before.values() if seat.state in (SeatState.IDLE, SeatState.SPARE)]
        idle += [seat for seat in got.goners if seat not in idle]
        evicted = [goner for goner in got.goners if goner.key != key]
        stayed = [seat for seat in idle if seat not in got.goners and seat.key != key]
        order = [[(not seat.spare, seat.parked_at) for seat in seats] for seats in (evicted, stayed)]
        assert all(gone <= other for gone in order[0] for other in order[1])
        assert all(self.book.tearing[gone.seat_id] is gone for gone in got.goners)
        assert set(got.waits) <= set(self.book.tearing)
        assert {torn.seat_id for torn in self.book.tearing.values() if torn.key == key} <= set(got.waits)
        assert self.book.taken - len(got.waits) <= self.book.max_seats
        if got.waits:
            self.waiting[got.seat.seat_id] = set(got.waits)

    @rule(key=KEYS, parked=WINDOWS)
    def park(self, key: Key, parked: Parked) -> None:
        seat = self.book.seats.get(key)
        assume(seat is not None and seat.state is SeatState.BUSY and seat.seat_id not in self.waiting)
        assert seat is not None
        self.book.park(seat, parked, self.now)
        assert seat.expires_at == self.now + parked.seconds

    @rule(ready=st.booleans())
    def spare(self, ready: bool) -> None:
        before, taken = dict(self.book.seats), self.book.taken
        self.minted += 1
        seat = self.book.book_spare(f"spare{self.minted}", f"seat{self.minted}", "local", dict.fromkeys(FACETS, "0"))
        assert (seat is None) == (taken >= self.book.max_seats)
        if seat is None:
            assert self.book.seats == before
        elif ready:
            seat.parked_at = self.now

    @rule(data=st.data(), key=KEYS)
    def claim_spare(self, data: st.DataObject, key: Key) -> None:
        spares = [seat for seat in self.book.seats.values() if seat.spare]
        assume(spares)
        spare, taken = data.draw(st.sampled_from(spares)), self.book.taken
        if not self.book.may_claim_spare(key):
            with pytest.raises(BookError):
                self.book.claim_spare(spare, key, spare.facets, "t")
            assert self.book.holds(spare)
            return
        seat = self.book.claim_spare(spare, key, spare.facets, "t")
        assert (seat.state, seat.seat_id, seat.start) == (SeatState.BUSY, spare.seat_id, "spare")
        assert seat.generation > self.newest.get(key, 0)
        assert not self.book.holds(spare)
        assert self.book.taken == taken
        self.newest[key] = seat.generation

    @rule(key=KEYS)
    def resume(self, key: Key) -> None:
        seat = self.book.claim_paused(key, "t")
        assert seat is None or seat.state is SeatState.BUSY

    @rule(key=KEYS)
    def destroy(self, key: Key) -> None:
        seat = self.book.seats.get(key)
        assume(seat is not None)
        assert seat is not None
        taken = self.book.taken
        self.book.remove(seat, "kill")
        assert self.book.taken == taken
        if self.waiting.pop(seat.seat_id, None) is not None:
            self.book.torn(seat.seat_id)

    @rule(data=st.data())
    def proven(self, data: st.DataObject) -> None:
        assume(self.book.tearing)
        seat_id = data.draw(st.sampled_from(sorted(self.book.tearing)))
        self.book.torn(seat_id)
        for waits in self.waiting.values():
            waits.discard(seat_id)
        self.waiting = {seat: waits for seat, waits in self.waiting.items() if waits}

    @rule(seconds=st.sampled_from([1.0, 10.0, 60.0]))
    def time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def reap(self) -> None:
        due = self.book.next_expiry()
        expired = self.book.expired(self.now)
        assert bool(expired) == (due is not None and due <= self.now)
        for seat in expired:
            assert seat.state in (SeatState.IDLE, SeatState.AWAITING_APPROVAL)
            self.book.remove(seat, "expired")

    @invariant()
    def live_sandboxes_are_bounded(self) -> None:
        started = [seat for seat in self.book.seats.values() if not self.waiting.get(seat.seat_id)]
        assert len(started) + len(self.book.tearing) <= self.book.max_seats
        assert len(self.book.seats) <= self.book.max_seats

    @invariant()
    def a_seat_is_in_one_place(self) -> None:
        assert not {seat.seat_id for seat in self.book.seats.values()} & set(self.book.tearing)
        assert all(seat.key == key for key, seat in self.book.seats.items())
        assert all(seat.state is SeatState.DESTROYED for seat in self.book.tearing.values())
        assert all(seat.state is not SeatState.DESTROYED for seat in self.book.seats.values())


TestShell = Shell.TestCase
