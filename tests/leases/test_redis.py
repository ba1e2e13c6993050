"""What only Redis can do to a plane: lose its memory, die, freeze, answer late; and how long its keys live."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from runner.clock import SystemClock
from runner.errors import RunnerError
from runner.leases import redis as module
from runner.leases.heartbeat import Heartbeats
from runner.leases.port import BeatAnswer, ReplicaInfo
from runner.leases.redis import KEEP_SECONDS, KEYS, RedisLeasePlane
from tests.leases.conftest import beat
from tests.leases.proxy import Proxy
from tests.redis_server import RedisServer


@pytest.fixture
async def plane(redis_server: RedisServer) -> AsyncIterator[RedisLeasePlane]:
    plane = RedisLeasePlane(redis_server.url, lease_seconds=20, timeout_seconds=2)
    yield plane
    await plane.close()


@pytest.fixture
async def proxy(redis_server: RedisServer) -> AsyncIterator[Proxy]:
    proxy = Proxy(redis_server.port)
    await proxy.start()
    yield proxy
    await proxy.close()


@pytest.fixture
async def behind(proxy: Proxy) -> AsyncIterator[RedisLeasePlane]:
    """A plane that is reached through ``proxy``."""
    plane = RedisLeasePlane(proxy.url, lease_seconds=20, timeout_seconds=2)
    yield plane
    proxy.replies.set()
    proxy.requests.set()
    await plane.close()


async def unavailable(call: Any) -> str:
    with pytest.raises(RunnerError) as caught:
        await call
    assert caught.value.code == "plane_unavailable"
    return caught.value.message


async def until(condition: Any, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.01)


# -- keys ------------------------------------------------------------------------------------------------------------


async def lives(plane: RedisLeasePlane) -> dict[str, float]:
    """Seconds that every key of the database has left to live, -1 for ever, by the beginning it is listed with."""
    found = {}
    async for key in plane._client.scan_iter("*"):
        (prefix,) = [prefix for prefix in KEYS if key.startswith(prefix)]
        found[prefix] = await plane._client.pttl(key) / 1000
    return found


async def test_every_key_has_the_time_to_live_that_is_written_down_case_n5(plane: RedisLeasePlane):
    """Case N5: listed and tested, none without and none that beats do not renew."""
    for _ in range(2):
        for one in (beat("t1"), beat("t1", phase="paused"), beat("t2", predecessor="t1"), beat("t2", phase="parked")):
            assert (await plane.beat(one)).admitted
            await plane.announce(ReplicaInfo("r1"))
            await plane.take_lease("sweep", "r1", 7)
            wanted = {
                module.LEASE: KEEP_SECONDS,
                module.HELD: 60,
                module.NAMED: 7,
                module.ANNOUNCED: 60,
                module.REPLICAS: 60,
            }
            found = await lives(plane)
            assert found.keys() == KEYS.keys() == wanted.keys()
            for prefix, seconds in wanted.items():
                assert seconds - 2 < found[prefix] <= seconds, prefix
        await plane.beat(beat("t2", phase="ended"))
        assert (await lives(plane))[module.LEASE] > KEEP_SECONDS - 2
        assert await plane.release_replica("r1") == 0
        assert (await lives(plane)).keys() == {module.LEASE}
        await plane._client.flushdb()


async def test_a_long_named_lease_is_still_known_at_the_release(plane: RedisLeasePlane):
    assert await plane.take_lease("long", "r1", 500)
    await plane.beat(beat("t1"))
    assert (await lives(plane))[module.HELD] > 498
    await plane.release_replica("r1")
    assert await plane.take_lease("long", "r2", 5)


async def test_beats_keep_alive_what_would_run_out_by_itself(redis_server: RedisServer):
    """Case N5 on Redis's own clock: everything of a parked approval outlives many of its shortest times to live."""
    plane = RedisLeasePlane(redis_server.url, lease_seconds=0.3)
    await plane.beat(beat("t1"))
    ends = time.monotonic() + 1.5
    while time.monotonic() < ends:
        assert (await plane.beat(beat("t1", phase="paused", epoch=1))).admitted
        await asyncio.sleep(0.02)
    assert not (await plane.beat(beat("t2", "r2"))).admitted
    assert await plane.release_replica("r1") == 1
    assert (await plane.beat(beat("t2", "r2"))).epoch == 2
    await plane.close()


# -- lost memory, death ----------------------------------------------------------------------------------------------


class Replica:
    """A beat shell on the real clock with short limits, and its losses."""

    def __init__(self, plane: RedisLeasePlane) -> None:
        self.lost: list[BeatAnswer] = []
        self.beats = Heartbeats(
            plane,
            SystemClock(),
            beat_seconds=0.1,
            beat_timeout_seconds=0.3,
            on_lost=lambda turn, answer: self.lost.append(answer),
            rivals=lambda: plane.shared,
        )

    async def close(self) -> None:
        await self.beats.close()


