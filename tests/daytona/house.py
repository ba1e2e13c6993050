"""A pool with a Daytona provider, and what both of them and the service say there is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from runner.clock import SystemClock
from runner.errors import RunnerError
from runner.pool.pool import Pool
from runner.rules.pool import Book, Cold, Hit, Seat
from runner.rules.reuse import FACETS, Parked
from runner.sandbox.remote import RemoteSandbox
from runner.tasks import Tasks
from runner.terms import SeatState
from tests.daytona_emulator.fixture import EmulatorProcess
from tests.sandbox import bed
from tests.sandbox.daytona_bed import provider, spec

PROJECT = "default"
FACTS = dict.fromkeys(FACETS, "1")
IDLE = Parked(SeatState.IDLE, 60.0)
AWAKE, ASLEEP = "awake", "asleep"
SEEN = {"started": AWAKE, "stopped": ASLEEP}
AGREE_SECONDS = 30.0
"""A sandbox whose init is deaf, or whose creation was given up, takes its time to go."""


class Live:
    """What lives in a seat: a sandbox and a conversation with its agent."""

    def __init__(self, seat: Seat, sandbox: RemoteSandbox, tasks: Tasks) -> None:
        self.seat, self.sandbox, self.exited = seat, sandbox, False
        self.talk = bed.Talk(sandbox)
        self._tasks = tasks
        self._watch: asyncio.Task[None] | None = None

    def watch_idle(self, on_exit: Callable[[], None]) -> None:
        async def watch() -> None:
            await self.talk.gone.wait()
            on_exit()

        self._watch = self._tasks.spawn(f"watch {self.seat.seat_id}", watch())

    def leave(self) -> None:
        if self._watch is not None:
            self._watch.cancel()


class House:
    """Starts, parks and ends sandboxes as the runner does, without a model in them."""

    def __init__(self, emulator: EmulatorProcess, **terms: Any) -> None:
        self.emulator = emulator
        self.provider = provider(emulator, **terms)
        self.clock = SystemClock()
        self.pool: Pool[Live] = Pool(Book(16), self.clock, lambda live, verdict: None, None, {"daytona": self.provider})
        self._tasks = Tasks("house")
        self._seats = 0
        self._last: dict[str, str] = {}

    def name(self, session: str) -> str:
        """Of the session's sandbox, at the service."""
        return self.provider.sandbox_name(PROJECT, session)

    async def begin(self, session: str, seconds: float = 15.0) -> Live:
        """A seat with an agent that has answered: the warm one or a new one.

        Raises:
            RunnerError: of the start, or ``sandbox_lost`` before the answer; the seat is given back.
        """
        self._seats += 1
        key, now = (PROJECT, session), self.clock.monotonic()
        booked = self.pool.book.checkout(key, f"seat_{self._seats}", "daytona", FACTS, now, self.clock.now_ms())
        if isinstance(booked, Hit):
            live = self.pool.live(key)
            assert live is not None
            live.leave()
        else:
            assert isinstance(booked, Cold)
            assert await self.pool.make_room(booked)
            self._last[session] = booked.seat.seat_id
            try:
                asked = spec(session, seat_id=booked.seat.seat_id, seconds=seconds)
                live = Live(booked.seat, await self.provider.start(asked), self._tasks)
            except BaseException:
                self.pool.discard(booked.seat, "failed")
                raise
            self.pool.attach(live)
        try:
            assert await live.talk.say("hello") == "hello"
        except ConnectionError as error:
            self.pool.destroy(live.seat, "failed")
            raise RunnerError("sandbox_lost", str(error)) from error
        except BaseException:
            self.pool.destroy(live.seat, "failed")
            raise
        return live

    def park(self, live: Live) -> None:
        self.pool.park(live, IDLE)

    async def end(self, live: Live) -> None:
        """Torn down, and proven; nothing when that was seen to already."""
        if self.pool.book.holds(live.seat):
            teardown = self.pool.destroy(live.seat, "over")
            assert teardown is not None and await teardown
        await bed.until(lambda: live.seat.seat_id not in self.pool.book.tearing)

    async def remove(self, session: str) -> None:
        """As DELETE does."""
        live = self.pool.live((PROJECT, session))
        if live is not None:
            await self.end(live)
        await self.provider.remove(PROJECT, session)
        self.pool.book.forget((PROJECT, session))

    def held(self) -> dict[str, str]:
        """What the pool says: sandbox to ``awake`` or ``asleep``."""
        seats = {self.name(key[1]): AWAKE for key in self.pool.book.seats}
        return seats | {self.name(key[1]): ASLEEP for key in self.pool.asleep}

    def there(self) -> dict[str, str]:
        """What the service says, but for what it is deleting."""
        boxes = {box["name"]: box["state"] for box in self.emulator.sandboxes()}
        return {name: SEEN.get(state, state) for name, state in boxes.items() if not name.startswith("DESTROYED")}

    async def agrees(self, what: str, *sessions: str) -> None:
        """Soon both say the same, of these sessions' sandboxes or of all."""
        names = {self.name(session) for session in sessions}

        deadline = self.clock.monotonic() + AGREE_SECONDS
        while not self._same(self.held(), there := await asyncio.to_thread(self.there), sessions, names):
            assert self.clock.monotonic() < deadline, self._apart(what, there)
            await asyncio.sleep(0.05)

    def _apart(self, what: str, there: dict[str, str]) -> str:
        held = self.held()
        apart = {name: (held.get(name), there.get(name)) for name in held.keys() | there.keys()}
        return f"{what}: apart are (pool, service) { {n: p for n, p in apart.items() if p[0] != p[1]} }"

    def _same(self, held: dict[str, str], there: dict[str, str], sessions: tuple[str, ...], names: set[str]) -> bool:
        seats = {seat.seat_id for seat in self.pool.book.seats.values()}
        for session in sessions or self._last:
            if (last := self._last.get(session)) in self.provider.live and last not in seats:
                return False
        return all(held.get(name) == there.get(name) for name in names or held.keys() | there.keys())

    async def close(self) -> None:
        assert await self.pool.close()
        await self._tasks.close()
        await self.provider.close()
