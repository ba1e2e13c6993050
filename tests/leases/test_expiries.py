"""Nothing that a session needs ends by a clock that nobody renews (case N5)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from runner.leases import redis, redis_live
from runner.leases.redis import KEEP_SECONDS, RedisLeasePlane
from runner.store.stream import redis as stream
from tests.house.tree import ROOT
from tests.leases.conftest import HandClock, beat
from tests.redis_server import RedisServer

DAY_AND_AN_HOUR = 25 * 3600
LEASE_SECONDS = 600.0


@pytest.fixture
async def plane(redis_server: RedisServer) -> AsyncIterator[tuple[RedisLeasePlane, HandClock]]:
    clock = HandClock()
    plane = RedisLeasePlane(redis_server.url, lease_seconds=LEASE_SECONDS, now=clock.monotonic)
    yield plane, clock
    await plane.close()


async def test_a_parked_approval_outlives_a_day_and_an_hour_case_n5(plane: tuple[RedisLeasePlane, HandClock]) -> None:
    """Case N5: the beats of a paused turn renew everything of it; nobody else gets the session meanwhile."""
    leases, clock = plane
    assert (await leases.beat(beat("t1"))).admitted
    began = clock.now
    while clock.now - began < DAY_AND_AN_HOUR:
        clock.now += LEASE_SECONDS - 1
        answer = await leases.beat(beat("t1", phase="paused", epoch=1))
        assert (answer.admitted, answer.epoch) == (True, 1)
        left = [key async for key in leases._client.scan_iter(redis.LEASE + "*")]
        assert len(left) == 1
        assert await leases._client.pttl(left[0]) > (KEEP_SECONDS - 2) * 1000, "as if it had been granted now"
    holder = await leases.look("p", "s")
    assert holder is not None
    assert (holder.replica_id, holder.alive, holder.started_at) == ("r1", "t1", began)
    assert not (await leases.beat(beat("t2", "r2"))).admitted
    resumed = await leases.beat(beat("t2", predecessor="t1"))
    assert (resumed.admitted, resumed.epoch) == (True, 2)


def test_the_only_key_of_a_session_is_the_one_that_beats_renew_case_n5() -> None:
    """Case N5: a key with a session in its name is a lease; the stream's two have no expiry at all."""
    keys = redis.KEYS | redis_live.KEYS | stream.KEYS
    assert [name for name, what in keys.items() if "<session>" in what] == [redis.LEASE]
    assert all("no expiry" in what for what in stream.KEYS.values())
    assert KEEP_SECONDS == 7 * 86_400, "as long as a question waits"


def test_every_key_of_redis_is_listed_for_operators_case_n5() -> None:
    """Case N5."""
    listed = (ROOT / "docs" / "replicas.md").read_text()
    for name in redis.KEYS | redis_live.KEYS | stream.KEYS:
        assert f"`{name}" in listed, name
