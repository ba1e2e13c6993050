"""The pool's shell on virtual time: teardowns are proven and counted, newcomers wait, expiries come in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from runner.clock import rfc3339
from runner.pool.pool import RETRY_SECONDS, TEARDOWN_WAIT_SECONDS, Pool, warm_until
from runner.rules.pool import Book, Cold, Full, Hit, Key, Seat
from runner.rules.reuse import FACETS, Parked
from runner.sandbox.port import Disk, Gone
from runner.terms import SeatState
from tests.virtual_time import EPOCH_MS, LoopClock

pytestmark = pytest.mark.virtual_time

FACTS = dict.fromkeys(FACETS, "1")
IDLE = Parked(SeatState.IDLE, 60.0)
ASKING = Parked(SeatState.AWAITING_APPROVAL, 600.0)
A, B, C = (("p", name) for name in "abc")


class FakeSandbox:
    """Dies when its gate opens, and as provably as it is told: ``fates`` first, then for good."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.fates: list[Gone | Exception] = []
        self.tries = 0
        self.graces: list[float] = []
        self.agent_pid = 4711

    async def destroy(self, grace_seconds: float = 0.5, seconds: float = 5.0) -> Gone:
        self.tries += 1
        self.graces.append(grace_seconds)
        await self.gate.wait()
        fate = self.fates.pop(0) if self.fates else Gone(True, "echild")
        if isinstance(fate, Exception):
            raise fate
        return fate