async def test_a_turn_outlives_a_redis_that_dies_and_comes_back_empty_case_m8(redis_server: RedisServer):
    """Case M8: errors cost beats; the plane without memory grants the same epoch and start again."""
    plane = RedisLeasePlane(redis_server.url, lease_seconds=10, timeout_seconds=0.3)
    replica = Replica(plane)
    first = await replica.beats.first(beat("t1", epoch_floor=6))
    redis_server.kill()
    await asyncio.sleep(0.4)
    redis_server.start()

    async def back() -> bool:
        return await plane.look("p", "s") is not None

    await until(back)
    holder = await plane.look("p", "s")
    assert holder is not None
    assert (holder.running, holder.epoch, holder.started_at) == ("t1", 7, first.started_at)
    assert replica.lost == []
    assert replica.beats.holds("p", "s", "t1")
    assert abs(replica.beats.plane_now() - holder.now) < 1.0
    await replica.close()
    await plane.close()


async def test_an_owner_whose_redis_froze_past_its_lease_is_lost_by_itself_case_m8(redis_server: RedisServer):
    """Case M8: a half-open Redis makes no beat hang, and the missed lease is noticed here."""
    plane = RedisLeasePlane(redis_server.url, lease_seconds=1, timeout_seconds=0.3)
    replica = Replica(plane)
    assert (await replica.beats.first(beat("t1"))).admitted
    frozen = time.monotonic()
    redis_server.stop()
    async with asyncio.timeout(5):
        while not replica.lost:
            await asyncio.sleep(0.02)
    assert time.monotonic() - frozen < 2
    assert not replica.beats.holds("p", "s", "t1")
    redis_server.cont()
    await replica.close()
    await plane.close()


async def test_scripts_that_the_server_forgot_are_sent_again(plane: RedisLeasePlane, redis_server: RedisServer):
    await plane.beat(beat("t1"))
    redis_server.command("SCRIPT", "FLUSH")
    assert (await plane.beat(beat("t1"))).epoch == 1


async def test_a_restart_is_one_outage_not_one_error_for_each_connection(
    plane: RedisLeasePlane, redis_server: RedisServer
):
    await asyncio.gather(*(plane.beat(beat("t", session=f"s{n}")) for n in range(20)))
    redis_server.restart()
    await asyncio.sleep(0.05)
    answers = await asyncio.gather(*(plane.beat(beat("t", session=f"s{n}", epoch=1)) for n in range(20)))
    assert [answer.epoch for answer in answers] == [1] * 20


async def test_a_dead_redis_is_unavailable_at_once(plane: RedisLeasePlane, redis_server: RedisServer):
    redis_server.kill()
    started = time.monotonic()
    for call in (
        plane.beat(beat("t1")),
        plane.look("p", "s"),
        plane.release_replica("r1"),
        plane.announce(ReplicaInfo("r1")),
        plane.replicas(),
        plane.take_lease("sweep", "r1", 5),
        plane.push("r1", {}),
    ):
        await unavailable(call)
    assert time.monotonic() - started < 2


async def test_a_wrong_password_is_not_told(redis_server: RedisServer):
    plane = RedisLeasePlane(f"redis://:hunter2@127.0.0.1:{redis_server.port}/0", lease_seconds=20)
    assert "hunter2" not in await unavailable(plane.look("p", "s"))
    await plane.close()


# -- late replies ----------------------------------------------------------------------------------------------------


async def own_replies(plane: RedisLeasePlane, mark: str) -> None:
    """Questions whose answers cannot be taken for one another."""
    answers = await asyncio.gather(
        plane.beat(beat(f"turn-{mark}", session=f"own-{mark}", epoch_floor=40)),
        plane.take_lease(f"name-{mark}", "r1", 5),
        plane.take_lease(f"name-{mark}", "r2", 5),
    )
    assert (answers[0].epoch, answers[1:]) in ((41, [True, False]), (41, [False, True]))
    holder = await plane.look("p", f"own-{mark}")
    assert holder is not None
    assert holder.running == f"turn-{mark}"
    assert await plane.look("p", f"nobody-{mark}") is None


async def test_a_command_that_is_cancelled_drops_its_connection(behind: RedisLeasePlane, proxy: Proxy):
    """The reply comes after the cancellation; whoever asks next gets its own reply all the same."""
    await own_replies(behind, "before")
    for n in range(5):
        opened = proxy.connections
        proxy.replies.clear()
        proxy.held.clear()
        asking = asyncio.create_task(behind.look("p", f"own-{'before' if n % 2 else 'x'}"))
        await proxy.held.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        proxy.replies.set()
        await own_replies(behind, f"after-{n}")
        assert proxy.connections > opened


