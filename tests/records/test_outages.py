"""PostgreSQL and Redis go away under fifty running turns of real processes (DESIGN 3.9).

``OUTAGE_SECONDS`` sets for how long (4; ``scripts/outage`` takes 20), ``OUTAGE_TURNS`` how many turns run.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.postgres_server import PostgresServer
from tests.records.bed import Comparison, DemoGate, Fleet, Turns, compared, outcomes
from tests.redis_server import RedisServer

OUTAGE = float(os.environ.get("OUTAGE_SECONDS", "4"))
TURNS = int(os.environ.get("OUTAGE_TURNS", "50"))
PACE = 0.25
LIMIT = 240 + 3 * OUTAGE
CHUNKS = 4


@pytest.fixture
async def fleet(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    redis_server: RedisServer,
    postgres_server: PostgresServer,
    postgres_url: str,
) -> AsyncIterator[Fleet]:
    """Its leases are granted for twice the time of an outage, or for so many times it."""
    made = Fleet(tmp_path, redis_server, postgres_server, lease=getattr(request, "param", 2.0) * OUTAGE)
    try:
        await made.start()
        yield made
    finally:
        await made.over()


@dataclass
class Server:
    """What goes away, and how."""

    name: str
    redis: RedisServer
    postgres: PostgresServer

    async def suffers(self, how: str) -> None:
        """It is away for ``OUTAGE`` seconds; blocks nobody here."""
        server = self.redis if self.name == "redis" else self.postgres
        if how == "killed":
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(OUTAGE)
            await asyncio.to_thread(server.start)
        elif how == "frozen":
            await asyncio.to_thread(server.stop)
            await asyncio.sleep(OUTAGE)
            await asyncio.to_thread(server.cont)
        else:
            await self._again_and_again()

    async def _again_and_again(self) -> None:
        """It is there, and everybody's connections, or all that it knew, go five times."""
        for _ in range(5):
            if self.name == "redis":
                await asyncio.to_thread(self.redis.flush)
            else:
                await asyncio.to_thread(self.postgres.disconnect)
            await asyncio.sleep(OUTAGE / 5)


class Round:
    """One turn in each session: they all stream when the outage begins, and end during it or after it."""

    def __init__(self, number: int, everything: list[Turns]) -> None:
        self.everything = everything
        self.begun = DemoGate(f"begun{number}")
        self.after = DemoGate(f"after{number}")

    def _paces(self, number: int) -> int:
        """Half of the turns end in the middle of the outage, the others wait behind it."""
        return int((OUTAGE / 2 if number % 2 == 0 else OUTAGE) / PACE) // 2

    def said(self, number: int) -> int:
        """How many chunks the agent streams, but for what its tools and pauses say."""
        return CHUNKS * (1 + 2 * self._paces(number) + number % 2)

    def prompt(self, number: int) -> str:
        pace = [f"/stream {CHUNKS}\n/sleep {PACE}"] * self._paces(number)
        lines = ["/think first", f"/stream {CHUNKS}", self.begun.command, *pace, "/tool echo in the middle", *pace]
        if number % 2:
            lines += [self.after.command, f"/stream {CHUNKS}"]
        return "\n".join([*lines, "/think last"])

    async def begin(self) -> None:
        await asyncio.gather(*(turns.begin(self.prompt(number)) for number, turns in enumerate(self.everything)))

    async def pass_all(self, gate: DemoGate, step: int = 1) -> None:
        waiting = self.everything[step - 1 :: step]
        await asyncio.gather(*(turns.open(gate) for turns in waiting))

    def expect_whole_turns(self) -> None:
        """Whoever completed streamed all that the agent said."""
        for number, turns in enumerate(self.everything):
            turn, result = turns.dispatched[-1]
            if result is not None and result["outcome"] == "completed":
                chunks = [data["text"] for data in turn.of("message_delta")]
                assert sum(text.strip().isdigit() for text in chunks) == self.said(number)


async def outages(fleet: Fleet, server: Server, kinds: list[str]) -> tuple[list[Turns], Comparison]:
    """One round of turns for each kind, all in the same sessions; the comparison is made behind each."""
    everything = [Turns(fleet, number) for number in range(TURNS)]
    found = Comparison()
    for number, how in enumerate(kinds):
        one = Round(number, everything)
        await one.begin()
        going = asyncio.create_task(server.suffers(how))
        await asyncio.sleep(OUTAGE / 8)
        await one.pass_all(one.begun)
        await going
        ended = sum(turns.dispatched[-1][0].over for turns in everything)
        await one.pass_all(one.after, step=2)
        await asyncio.gather(*(turns.result() for turns in everything))
        one.expect_whole_turns()
        found = await compared(fleet, everything)
        print(f"\n{server.name} {how} for {OUTAGE:g} s under {TURNS} turns; {ended} ended meanwhile\n{found}")
        found.expect_nothing_left()
    return everything, found


@pytest.mark.timeout(LIMIT)
async def test_postgres_goes_away_under_fifty_turns(fleet: Fleet) -> None:
    """Cases G1, G10 and H4: killed, frozen, and everybody cut off again and again."""
    server = Server("postgres", fleet.redis, fleet.postgres)
    everything, found = await outages(fleet, server, ["killed", "frozen", "cut"])
    assert outcomes(everything) == {"completed": 3 * TURNS}
    assert found.turns == 3 * TURNS
    assert fleet.postgres.password not in fleet.cluster.said() + fleet.worker.said()


@pytest.mark.timeout(LIMIT)
async def test_redis_goes_away_under_fifty_turns(fleet: Fleet) -> None:
    """Cases G1, G5, G10 and H4: killed and empty afterwards, frozen, and emptied again and again."""
    server = Server("redis", fleet.redis, fleet.postgres)
    everything, found = await outages(fleet, server, ["killed", "frozen", "flushed"])
    assert outcomes(everything) == {"completed": 3 * TURNS}
    assert found.turns == 3 * TURNS


@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize("fleet", [0.4], indirect=True)
async def test_redis_is_away_for_longer_than_a_lease(fleet: Fleet) -> None:
    """Cases G1 and M3: another owner has become possible, so the turns end early; what was streamed is stored."""
    everything, found = await outages(fleet, Server("redis", fleet.redis, fleet.postgres), ["killed"])
    assert outcomes(everything)["failed"] >= TURNS // 2
    assert found.turns == TURNS
