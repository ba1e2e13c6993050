"""The pool's one book: which seat serves a turn, who must go, and what may never be touched (DESIGN 3.5)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from runner.ids import SPARES
from runner.ids import Key as Key
from runner.rules.reuse import Parked, reuse_verdict
from runner.rules.story import Tell, untold
from runner.terms import SeatState

REMEMBERED: Final = 10_000
CLAIMED_SECONDS: Final = 30.0
"""How long a seat waits for the turn that claimed it before others may have its place."""


class BookError(Exception):
    """A move that the book forbids; nothing was changed."""


@dataclass(slots=True)
class Seat:
    """One line of the book.

    Attributes:
        key: (project, session).
        seat_id: unique name of the sandbox.
        generation: grows with each sandbox of the session; an old generation's events are ignored.
        state: see ``SeatState``; a ``destroyed`` seat is out of the map, counted until its teardown is proven.
        facets: the fingerprint it was made with.
        secrets_expire_at_ms: wall clock that bounds reuse, None when nothing expires.
        parked_at, expires_at: loop times, meaningful while parked.
        claimed_until: until then it is parked for the turn that follows, and nobody else takes its place.
    """

    key: Key
    seat_id: str
    generation: int
    provider: str
    facets: Mapping[str, str]
    secrets_expire_at_ms: int | None = None
    state: SeatState = SeatState.BUSY
    parked_at: float = 0.0
    expires_at: float = 0.0
    claimed_until: float = 0.0
    turn_id: str | None = None
    start: str = "cold"
    reason: str = "miss"

    @property
    def spare(self) -> bool:
        """Whether no session owns it yet; it has a name instead of one."""
        return self.key[0] == SPARES


@dataclass(frozen=True, slots=True)
class Hit:
    """This warm seat serves; it is busy from now on."""

    seat: Seat


@dataclass(frozen=True, slots=True)
class Cold:
    """A new seat was booked; destroy ``goners`` first, then wait for the teardowns of the seats ``waits``."""

    seat: Seat
    reason: str
    goners: tuple[Seat, ...] = ()
    waits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """The session's seat is busy."""


@dataclass(frozen=True, slots=True)
class Full:
    """Every seat is busy or awaits an approval."""