async def test_a_cancellation_at_any_moment_leaves_no_connection_out_of_step(behind: RedisLeasePlane):
    """Before, while and after the command is written, its reply is read and the connection is given back."""
    fates = []
    for n, steps in enumerate([*range(60), None]):
        asking = asyncio.create_task(behind.beat(beat("t1", session="cut", epoch_floor=n)))
        if steps is None:
            await asyncio.wait([asking])
        for _ in range(steps or 0):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        fates.append(asking.cancelled())
        await own_replies(behind, str(n))
    assert (fates[0], fates[-1]) == (True, False)


async def test_a_command_that_ran_out_of_time_drops_its_connection(proxy: Proxy):
    plane = RedisLeasePlane(proxy.url, lease_seconds=20, timeout_seconds=0.2)
    await own_replies(plane, "before")
    proxy.replies.clear()
    started = time.monotonic()
    message = await unavailable(plane.look("p", "own-before"))
    assert "0.2 s" in message
    assert time.monotonic() - started < 1
    proxy.replies.set()
    await own_replies(plane, "after")
    await plane.close()


async def test_a_black_hole_costs_its_own_time_out_whoever_waits_behind(redis_server: RedisServer):
    plane = RedisLeasePlane(redis_server.url, lease_seconds=20, timeout_seconds=0.3)
    await plane.beat(beat("t1"))
    redis_server.stop()
    started = time.monotonic()
    answers = await asyncio.gather(
        *(plane.beat(beat("t1", session=f"s{n}")) for n in range(200)), return_exceptions=True
    )
    assert time.monotonic() - started < 2
    assert {getattr(answer, "code", answer) for answer in answers} == {"plane_unavailable"}
    redis_server.cont()
    assert (await plane.beat(beat("t1"))).epoch == 1
    await plane.close()


# -- notes -----------------------------------------------------------------------------------------------------------


async def listening(plane: RedisLeasePlane) -> asyncio.Queue[Any]:
    got: asyncio.Queue[Any] = asyncio.Queue()
    await plane.listen("r1", got.put_nowait)
    return got


async def arrives(sender: RedisLeasePlane, got: asyncio.Queue[Any], note: dict[str, Any]) -> None:
    async def pushed() -> bool:
        try:
            return await sender.push("r1", note)
        except RunnerError:
            return False

    await until(pushed)
    async with asyncio.timeout(5):
        assert await got.get() == note


async def test_notes_are_received_again_after_the_server_was_restarted(
    plane: RedisLeasePlane, redis_server: RedisServer
):
    got = await listening(plane)
    for n in range(2):
        await arrives(plane, got, {"n": n})
        redis_server.restart()
    await arrives(plane, got, {"n": 9})


async def test_notes_are_received_once_a_server_that_was_away_comes(redis_server: RedisServer):
    plane = RedisLeasePlane(redis_server.url, lease_seconds=20, timeout_seconds=0.2)
    redis_server.kill()
    got = await listening(plane)
    redis_server.start()
    await arrives(plane, got, {"n": 1})
    await plane.close()


async def test_a_half_open_connection_of_the_listener_is_noticed(
    proxy: Proxy, plane: RedisLeasePlane, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.1)
    behind = RedisLeasePlane(proxy.url, lease_seconds=20, timeout_seconds=0.2)
    got = await listening(behind)
    await arrives(plane, got, {"n": 1})
    await asyncio.sleep(0.5)
    assert proxy.connections == 1, "a quiet connection that answers is kept"
    proxy.replies.clear()
    await plane.push("r1", {"lost": True})
    async with asyncio.timeout(5):
        while proxy.connections < 2:
            await asyncio.sleep(0.02)
    proxy.cut()
    proxy.replies.set()
    await arrives(plane, got, {"n": 2})
    await behind.close()


async def test_a_closed_plane_leaves_no_task_and_no_connection(plane: RedisLeasePlane, redis_server: RedisServer):
    before = asyncio.all_tasks()
    other = RedisLeasePlane(redis_server.url, lease_seconds=20)
    await listening(other)
    await other.beat(beat("t1"))
    await other.close()
    assert asyncio.all_tasks() - before == set()
    clients = b"x"

    async def alone() -> bool:
        nonlocal clients
        clients = redis_server.command("CLIENT", "LIST")
        return clients.count(b" addr=") == 1

    await until(alone)


# -- set-up ----------------------------------------------------------------------------------------------------------


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    with pytest.raises(RunnerError, match=r"pip install 'acp-runner\[redis\]'") as caught:
        RedisLeasePlane("redis://127.0.0.1/0", lease_seconds=20)
    assert caught.value.extra == {"field": "leases.url"}


def test_a_url_that_is_none_is_refused():
    with pytest.raises(RunnerError) as caught:
        RedisLeasePlane("ftp://secret@127.0.0.1", lease_seconds=20)
    assert caught.value.code == "invalid_request"
    assert "secret" not in caught.value.message


def test_the_module_is_loaded_without_the_package():
    assert "Redis" not in vars(module)
