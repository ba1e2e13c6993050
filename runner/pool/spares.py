"""The shell of the spares: starts what the rule wants, hands one to a session, leaves nothing behind (DESIGN 3.10)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Generic, Protocol, TypeVar

from runner.clock import Clock, rfc3339
from runner.errors import RunnerError
from runner.ids import Ids, Key
from runner.metrics import SPARES as COUNTED
from runner.metrics import Metrics
from runner.pool.pool import Occupant, Pool
from runner.rules.pool import Seat
from runner.rules.reuse import changed_facet
from runner.rules.spares import Begin, Kind, Shelf, Spare, SpareState
from runner.tasks import Tasks

log = logging.getLogger("runner.pool")
L_co = TypeVar("L_co", covariant=True)
CLOSE_SECONDS: Final = 15.0


class SpareAgent(Occupant, Protocol):
    """A started agent of a spare."""

    def watch_spare(self, on_exit: Callable[[], None]) -> None:
        """Until it is claimed: keep what it tells about itself; call ``on_exit`` when it exits."""
        ...


L = TypeVar("L", bound=SpareAgent)


class Making(Protocol[L_co]):
    """Makes spares and takes away what is left of them."""

    def facets(self, kind: Kind) -> Mapping[str, str]:
        """The fingerprint that a spare of this kind would get now."""
        ...

    async def start(self, seat: Seat, kind: Kind) -> L_co:
        """Start one, up to an open agent session; undone on failure or cancellation.

        Raises:
            RunnerError: why there is none.
        """
        ...

    async def remove(self, kind: Kind, spare_id: str) -> None:
        """Delete its directories. Raises ``RunnerError`` when something is left."""
        ...


class Spares(Generic[L]):
    """Keeps spares on the shelf; the only one who changes it.

    Args:
        shelf: the rule.
        pool: where their seats are booked.
        making: makes them.
        always: kinds that are kept from the beginning, used or not.
    """

    def __init__(
        self,
        shelf: Shelf,
        pool: Pool[L],
        making: Making[L],
        *,
        clock: Clock,
        ids: Ids,
        metrics: Metrics,
        always: Iterable[Kind] = (),
    ) -> None:
        self._shelf = shelf
        self._pool = pool
        self._making = making
        self._clock = clock
        self._ids = ids
        self._metrics = metrics
        self._tasks = Tasks("spares")
        self._timer: asyncio.TimerHandle | None = None
        self._seats: dict[str, Seat] = {}
        pool.on_spare_removed, pool.on_free = self._removed, self.stir
        for kind in always:
            shelf.used(kind, clock.monotonic(), always=True)

    def used(self, kind: Kind, facets: Mapping[str, str]) -> None:
        """A turn starts an agent that a spare could have been, or has just got one that was; it is not held up."""
        if changed_facet(self._making.facets(kind), facets) is None:
            now = self._clock.monotonic()
            self._shelf.used(kind, now)
            self._arm(now)

    def claim(self, key: Key, kind: Kind, facets: Mapping[str, str], turn_id: str) -> tuple[str, L] | None:
        """A spare for the first turn of a session: its id, and what lives in the session's busy seat from now on."""
        if not self._pool.book.may_claim_spare(key):
            return None
        spare = self._shelf.claim(kind, facets, self._clock.monotonic())
        if spare is None:
            return None
        del self._seats[spare.spare_id]
        self._metrics.add(COUNTED, "claimed")
        return spare.spare_id, self._pool.claim_spare(spare.spare_id, key, facets, turn_id)

    def stir(self) -> None:
        """Do what is due, and see that it is looked at again in time."""
        now, book = self._clock.monotonic(), self._pool.book
        for effect in self._shelf.due(now, book.max_seats - book.taken, self._making.facets):
            if isinstance(effect, Begin):
                self._begin(effect.kind)
            else:
                self._retire(effect.spare_id, effect.verdict)
        self._arm(now)

    def _arm(self, now: float) -> None:
        due = self._shelf.next_due(now)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None and not self._shelf.closed:
            self._timer = asyncio.get_running_loop().call_at(due, self.stir)

    def _begin(self, kind: Kind) -> None:
        spare_id, facets = self._ids.mint("spare"), self._making.facets(kind)
        seat = self._pool.book.book_spare(spare_id, self._ids.mint("seat"), kind.provider, facets)
        if seat is not None:
            self._shelf.begun(spare_id, kind, facets)
            self._seats[spare_id] = seat
            task = self._tasks.spawn(f"start {spare_id}", self._started(seat, kind))
            self._pool.starting[seat.seat_id] = task

    async def _started(self, seat: Seat, kind: Kind) -> None:
        spare_id = seat.key[1]
        try:
            live = await self._making.start(seat, kind)
        except Exception as error:
            self._pool.starting.pop(seat.seat_id, None)
            if self._kept(spare_id):
                self._failed(seat, kind, error)
            return
        if not self._pool.book.holds(seat):
            live.leave()
            self._pool.abandon(seat, live.sandbox, "evicted")
            return
        self._pool.starting.pop(seat.seat_id, None)
        now = seat.parked_at = self._clock.monotonic()
        self._pool.attach(live)
        self._shelf.opened(spare_id, now)
        self._metrics.add(COUNTED, "ready")
        live.watch_spare(lambda: self._pool.agent_exited(live))
        self.stir()

    def _failed(self, seat: Seat, kind: Kind, error: Exception) -> None:
        code = error.code if isinstance(error, RunnerError) else "internal"
        text = error.message if isinstance(error, RunnerError) else repr(error)
        self._pool.discard(seat, code)
        self._removed(seat, code)
        if code == "harness_auth_required":
            self._shelf.given_up(kind)
        again = "is tried again later" if kind in self._shelf.kinds else "is not tried again before a turn needs one"
        log.warning("a spare of %s could not be started, and %s: %s", kind.harness, again, text)

    def _retire(self, spare_id: str, verdict: str) -> None:
        seat = self._seats[spare_id]
        self._pool.destroy(seat, verdict)
        self._over(seat)

    def _removed(self, seat: Seat, verdict: str) -> None:
        """Its seat left the map although the rule did not ask for that; told again is fine."""
        if not self._kept(seat.key[1]):
            return
        failed = verdict != "evicted"
        self._shelf.lost(seat.key[1], self._clock.monotonic(), failed=failed)
        self._metrics.add(COUNTED, "failed" if failed else "evicted")
        self._over(seat)

    def _kept(self, spare_id: str) -> bool:
        spare = self._shelf.spares.get(spare_id)
        return spare is not None and spare.state is not SpareState.RETIRING

    def _over(self, seat: Seat) -> None:
        self._tasks.spawn(f"tidy {seat.key[1]}", self._tidied(seat))

    async def _tidied(self, seat: Seat) -> None:
        """Its directories go behind its processes; what the disk keeps, the next boot looks for."""
        spare_id = seat.key[1]
        await self._pool.torn(seat)
        try:
            await self._making.remove(self._shelf.spares[spare_id].kind, spare_id)
        except RunnerError as error:
            log.warning("%s left something behind: %s", spare_id, error.message)
        self._shelf.gone(spare_id)
        del self._seats[spare_id]
        self.stir()

    def describe(self) -> list[dict[str, Any]]:
        """The spares for ``GET /v1/pool``."""
        now, now_ms = self._clock.monotonic(), self._clock.now_ms()
        return [self._shown(spare, now, now_ms) for spare in self._shelf.spares.values()]

    def _shown(self, spare: Spare, now: float, now_ms: int) -> dict[str, Any]:
        seat = self._seats[spare.spare_id]
        live = self._pool.live(seat.key)
        ready = spare.state is SpareState.READY
        return {
            "spare_id": spare.spare_id,
            "seat_id": seat.seat_id,
            "harness": spare.kind.harness,
            "provider": spare.kind.provider,
            "recipe": spare.kind.recipe,
            "state": spare.state.value,
            "agent_pid": live.sandbox.agent_pid if live is not None else None,
            "expires_at": rfc3339(now_ms + int((spare.expires_at - now) * 1000)) if ready else None,
        }

    def rest(self) -> None:
        """The replica drains: every spare goes, none is started any more."""
        for effect in self._shelf.close():
            self._retire(effect.spare_id, effect.verdict)
        self._arm(self._clock.monotonic())

    async def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """As ``rest``, and wait until nothing is left, bounded."""
        self.rest()
        if not await self._tasks.join(seconds):
            log.error("some spares could not be proven gone: %s", self._tasks.names)
        await self._tasks.close()