class Occupant:
    """What lives in a seat."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.exited = False
        self.sandbox: Any = FakeSandbox()
        self.left = False
        self.on_exit: Callable[[], None] | None = None

    def watch_idle(self, on_exit: Callable[[], None]) -> None:
        self.on_exit = on_exit

    def take(self) -> None:
        self.on_exit = None

    def leave(self) -> None:
        self.left = True

    def exit(self) -> None:
        assert self.on_exit is not None
        self.on_exit()


class House:
    """A pool, its clock, and what it told."""

    def __init__(self, max_seats: int = 4) -> None:
        self.clock = LoopClock()
        self.asleep: list[Disk] = []
        self.told: list[tuple[str, str]] = []
        self.pool: Pool[Occupant] = Pool(Book(max_seats), self.clock, self.removed, None, {"daytona": self})
        self.minted = 0

    def removed(self, live: Occupant, verdict: str) -> None:
        self.told.append((live.seat.seat_id, verdict))

    def disks(self) -> list[Disk]:
        return self.asleep

    @property
    def now(self) -> float:
        return self.clock.monotonic()

    def ask(self, key: Key, facts: dict[str, str] | None = None):
        self.minted += 1
        seat_id = f"{key[1]}{self.minted}"
        return self.pool.book.checkout(key, seat_id, "local", facts or FACTS, self.now, self.clock.now_ms(), None, "t1")

    async def start(self, key: Key) -> Occupant:
        cold = self.ask(key)
        assert isinstance(cold, Cold)
        assert await self.pool.make_room(cold)
        live = Occupant(cold.seat)
        self.pool.attach(live)
        return live

    async def parked(self, key: Key, parked: Parked = IDLE) -> Occupant:
        live = await self.start(key)
        self.pool.park(live, parked)
        return live


@pytest.fixture
async def house() -> AsyncIterator[House]:
    made = House()
    yield made
    await made.pool.close()


async def tick() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_parked_seat_is_found_again(house: House):
    live = await house.parked(A)
    assert (house.pool.live(A), house.pool.warm(A), house.pool.busy(A)) == (live, live, False)
    assert house.ask(A) == Hit(live.seat)
    assert (house.pool.live(A), house.pool.warm(A), house.pool.busy(A)) == (live, None, True)
    assert (house.pool.live(B), house.pool.warm(B), house.pool.busy(B)) == (None, None, False)


async def test_a_proven_teardown_frees_the_seat(house: House):
    live = await house.parked(A)
    task = house.pool.destroy(live.seat, "kill")
    assert task is not None
    assert house.pool.live(A) is None
    assert (live.left, house.pool.book.taken, house.told) == (True, 1, [])
    assert await task is True
    assert house.pool.book.taken == 0
    assert house.pool.destroy(live.seat, "again") is None


async def test_an_unproven_teardown_still_counts_and_is_tried_again_case_d10(
    house: House, caplog: pytest.LogCaptureFixture
):
    live = await house.parked(A)
    live.sandbox.fates = [Gone(False, "none", (4242,)), RuntimeError("the provider broke"), Gone(True, "init_gone")]
    task = house.pool.destroy(live.seat, "kill")
    assert task is not None
    await asyncio.sleep(RETRY_SECONDS * 1.5)
    assert (house.pool.book.taken, house.pool.unproven, task.done()) == (1, 2, False)
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 3
    assert "4242" in caplog.text
    assert "the provider broke" in caplog.text
    assert await task is True
    assert house.now == pytest.approx(2 * RETRY_SECONDS)
    assert (house.pool.book.taken, live.sandbox.tries) == (0, 3)


async def test_two_who_destroy_one_seat_share_its_teardown(house: House):
    live = await house.parked(A)
    live.sandbox.gate.clear()
    assert house.pool.destroy(live.seat, "kill") is house.pool.destroy(live.seat, "expired")
    live.sandbox.gate.set()
    await tick()
    assert (live.sandbox.tries, house.pool.book.verdicts[A]) == (1, "kill")


async def test_a_newcomer_waits_for_the_teardown_that_makes_its_room():
    house = House(1)
    old = await house.parked(A)
    old.sandbox.gate.clear()
    cold = house.ask(B)
    assert isinstance(cold, Cold)
    waiting = asyncio.create_task(house.pool.make_room(cold))
    await asyncio.sleep(3)
    assert not waiting.done()
    assert house.told == [("a1", "evicted")]
    assert house.ask(C) == Full()
    old.sandbox.gate.set()
    assert await waiting is True
    assert house.now == pytest.approx(3)
    assert await house.pool.close()


async def test_a_newcomer_waits_boundedly_and_the_seat_is_not_free():
    house = House(1)
    old = await house.parked(A)
    old.sandbox.gate.clear()
    cold = house.ask(B)
    assert isinstance(cold, Cold)
    assert await house.pool.make_room(cold) is False
    assert house.now == pytest.approx(TEARDOWN_WAIT_SECONDS)
    house.pool.discard(cold.seat, "provider_at_capacity")
    assert house.pool.book.taken == 1
    again = house.ask(B)
    assert isinstance(again, Cold)
    assert again.waits == ("a1",)
    old.sandbox.gate.set()
    await tick()
    assert "a1" not in house.pool.book.tearing


async def test_a_session_waits_for_its_own_changed_sandbox(house: House):
    old = await house.parked(A)
    old.sandbox.gate.clear()
    cold = house.ask(A, {**FACTS, "env": "2"})
    assert isinstance(cold, Cold)
    asyncio.get_running_loop().call_later(2, old.sandbox.gate.set)
    assert await house.pool.make_room(cold) is True
    assert house.now == pytest.approx(2)
    assert house.told == [], "the session itself replaced it; nobody needs to be told"


async def test_a_newcomer_waits_for_nobody_when_there_is_room(house: House):
    old = await house.parked(A)
    old.sandbox.gate.clear()
    house.pool.destroy(old.seat, "kill")
    await house.start(B)
    assert house.now == 0
    old.sandbox.gate.set()


async def test_who_was_evicted_is_torn_down_although_the_newcomer_gives_up():
    house = House(1)
    old = await house.parked(A)
    old.sandbox.gate.clear()
    cold = house.ask(B)
    assert isinstance(cold, Cold)
    waiting = asyncio.create_task(house.pool.make_room(cold))
    await tick()
    waiting.cancel()
    await tick()
    house.pool.discard(cold.seat, "start_given_up")
    old.sandbox.gate.set()
    await tick()
    assert (house.pool.book.taken, house.pool.book.verdicts) == (0, {A: "evicted", B: "start_given_up"})


async def test_clearing_twice_tells_once():
    house = House(1)
    await house.parked(A)
    cold = house.ask(B)
    assert isinstance(cold, Cold)
    house.pool.clear(cold)
    assert await house.pool.make_room(cold)
    assert house.told == [("a1", "evicted")]


async def test_waiting_for_a_sessions_teardowns_survives_one_that_has_not_begun():
    house = House(1)
    await house.parked(A)
    cold = house.ask(B)
    assert isinstance(cold, Cold)
    assert await house.pool.teardowns_of(A, 5)
    house.pool.clear(cold)
    assert await house.pool.teardowns_of(A, 5)
    assert house.pool.book.tearing == {}


async def test_waiting_for_a_sessions_teardowns_is_bounded(house: House):
    live = await house.parked(A)
    live.sandbox.gate.clear()
    house.pool.destroy(live.seat, "kill")
    assert await house.pool.teardowns_of(A, 5) is False
    assert await house.pool.teardowns_of(B, 5) is True
    assert house.now == pytest.approx(5)
    live.sandbox.gate.set()


async def test_time_counts_from_the_end_of_the_turn_case_c10(house: House):
    live = await house.start(A)
    await asyncio.sleep(120)
    house.pool.park(live, IDLE)
    await asyncio.sleep(59)
    assert house.pool.warm(A) is live
    await asyncio.sleep(1.5)
    assert house.pool.live(A) is None
    assert house.told == [("a1", "expired")]
    assert house.pool.book.taken == 0


async def test_a_busy_seat_never_expires_case_c11(house: House):
    live = await house.parked(A)
    await asyncio.sleep(30)
    assert isinstance(house.ask(A), Hit)
    live.take()
    await asyncio.sleep(10_000)
    assert (house.pool.live(A), house.told) == (live, [])
    house.pool.park(live, IDLE)
    await asyncio.sleep(61)
    assert house.told == [("a1", "expired")]


async def test_each_seat_has_its_own_time(house: House):
    await house.parked(A, ASKING)
    await house.parked(B, IDLE)
    await asyncio.sleep(30)
    await house.parked(C, IDLE)
    seen: list[tuple[float, str]] = []
    house.pool.on_removed = lambda live, verdict: seen.append((house.now, live.seat.seat_id))
    await asyncio.sleep(1000)
    assert seen == [(pytest.approx(60), "b2"), (pytest.approx(90), "c3"), (pytest.approx(600), "a1")]


async def test_an_agent_that_exits_while_idle_frees_its_seat_at_once_case_l3(house: House):
    live = await house.parked(A)
    live.exit()
    assert (house.pool.live(A), live.exited, house.told) == (None, True, [("a1", "agent_exited")])
    live.exit()
    assert house.told == [("a1", "agent_exited")]
    await tick()
    assert house.pool.book.taken == 0
    cold = house.ask(A)
    assert isinstance(cold, Cold)
    assert (cold.reason, cold.seat.generation) == ("agent_exited", 2)


async def test_an_exit_behind_the_back_of_a_new_generation_changes_nothing_case_l3(house: House):
    old = await house.parked(A)
    house.pool.destroy(old.seat, "kill")
    await tick()
    new = await house.parked(A)
    old.exit()
    assert (house.pool.warm(A), house.told) == (new, [])


async def test_an_agent_that_is_dead_when_it_is_parked_frees_its_seat_at_once_case_l3(house: House):
    class Dead(Occupant):
        def watch_idle(self, on_exit: Callable[[], None]) -> None:
            on_exit()

    cold = house.ask(A)
    assert isinstance(cold, Cold)
    live = Dead(cold.seat)
    house.pool.attach(live)
    house.pool.park(live, IDLE)
    await tick()
    assert (house.pool.book.taken, house.told) == (0, [("a1", "agent_exited")])


async def test_a_seat_destroyed_while_it_starts_counts_until_its_sandbox_is_gone(house: House):
    cold = house.ask(A)
    assert isinstance(cold, Cold)
    assert house.pool.destroy(cold.seat, "kill") is None
    assert house.pool.book.taken == 1
    live = Occupant(cold.seat)
    live.sandbox.gate.clear()
    house.pool.attach(live)
    await tick()
    assert (house.pool.book.taken, live.left, house.pool.live(A)) == (1, True, None)
    live.sandbox.gate.set()
    await tick()
    assert house.pool.book.taken == 0


async def test_a_start_that_failed_behind_its_sandbox_counts_until_that_is_gone_case_c7():
    house = House(1)
    cold = house.ask(A)
    assert isinstance(cold, Cold)
    sandbox: Any = FakeSandbox()
    sandbox.fates = [Gone(False, "none", (4242,))]
    task = house.pool.abandon(cold.seat, sandbox, "harness_start_failed")
    house.pool.discard(cold.seat, "harness_start_failed")
    assert (house.pool.book.seats, house.pool.book.taken) == ({}, 1)
    newcomer = house.ask(B)
    assert isinstance(newcomer, Cold)
    assert await house.pool.make_room(newcomer)
    assert (task.result(), house.now) == (True, pytest.approx(RETRY_SECONDS))
    assert sandbox.graces == [0.0, 0.0], "nobody waits for the manners of an agent that never served"
    assert house.pool.book.verdicts == {A: "harness_start_failed"}


async def test_a_seat_that_is_given_up_with_its_sandbox_counts_until_that_is_gone(house: House):
    live = await house.start(A)
    live.sandbox.gate.clear()
    house.pool.discard(live.seat, "start_given_up")
    assert (house.pool.live(A), house.pool.book.taken) == (None, 1)
    live.sandbox.gate.set()
    await tick()
    assert house.pool.book.taken == 0


async def test_a_dismissed_seat_is_destroyed_and_its_session_told_once(house: House):
    live = await house.parked(A, ASKING)
    house.pool.dismiss(live, "paused_flood")
    house.pool.dismiss(live, "paused_flood")
    assert (house.pool.live(A), house.told) == (None, [("a1", "paused_flood")])


async def test_a_booked_seat_that_never_got_a_sandbox_leaves_nothing(house: House):
    cold = house.ask(A)
    assert isinstance(cold, Cold)
    house.pool.discard(cold.seat, "sandbox_start_failed")
    house.pool.discard(cold.seat, "again")
    assert house.pool.book.taken == 0
    assert (await house.start(A)).seat.reason == "sandbox_start_failed"


async def test_close_destroys_whatever_there_is():
    house = House()
    lives = [await house.parked(A), await house.parked(B, ASKING), await house.start(C)]
    assert await house.pool.close() is True
    assert [live.sandbox.tries for live in lives] == [1, 1, 1]
    assert (house.pool.book.seats, house.pool.book.taken) == ({}, 0)
    await asyncio.sleep(1000)
    assert house.told == []


async def test_close_says_when_somebody_would_not_die_case_d10():
    house = House()
    live = await house.parked(A)
    live.sandbox.fates = [Gone(False, "none", (4242,))] * 10
    assert await house.pool.close(12) is False
    assert house.now == pytest.approx(12)
    assert house.pool.book.taken == 1


async def test_what_the_pool_shows(house: House):
    live = await house.parked(A)
    await house.start(B)
    other = House()
    assert other.pool.describe("p") == []
    assert house.pool.describe("q") == []
    shown = {seat["session_id"]: seat for seat in house.pool.describe("p")}
    assert shown["a"] == {
        "session_id": "a",
        "seat_id": "a1",
        "generation": 1,
        "provider": "local",
        "state": "idle",
        "start": "cold",
        "reason": "miss",
        "turn_id": "t1",
        "agent_pid": 4711,
        "warm_until": rfc3339(EPOCH_MS + 60_000),
    }
    assert (shown["b"]["state"], shown["b"]["warm_until"]) == ("busy", None)
    live.sandbox.gate.clear()
    house.pool.destroy(live.seat, "kill")
    [gone] = [seat for seat in house.pool.describe("p") if seat["session_id"] == "a"]
    assert (gone["state"], gone["agent_pid"], gone["warm_until"]) == ("destroyed", None, None)
    live.sandbox.gate.set()


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        (SeatState.IDLE, "2026-01-01T00:00:30.500Z"),
        (SeatState.AWAITING_APPROVAL, "2026-01-01T00:00:30.500Z"),
        (SeatState.BUSY, None),
        (SeatState.DESTROYED, None),
    ],
)
async def test_warm_until(state: SeatState, shown: str | None):
    seat = Seat(A, "a1", 1, "local", FACTS, state=state, expires_at=40.5)
    assert warm_until(seat, 10.0, EPOCH_MS) == shown


async def test_a_sleeping_disk_is_shown_and_takes_no_seat(house: House) -> None:
    """Until the session has a seat again; of its own project only."""
    key = ("p", "s")
    live = await house.parked(key)
    house.asleep.append(Disk("daytona", "p", "s", house.now + 1800))
    assert [seat["state"] for seat in house.pool.describe("p")] == ["idle"]
    assert house.pool.asleep_view(key) is None
    live.sandbox.gate.set()
    teardown = house.pool.destroy(live.seat, "expired")
    assert teardown is not None and await teardown
    (shown,) = house.pool.describe("p")
    assert (shown["session_id"], shown["state"], shown["provider"], shown["reason"]) == (
        *("s", "asleep", "daytona", "expired"),
    )
    assert shown["warm_until"] == rfc3339(house.clock.now_ms() + 1_800_000)
    assert (shown["seat_id"], shown["agent_pid"], shown["turn_id"], shown["generation"]) == (None, None, None, 1)
    view = house.pool.asleep_view(key)
    assert view == {"state": "asleep", "start": None, "reason": "expired", "warm_until": shown["warm_until"]}
    assert (house.pool.book.taken, house.pool.describe("q")) == (0, [])
    await house.start(key)
    assert [seat["state"] for seat in house.pool.describe("p")] == ["busy"]