@dataclass(slots=True)
class Book:
    """All seats of one replica. Only these methods change it, none awaits, each decides as a whole.

    ``verdicts`` and ``generations`` outlive their seats, of the ``REMEMBERED`` sessions that started one last.
    ``tell`` hears of every move.
    """

    max_seats: int
    seats: dict[Key, Seat] = field(default_factory=dict)
    tearing: dict[str, Seat] = field(default_factory=dict)
    verdicts: dict[Key, str] = field(default_factory=dict)
    generations: dict[Key, int] = field(default_factory=dict)
    forgotten: int = 0
    tell: Tell = untold

    @property
    def taken(self) -> int:
        """Seats that count against ``max_seats``, those being torn down too."""
        return len(self.seats) + len(self.tearing)

    def checkout(
        self,
        key: Key,
        seat_id: str,
        provider: str,
        facets: Mapping[str, str],
        now: float,
        now_ms: int,
        secrets_expire_at_ms: int | None = None,
        turn_id: str | None = None,
    ) -> Hit | Cold | Refused | Full:
        """Decide how a turn gets its sandbox.

        ``seat_id`` names the new seat when one is needed. A seat that awaits an approval must have been claimed by
        ``claim_paused``: here it counts as busy.
        """
        seat = self.seats.get(key)
        goner: Seat | None = None
        reason = self.verdicts.get(key, "miss")
        if seat is not None:
            if seat.state is not SeatState.IDLE:
                self.tell(key, seat.seat_id, "refused", seat.state, seat.state)
                return Refused()
            bound = _earlier(seat.secrets_expire_at_ms, secrets_expire_at_ms)
            why = "expired" if seat.expires_at <= now else reuse_verdict(seat.facets, facets, bound, now_ms)
            if why is None:
                seat.state, seat.turn_id, seat.start, seat.reason = SeatState.BUSY, turn_id, "hit", "hit"
                self.tell(key, seat.seat_id, ("checkout", {"turn_id": turn_id}), SeatState.IDLE, SeatState.BUSY)
                return Hit(seat)
            goner, reason = seat, why
        return self._book(key, seat_id, provider, facets, secrets_expire_at_ms, turn_id, goner, reason, now)

    def _book(
        self,
        key: Key,
        seat_id: str,
        provider: str,
        facets: Mapping[str, str],
        secrets_expire_at_ms: int | None,
        turn_id: str | None,
        goner: Seat | None,
        reason: str,
        now: float,
    ) -> Cold | Full:
        goners = [goner] if goner is not None else []
        own_waits = [torn.seat_id for torn in self.tearing.values() if torn.key == key]
        needed = self.taken + 1 - self.max_seats
        waits = list(own_waits)
        if needed > 0:
            spare = list(own_waits) + [other for other in self.tearing if other not in own_waits]
            freed = [goner.seat_id] if goner is not None else []
            freed += spare
            idle = sorted((s for s in self._evictable(now) if s is not goner), key=lambda s: (not s.spare, s.parked_at))
            while len(freed) < needed and idle:
                victim = idle.pop(0)
                goners.append(victim)
                freed.append(victim.seat_id)
            if len(freed) < needed:
                self.tell(key, seat_id, "full")
                return Full()
            waits += [seat for seat in freed[:needed] if seat not in waits]
        if goner is not None and goner.seat_id not in waits:
            waits.append(goner.seat_id)
        for gone in goners:
            self.remove(gone, reason if gone is goner else "evicted")
        seat = Seat(key, seat_id, self._generation(key), provider, facets, secrets_expire_at_ms)
        seat.turn_id, seat.reason = turn_id, reason
        self.seats[key] = seat
        self.verdicts.pop(key, None)
        effects = [("await_teardown", {"seat_id": torn}) for torn in waits]
        self.tell(key, seat_id, ("book", {"turn_id": turn_id, "reason": reason}), None, SeatState.BUSY, effects)
        return Cold(seat, reason, tuple(goners), tuple(waits))

    def _evictable(self, now: float) -> list[Seat]:
        free = (SeatState.IDLE, SeatState.SPARE)
        return [s for s in self.seats.values() if s.state in free and s.claimed_until <= now]

    def book_spare(self, spare_id: str, seat_id: str, provider: str, facets: Mapping[str, str]) -> Seat | None:
        """A seat for a spare, which may be taken from it for a turn at any time; None when all are taken."""
        if self.taken >= self.max_seats:
            return None
        seat = Seat((SPARES, spare_id), seat_id, 0, provider, facets, state=SeatState.SPARE, expires_at=math.inf)
        self.seats[seat.key] = seat
        return seat

    def may_claim_spare(self, key: Key) -> bool:
        """Whether nothing of the session is here: no seat, none being torn down, no memory of one."""
        torn = any(seat.key == key for seat in self.tearing.values())
        return not torn and key not in self.seats and key not in self.generations

    def claim_spare(self, spare: Seat, key: Key, facets: Mapping[str, str], turn_id: str) -> Seat:
        """The spare's sandbox is a session's from now on: a busy seat under its key, with the same seat id."""
        self._mine(spare)
        if not spare.spare or not self.may_claim_spare(key):
            raise BookError("a spare is for a session that has nothing")
        seat = Seat(key, spare.seat_id, self._generation(key), spare.provider, facets)
        seat.turn_id, seat.start = turn_id, "spare"
        del self.seats[spare.key]
        self.seats[key] = seat
        told = {"turn_id": turn_id, "spare_id": spare.key[1]}
        self.tell(key, seat.seat_id, ("claim_spare", told), SeatState.SPARE, SeatState.BUSY)
        return seat

    def _generation(self, key: Key) -> int:
        """The session's next generation; grows also when the last one was forgotten."""
        generation = self.generations.pop(key, self.forgotten) + 1
        self.generations[key] = generation
        if len(self.generations) > REMEMBERED:
            held = {*self.seats, key, *(torn.key for torn in self.tearing.values())}
            oldest = next((other for other in self.generations if other not in held), None)
            if oldest is not None:
                self.forgotten = max(self.forgotten, self.generations[oldest])
                self.forget(oldest)
        return generation

    def claim_paused(self, key: Key, turn_id: str) -> Seat | None:
        """The seat that awaits an approval becomes busy for the turn that resumes it; None when there is none."""
        seat = self.seats.get(key)
        if seat is None or seat.state is not SeatState.AWAITING_APPROVAL:
            return None
        seat.state, seat.turn_id, seat.start, seat.reason = SeatState.BUSY, turn_id, "hit", "hit"
        self.tell(key, seat.seat_id, ("claim", {"turn_id": turn_id}), SeatState.AWAITING_APPROVAL, SeatState.BUSY)
        return seat

    def park(self, seat: Seat, parked: Parked, now: float) -> None:
        """A busy seat becomes idle or awaits an approval; its time counts from now, the end of the turn (case C10)."""
        self._mine(seat)
        if seat.state is not SeatState.BUSY:
            raise BookError(f"a seat that is {seat.state} cannot be parked")
        self.tell(
            seat.key,
            seat.seat_id,
            ("park", {"turn_id": seat.turn_id, "seconds": parked.seconds}),
            seat.state,
            parked.state,
        )
        seat.state, seat.parked_at, seat.expires_at = parked.state, now, now + parked.seconds
        seat.claimed_until = now + CLAIMED_SECONDS if parked.claimed else now

    def remove(self, seat: Seat, verdict: str) -> None:
        """Take the seat out of the map before its teardown starts; it stays counted until ``torn``."""
        self._mine(seat)
        del self.seats[seat.key]
        before, seat.state = seat.state, SeatState.DESTROYED
        self.tearing[seat.seat_id] = seat
        if not seat.spare:
            self.tell(seat.key, seat.seat_id, ("remove", {"verdict": verdict}), before, SeatState.DESTROYED)
            self.verdicts[seat.key] = verdict

    def torn(self, seat_id: str) -> None:
        """The teardown is proven: the seat no longer counts."""
        seat = self.tearing.pop(seat_id, None)
        if seat is not None and not seat.spare:
            self.tell(seat.key, seat_id, "torn", SeatState.DESTROYED)

    def holds(self, seat: Seat) -> bool:
        """Whether this very seat is still in the map."""
        return self.seats.get(seat.key) is seat

    def expired(self, now: float) -> list[Seat]:
        """Parked seats whose time is over; a busy seat never is."""
        parked = (SeatState.IDLE, SeatState.AWAITING_APPROVAL)
        return [seat for seat in self.seats.values() if seat.state in parked and seat.expires_at <= now]

    def next_expiry(self) -> float | None:
        """When the next parked seat's time is over."""
        parked = (SeatState.IDLE, SeatState.AWAITING_APPROVAL)
        return min((seat.expires_at for seat in self.seats.values() if seat.state in parked), default=None)

    def forget(self, key: Key) -> None:
        """The session ended: nothing of it is remembered."""
        self.verdicts.pop(key, None)
        self.generations.pop(key, None)

    def _mine(self, seat: Seat) -> None:
        if self.seats.get(seat.key) is not seat:
            raise BookError("the seat is not in the book")


def _earlier(one: int | None, other: int | None) -> int | None:
    known = [value for value in (one, other) if value is not None]
    return min(known, default=None)
