"""The Lua scripts decide as ``rules.lease`` does, beat for beat, and leave the same leases behind."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.leases.redis import LEASE, RedisLeasePlane
from runner.rules.lease import FREE, Heartbeat, Move, SessionLease, comes_back, decide, move, release
from tests.redis_server import RedisServer

SECONDS = 20.0
TURNS = st.sampled_from([f"t{n}" for n in range(4)])
REPLICAS = st.sampled_from(["r1", "r1", "r2"])
PHASES = st.sampled_from(["running", "running", "paused", "parked", "ended"])


@dataclass(frozen=True)
class Step:
    """Time passes, then a beat, or a release of the beat's replica, or the plane forgets everything."""

    seconds: float
    beat: Heartbeat
    settled: bool
    predecessor_settled: bool
    what: str


STEPS = st.builds(
    Step,
    st.sampled_from([0.0, 0.0, 1.0, 19.5, 20.0, 90.0]),
    st.builds(
        Heartbeat,
        st.just("p"),
        st.just("s"),
        TURNS,
        REPLICAS,
        PHASES,
        predecessor=st.none() | TURNS,
        epoch_floor=st.integers(0, 4),
        seat_parked=st.booleans(),
        epoch=st.just(0) | st.integers(0, 8),
        started_at=st.sampled_from([0.0, 1.5, 900.0]),
        left=st.none() | TURNS,
    ),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["beat"] * 12 + ["release", "forget"]),
)


async def stored(plane: RedisLeasePlane) -> SessionLease:
    """What the database holds of the session."""
    raw: dict[str, Any] = await plane._client.hgetall(f"{LEASE}p:s")  # type: ignore[misc]
    if not raw:
        return FREE
    return SessionLease(
        owner=raw["owner"] or None,
        alive=raw["alive"] or None,
        running=raw["running"] or None,
        expires_at=int(raw["expires_at"]) / 1e6,
        epoch=int(raw["epoch"]),
        started_at=int(raw["started_at"]) / 1e6,
        last_turn=raw["last_turn"] or None,
        last_replica=raw["last_replica"] or None,
        parked=raw["parked"] == "1",
        ended=tuple(turn for turn in raw["ended"].split("\n") if turn),
    )


class Twins:
    """The rule and the scripts over the same story."""

    def __init__(self, url: str) -> None:
        self.now = 1_700_000_000.25
        self.lease = FREE
        self.step: Step
        self.asked: list[str] = []
        self.plane = RedisLeasePlane(url, lease_seconds=SECONDS, has_ended=self.has_ended, now=lambda: self.now)

    async def has_ended(self, project: str, session_id: str, turn_id: str) -> bool:
        self.asked.append(turn_id)
        beat = self.step.beat
        if turn_id == beat.predecessor and turn_id not in self.asked[:-1]:
            return self.step.predecessor_settled
        return self.step.settled

    async def take(self, step: Step) -> None:
        self.step, self.asked = step, []
        self.now += step.seconds
        if step.what == "forget":
            await self.plane._client.flushdb()
            self.lease = FREE
        elif step.what == "release":
            held = self.lease.owner == step.beat.replica_id
            self.lease = release(self.lease, step.beat.replica_id)
            assert await self.plane.release_replica(step.beat.replica_id) == held
        else:
            await self.beat(step)
        assert await stored(self.plane) == self.lease

    async def beat(self, step: Step) -> None:
        names = step.beat.predecessor is not None and step.beat.phase == "running"
        back = comes_back(self.lease.at(self.now), step.beat)
        after, answer = decide(
            self.lease,
            step.beat,
            self.now,
            SECONDS,
            predecessor_ended=step.predecessor_settled if names else True,
            turn_ended=step.settled,
        )
        assert await self.plane.beat(step.beat) == answer
        asked = [step.beat.predecessor] * names + [step.beat.turn_id] * back
        assert self.asked in (asked, asked[:1] * names), "the store is asked where its word counts"
        self.lease = after


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, min_size=1, max_size=25))
def test_any_story_is_the_same_in_lua_and_in_the_rule(redis_server: RedisServer, steps: list[Step]):
    async def story() -> None:
        redis_server.flush()
        twins = Twins(redis_server.url)
        try:
            for step in steps:
                await twins.take(step)
        finally:
            await twins.plane.close()

    asyncio.run(story())


STORIES: dict[Move, list[dict[str, Any]]] = {
    Move.TAKE: [{}],
    Move.RENEW: [{}, {}],
    Move.SWAP: [{}, {"turn_id": "t2", "predecessor": "t1"}],
    Move.HAND_OVER: [{}, {"phase": "paused"}, {"turn_id": "t2"}],
    Move.PAUSE: [{}, {"phase": "paused"}],
    Move.PARK: [{}, {"phase": "parked"}],
    Move.END: [{}, {"phase": "ended"}],
    Move.RESTORE: [{}, {"phase": "paused"}, {"turn_id": "t2"}, {"phase": "paused", "predecessor": "t2"}],
    Move.REFUSE_ENDED: [{}, {"phase": "ended"}, {}],
    Move.REFUSE_OWNED: [{}, {"replica_id": "r2"}],
    Move.REFUSE_RUNNING: [{}, {"turn_id": "t2"}],
    Move.REFUSE_STALE: [{"epoch_floor": 5}, {"turn_id": "t2", "epoch": 3}],
    Move.REFUSE_STRANGER: [{}, {"turn_id": "t2", "phase": "parked"}],
    Move.REFUSE_FORGOTTEN: [{}, {"phase": "ended"}, {"turn_id": "t2", "left": "t0"}],
}


@pytest.mark.parametrize("wanted", Move)
async def test_every_move_of_the_table_is_made(redis_server: RedisServer, wanted: Move):
    plane = RedisLeasePlane(redis_server.url, lease_seconds=SECONDS, now=lambda: 5.0)
    lease = FREE
    chosen = None
    for words in STORIES[wanted]:
        beat = Heartbeat(**{"project": "p", "session_id": "s", "turn_id": "t1", "replica_id": "r1", **words})
        chosen = move(lease.at(5.0), beat)
        lease, _ = decide(lease, beat, 5.0, SECONDS)
        reply = await plane._decide(beat, True, "0")
        assert reply[0] == chosen
    assert chosen is wanted
    assert await stored(plane) == lease
    await plane.close()


async def test_tombstones_are_bounded(redis_server: RedisServer):
    plane = RedisLeasePlane(redis_server.url, lease_seconds=SECONDS, now=lambda: 5.0)
    lease = FREE
    for n in range(40):
        for phase in ("running", "ended"):
            beat = Heartbeat("p", "s", f"t{n}", "r1", phase)
            await plane.beat(beat)
            lease, _ = decide(lease, beat, 5.0, SECONDS)
    assert await stored(plane) == lease
    await plane.close()
