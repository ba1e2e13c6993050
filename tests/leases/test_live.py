"""The live bus, in memory and over Redis: one contract (case N5)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from runner.errors import RunnerError
from runner.leases.live import OLDEST, LiveBus, MemoryLiveBus
from runner.leases.redis_live import KEPT_SECONDS, KEYS, LIVE, RedisLiveBus
from tests.redis_server import RedisServer

Make = Callable[..., LiveBus]


@pytest.fixture(params=["memory", "redis"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    made: list[LiveBus] = []

    def bus(**bounds: int) -> LiveBus:
        if request.param == "memory":
            made.append(MemoryLiveBus(**bounds))
        else:
            server: RedisServer = request.getfixturevalue("redis_server")
            made.append(RedisLiveBus(server.url, **bounds))
        return made[-1]

    yield bus
    for one in made:
        await one.close()


@pytest.fixture
def bus(make: Make) -> LiveBus:
    return make()


async def test_entries_arrive_in_order_and_once(bus: LiveBus) -> None:
    await bus.publish("r", [b"1", b"2"])
    await bus.publish("r", [b"\x003\xff\n"])
    first = await bus.read("r", OLDEST, 1)
    assert first.entries == [b"1", b"2", b"\x003\xff\n"]
    await bus.publish("r", [b"4"])
    assert (await bus.read("r", first.place, 1)).entries == [b"4"]


async def test_a_replica_sees_its_own_line_alone(bus: LiveBus) -> None:
    await bus.publish("r1", [b"mine"])
    await bus.publish("r2", [b"other"])
    assert (await bus.read("r1", OLDEST, 1)).entries == [b"mine"]


async def test_a_read_wakes_with_the_first_entry(bus: LiveBus) -> None:
    reading = asyncio.create_task(bus.read("r", OLDEST, 30))
    await asyncio.sleep(0.05)
    await bus.publish("r", [b"1"])
    async with asyncio.timeout(5):
        assert (await reading).entries == [b"1"]


async def test_a_read_without_news_keeps_its_place(bus: LiveBus) -> None:
    await bus.publish("r", [b"1"])
    place = (await bus.read("r", OLDEST, 1)).place
    assert await bus.read("r", place, 0.05) == ([], place)
    await bus.publish("r", [b"2"])
    assert (await bus.read("r", place, 1)).entries == [b"2"]


async def test_a_read_that_is_cancelled_takes_nothing_along(bus: LiveBus) -> None:
    reading = asyncio.create_task(bus.read("r", OLDEST, 30))
    await asyncio.sleep(0.05)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await bus.publish("r", [b"1"])
    assert (await bus.read("r", OLDEST, 1)).entries == [b"1"]


async def test_a_line_is_bounded_and_loses_its_oldest_entries(make: Make) -> None:
    bus = make(keep_bytes=1024 * 1024)
    entries = [b"%d " % n + b"x" * 100_000 for n in range(64)]
    for entry in entries:
        await bus.publish("r", [entry])
    kept = (await bus.read("r", OLDEST, 1)).entries
    assert 0 < sum(map(len, kept)) <= 1024 * 1024
    assert kept == entries[-len(kept) :]


async def test_an_entry_beyond_the_bound_is_kept_while_it_is_the_newest(make: Make) -> None:
    bus = make(keep_bytes=1024)
    await bus.publish("r", [b"small", b"x" * 100_000])
    assert (await bus.read("r", OLDEST, 1)).entries == [b"x" * 100_000]


async def test_what_was_read_leaves_redis_and_the_stream_has_an_end(redis_server: RedisServer) -> None:
    assert LIVE in KEYS
    bus = RedisLiveBus(redis_server.url)
    await bus.publish("r", [b"%d" % n for n in range(10)])
    place = (await bus.read("r", OLDEST, 1)).place
    await bus.read("r", place, 0.01)
    assert redis_server.command("XLEN", f"{LIVE}r") == b":1\r\n"
    left = int(redis_server.command("PTTL", f"{LIVE}r")[1:])
    assert 0 < left <= KEPT_SECONDS * 1000
    await bus.close()


async def test_a_redis_that_dies_or_freezes_is_an_error_in_time_and_comes_back(redis_server: RedisServer) -> None:
    bus = RedisLiveBus(redis_server.url, timeout_seconds=0.3)
    reading = asyncio.create_task(bus.read("r", OLDEST, 30))
    await asyncio.sleep(0.05)
    redis_server.kill()
    for call in (lambda: reading, lambda: bus.publish("r", [b"1"])):
        with pytest.raises(RunnerError, match="Redis") as caught:
            await call()
        assert caught.value.code == "plane_unavailable"
    redis_server.start()
    await bus.publish("r", [b"2"])
    assert (await bus.read("r", OLDEST, 1)).entries == [b"2"]
    redis_server.stop()
    with pytest.raises(RunnerError, match="no answer"):
        await bus.read("r", OLDEST, 0.1)
    redis_server.cont()
    assert (await bus.read("r", OLDEST, 1)).entries == [b"2"]
    await bus.close()


async def test_behind_a_failure_it_reads_one_by_one_until_that_works(redis_server: RedisServer) -> None:
    """What was too much for the time-out at once is not asked for again and again."""
    bus = RedisLiveBus(redis_server.url, timeout_seconds=0.3)
    await bus.publish("r", [b"1", b"2", b"3"])
    redis_server.stop()
    with pytest.raises(RunnerError):
        await bus.read("r", OLDEST, 0.1)
    redis_server.cont()
    first = await bus.read("r", OLDEST, 1)
    assert first.entries == [b"1"]
    assert (await bus.read("r", first.place, 1)).entries == [b"2", b"3"]
    await bus.close()


async def test_a_line_that_began_anew_under_an_earlier_clock_is_read(redis_server: RedisServer) -> None:
    """Its entries are older than the place, for as long as the clock was set back: nobody may wait for that."""
    bus = RedisLiveBus(redis_server.url)
    redis_server.command("XADD", f"{LIVE}r", "99999999999999-0", "e", "1")
    arrived = await bus.read("r", OLDEST, 1)
    assert arrived.entries == [b"1"]
    assert (await bus.read("r", arrived.place, 0.05)).place == arrived.place
    redis_server.command("DEL", f"{LIVE}r")
    await bus.publish("r", [b"2"])
    arrived = await bus.read("r", arrived.place, 0.05)
    await bus.publish("r", [b"3"])
    assert (await bus.read("r", arrived.place, 1)).entries == [b"3"]
    await bus.close()
