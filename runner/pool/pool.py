"""The pool's shell: performs what the book decides, proves teardowns, wakes at expiries (DESIGN 3.5)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from runner.clock import Clock, rfc3339
from runner.ids import SPARES
from runner.rules.pool import Book, Cold, Key, Seat
from runner.rules.reuse import Parked
from runner.sandbox.port import Disk, Gone, Sandbox
from runner.tasks import Tasks
from runner.terms import SeatState

log = logging.getLogger("runner.pool")
GRACE_SECONDS: Final = 0.5
RETRY_SECONDS: Final = 5.0
TEARDOWN_WAIT_SECONDS: Final = 15.0


class Occupant(Protocol):
    """What lives in a seat, as far as the pool cares."""

    seat: Seat
    exited: bool

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox to tear down."""
        ...

    def watch_idle(self, on_exit: Callable[[], None]) -> None:
        """Parked idle: call ``on_exit`` when the agent exits by itself."""
        ...

    def leave(self) -> None:
        """It is being torn down."""
        ...


class Sleeps(Protocol):
    """A provider, as far as the pool asks one."""

    def disks(self) -> Sequence[Disk]:
        """See ``sandbox.port.Provider.disks``."""
        ...


L = TypeVar("L", bound=Occupant)


class Pool(Generic[L]):
    """Owner of every live sandbox of this replica.

    ``on_removed(live, verdict)`` is called when a parked seat leaves the map for a reason of the pool's own: expiry,
    eviction, or an agent that exited by itself; of a spare ``on_spare_removed(seat, verdict)`` instead, started or not.
    ``on_free``: a teardown was proven, so that a seat may be free.
    ``on_gone(seat_id)`` is waited for when a teardown is proven, before the seat is free. ``providers``
    are asked for what sleeps: it takes no seat, but is shown.
    """

    def __init__(
        self,
        book: Book,
        clock: Clock,
        on_removed: Callable[[L, str], None],
        on_gone: Callable[[str], Awaitable[None]] | None = None,
        providers: Mapping[str, Sleeps] = {},
    ) -> None:
        self.book = book
        self._providers = tuple(providers.values())
        self._clock = clock
        self.on_removed = on_removed
        self._on_gone = on_gone
        self.on_spare_removed: Callable[[Seat, str], None] = lambda seat, verdict: None
        self.on_free: Callable[[], None] = lambda: None
        self.starting: dict[str, asyncio.Task[None]] = {}
        """Starts of spares under way, by seat: whoever takes the seat cancels its start."""
        self._live: dict[str, L] = {}
        self._teardowns: dict[str, asyncio.Task[bool]] = {}
        self._tasks = Tasks("pool")
        self._timer: asyncio.TimerHandle | None = None
        self.unproven = 0

    def attach(self, live: L) -> None:
        """A sandbox started for a booked seat; when the seat was destroyed meanwhile, it is torn down at once."""
        self._live[live.seat.seat_id] = live
        if not self.book.holds(live.seat):
            self._teardown(live.seat)

    def live(self, key: Key) -> L | None:
        """The session's live seat, whatever its state."""
        seat = self.book.seats.get(key)
        return self._live.get(seat.seat_id) if seat is not None else None

    def warm(self, key: Key) -> L | None:
        """The session's idle seat."""
        seat = self.book.seats.get(key)
        return self._live.get(seat.seat_id) if seat is not None and seat.state is SeatState.IDLE else None

    def busy(self, key: Key) -> bool:
        """Whether the session's seat is busy: the backstop of admission."""
        seat = self.book.seats.get(key)
        return seat is not None and seat.state is SeatState.BUSY

    def clear(self, cold: Cold) -> None:
        """Begin the teardowns of whom the book removed; idempotent. Call it in the same step as the checkout."""
        for goner in cold.goners:
            gone = self._live.get(goner.seat_id)
            self._teardown(goner)
            if goner.spare:
                self.on_spare_removed(goner, "evicted")
            elif gone is not None and goner.key != cold.seat.key:
                self.on_removed(gone, "evicted")

    def claim_spare(self, spare_id: str, key: Key, facets: Mapping[str, str], turn_id: str) -> L:
        """The spare's sandbox becomes the busy seat of a session that has none."""
        spare = self.book.seats[(SPARES, spare_id)]
        live = self._live[spare.seat_id]
        live.seat = self.book.claim_spare(spare, key, facets, turn_id)
        return live

    async def make_room(self, cold: Cold) -> bool:
        """Clear, then wait for the teardowns that the newcomer needs; False when one hangs."""
        self.clear(cold)
        waits = {self._teardowns[seat_id] for seat_id in cold.waits if seat_id in self._teardowns}
        if not waits:
            return True
        _, pending = await asyncio.wait(waits, timeout=TEARDOWN_WAIT_SECONDS)
        return not pending

    def park(self, live: L, parked: Parked) -> None:
        """Park the seat; from now on an agent that exits by itself frees it at once."""
        self.book.park(live.seat, parked, self._clock.monotonic())
        if parked.state is SeatState.IDLE:
            live.watch_idle(lambda: self.agent_exited(live))
        self._arm()

    def agent_exited(self, live: L) -> None:
        """The agent of a parked seat exited (case L3)."""
        live.exited = True
        self.dismiss(live, "agent_exited")

    def dismiss(self, live: L, verdict: str) -> None:
        """Destroy a parked seat and tell its session."""
        if self.book.holds(live.seat):
            self.destroy(live.seat, verdict)
            if live.seat.spare:
                self.on_spare_removed(live.seat, verdict)
            else:
                self.on_removed(live, verdict)

    def destroy(self, seat: Seat, verdict: str) -> asyncio.Task[bool] | None:
        """Take the seat out of the map, then tear its sandbox down in the background.

        None when it has none: it is gone already, or its start is under way and ends in ``attach`` or ``discard``;
        until then the seat counts.
        """
        if self.book.holds(seat):
            self.book.remove(seat, verdict)
        return self._teardown(seat)

    def discard(self, seat: Seat, verdict: str) -> None:
        """A booked seat will not be used; what was started for it, if anything, counts until it is proven gone."""
        if self.destroy(seat, verdict) is None:
            self._torn(seat.seat_id)

    def abandon(self, seat: Seat, sandbox: Sandbox, verdict: str) -> asyncio.Task[bool]:
        """A start failed behind the creation of its sandbox: tear it down like any other."""
        if self.book.holds(seat):
            self.book.remove(seat, verdict)
        return self._prove_later(seat.seat_id, sandbox, grace_seconds=0.0)

    def _teardown(self, seat: Seat) -> asyncio.Task[bool] | None:
        known = self._teardowns.get(seat.seat_id)
        if known is not None:
            return known
        live = self._live.pop(seat.seat_id, None)
        if live is None:
            start = self.starting.pop(seat.seat_id, None)
            return self._give_up(seat.seat_id, start) if start is not None else None
        live.leave()
        return self._prove_later(seat.seat_id, live.sandbox, GRACE_SECONDS)

    def _give_up(self, seat_id: str, start: asyncio.Task[None]) -> asyncio.Task[bool]:
        start.cancel()
        task = self._tasks.spawn(f"give up {seat_id}", self._given_up(seat_id, start))
        self._teardowns[seat_id] = task
        return task

    async def _given_up(self, seat_id: str, start: asyncio.Task[None]) -> bool:
        """A start that is cancelled undoes itself; what that leaves to be torn down is waited for."""
        await asyncio.wait({start})
        behind = self._teardowns.get(seat_id)
        if behind is not None and behind is not asyncio.current_task():
            return await asyncio.shield(behind)
        self._teardowns.pop(seat_id, None)
        self._torn(seat_id)
        return True

    def _torn(self, seat_id: str) -> None:
        self.book.torn(seat_id)
        self.on_free()

    async def torn(self, seat: Seat) -> None:
        """Wait until the teardown of a seat that left the map is proven."""
        while seat.seat_id in self.book.tearing and seat.seat_id in self._teardowns:
            await asyncio.wait({self._teardowns[seat.seat_id]})

    def _prove_later(self, seat_id: str, sandbox: Sandbox, grace_seconds: float) -> asyncio.Task[bool]:
        task = self._tasks.spawn(f"teardown {seat_id}", self._prove(seat_id, sandbox, grace_seconds))
        self._teardowns[seat_id] = task
        return task

    async def teardowns_of(self, key: Key, seconds: float) -> bool:
        """Wait for the teardowns of one session; False when one is not proven in time."""
        torn = [seat.seat_id for seat in self.book.tearing.values() if seat.key == key]
        tasks = {self._teardowns[seat_id] for seat_id in torn if seat_id in self._teardowns}
        if not tasks:
            return True
        _, pending = await asyncio.wait(tasks, timeout=seconds)
        return not pending

    async def _prove(self, seat_id: str, sandbox: Sandbox, grace_seconds: float) -> bool:
        try:
            while True:
                gone = await self._destroyed(sandbox, grace_seconds)
                if gone.proven:
                    if self._on_gone is not None:
                        await self._on_gone(seat_id)
                    self._torn(seat_id)
                    return True
                self.unproven += 1
                log.error("sandbox %s would not die: %s left", seat_id, gone.survivors)
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._teardowns.pop(seat_id, None)

    @staticmethod
    async def _destroyed(sandbox: Sandbox, grace_seconds: float) -> Gone:
        try:
            return await sandbox.destroy(grace_seconds)
        except Exception:
            log.exception("a teardown failed")
            return Gone(False, "error")

    def _arm(self) -> None:
        due = self.book.next_expiry()
        if self._timer is not None:
            if due is not None and self._timer.when() <= due:
                return
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer = asyncio.get_running_loop().call_at(due, self._expire)

    def _expire(self) -> None:
        self._timer = None
        for seat in self.book.expired(self._clock.monotonic()):
            live = self._live.get(seat.seat_id)
            self.destroy(seat, "expired")
            if live is not None:
                self.on_removed(live, "expired")
        self._arm()

    @property
    def asleep(self) -> dict[Key, Disk]:
        """Sessions without a seat whose disk is kept."""
        awake = {*self.book.seats, *(seat.key for seat in self.book.tearing.values())}
        disks = {(disk.project, disk.session_id): disk for provider in self._providers for disk in provider.disks()}
        return {key: disk for key, disk in disks.items() if key not in awake}

    def asleep_view(self, key: Key) -> dict[str, Any] | None:
        """The sleeping disk of a session, as the session view shows it; None when there is none."""
        disk = self.asleep.get(key)
        if disk is None:
            return None
        until = instant(disk.until, self._clock.monotonic(), self._clock.now_ms())
        reason = self.book.verdicts.get(key)
        return {"state": SeatState.ASLEEP.value, "start": None, "reason": reason, "warm_until": until}

    def _sleeping(self, project: str) -> list[dict[str, Any]]:
        none = dict.fromkeys(("seat_id", "turn_id", "agent_pid"))
        return [
            {
                "session_id": key[1],
                "generation": self.book.generations.get(key),
                "provider": disk.provider,
                **none,
                **(self.asleep_view(key) or {}),
            }
            for key, disk in self.asleep.items()
            if key[0] == project
        ]

    def describe(self, project: str) -> list[dict[str, Any]]:
        """The seats of one project, and its sleeping disks, for ``GET /v1/pool``."""
        now, now_ms = self._clock.monotonic(), self._clock.now_ms()
        seats = [
            {
                "session_id": seat.key[1],
                "seat_id": seat.seat_id,
                "generation": seat.generation,
                "provider": seat.provider,
                "state": seat.state.value,
                "start": seat.start,
                "reason": seat.reason,
                "turn_id": seat.turn_id,
                "agent_pid": live.sandbox.agent_pid if (live := self._live.get(seat.seat_id)) else None,
                "warm_until": warm_until(seat, now, now_ms),
            }
            for seat in [*self.book.seats.values(), *self.book.tearing.values()]
            if seat.key[0] == project
        ]
        return seats + self._sleeping(project)

    async def close(self, seconds: float = 10.0) -> bool:
        """Destroy every seat; True when every teardown was proven in time."""
        if self._timer is not None:
            self._timer.cancel()
        for seat in list(self.book.seats.values()):
            self.destroy(seat, "shutdown")
        proven = await self._tasks.join(seconds)
        await self._tasks.close()
        return proven


def warm_until(seat: Seat, now: float, now_ms: int) -> str | None:
    """When a parked seat expires, as an instant; None while it is busy."""
    if seat.state not in (SeatState.IDLE, SeatState.AWAITING_APPROVAL):
        return None
    return instant(seat.expires_at, now, now_ms)


def instant(until: float, now: float, now_ms: int) -> str:
    """A loop time on the wall clock."""
    return rfc3339(now_ms + int((until - now) * 1000))
