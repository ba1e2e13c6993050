"""The virtual-time loop itself: what it promises to the tests that run on it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest

from runner.clock import Clock
from tests.virtual_time import EPOCH_MS, Deadlock, LoopClock, VirtualTimeLoop, VirtualTimeStuck


def run_virtual(work, **options):
    """Run a coroutine on a fresh virtual loop, as ``asyncio.run`` does."""
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(**options)) as runner:
        return runner.run(work)


@pytest.fixture
async def started() -> float:
    await asyncio.sleep(60)
    return asyncio.get_running_loop().time()


@pytest.mark.virtual_time
async def test_an_hour_passes_at_once_and_fixtures_share_the_loop(started: float, clock: LoopClock) -> None:
    assert started == 60
    real = time.monotonic()
    await asyncio.sleep(3600)
    assert time.monotonic() - real < 30
    assert asyncio.get_running_loop().time() == 3660
    as_port: Clock = clock
    assert as_port.monotonic() == 3660
    assert as_port.now_ms() == EPOCH_MS + 3_660_000


async def test_an_unmarked_test_has_the_real_clock() -> None:
    assert not isinstance(asyncio.get_running_loop(), VirtualTimeLoop)


@pytest.mark.virtual_time
async def test_timers_fire_in_order_of_their_time() -> None:
    order: list[str] = []

    async def note(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        order.append(name)

    await asyncio.gather(note("late", 86_400.5), note("early", 0.001), note("middle", 20))
    assert order == ["early", "middle", "late"]


@pytest.mark.virtual_time
async def test_a_timeout_fires_when_its_time_has_come() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1800):
            await asyncio.Event().wait()
    assert asyncio.get_running_loop().time() == 1800


def test_a_deadlock_names_the_task_that_waits() -> None:
    async def wait_for_nothing() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match=r"waits at .*test_virtual_time\.py"):
        run_virtual(wait_for_nothing())


def test_waiting_for_ever_beside_a_heartbeat_ends_at_the_limit() -> None:
    async def beat() -> None:
        while True:
            await asyncio.sleep(5)

    async def wait() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(beat(), name="beat")
            await asyncio.Event().wait()

    with pytest.raises(VirtualTimeStuck, match="task beat waits"):
        run_virtual(wait(), limit=100)


@pytest.mark.virtual_time
async def test_time_stands_still_while_an_executor_works() -> None:
    gate = threading.Event()
    loop = asyncio.get_running_loop()
    watchdog = loop.call_later(1, gate.set)
    job = loop.run_in_executor(None, gate.wait, 0.05)
    assert await job is False
    assert loop.time() == 0
    watchdog.cancel()


@pytest.mark.virtual_time
async def test_time_stands_still_while_a_hold_is_busy() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    answered = loop.create_future()
    loop.hold_while(lambda: not answered.done())
    thread = threading.Timer(0.05, lambda: loop.call_soon_threadsafe(answered.set_result, "from a thread"))
    thread.start()
    async with asyncio.timeout(1):
        assert await answered == "from a thread"
    assert loop.time() == 0
    thread.join()


def test_a_real_descriptor_that_stays_silent_is_named() -> None:
    async def read_silence() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours, theirs:
            async with asyncio.timeout(3600):
                await asyncio.get_running_loop().sock_recv(ours, 1)

    with pytest.raises(VirtualTimeStuck, match="1 descriptor"):
        run_virtual(read_silence(), patience=0.05)


@pytest.mark.virtual_time
async def test_a_real_descriptor_that_answers_is_read_before_time_passes() -> None:
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        theirs.sendall(b"x")
        assert await loop.sock_recv(ours, 1) == b"x"
    assert loop.time() == 0
