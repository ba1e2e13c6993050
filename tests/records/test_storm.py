"""Whatever goes away, dies or forgets, in any order, under turns that go on: what was streamed is what is stored.

``RECORDS_STORM`` sets for how many seconds (6), ``RECORDS_STORM_SEED`` which.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from typing import Any

import pytest

from runner.client import ApiError
from tests.e2e.server import SECONDS
from tests.e2e.talk import Line
from tests.normal_form import normal_form
from tests.records.bed import Fleet, Reader, assert_all_of
from tests.replicas.bed import Member, Session, until_async

STORM = float(os.environ.get("RECORDS_STORM", "6"))
SEED = int(os.environ.get("RECORDS_STORM_SEED", "1"))
SESSIONS = 10
PROMPT = "/think hm\n" + "/stream 3\n/sleep 0.05\n/tool echo hi\n/sleep 0.1\n" * 3
RUN = ("completed", "failed", "lost")


class Client:
    """Sends one prompt after the other to a session, each again and again until there is a result."""

    def __init__(self, fleet: Fleet, number: int, seed: int) -> None:
        self.session: Session = fleet.session(f"s{number}")
        self.fleet = fleet
        self.chance = random.Random(seed)
        self.told: list[tuple[str, list[Line]]] = []
        self.results: dict[str, dict[str, Any]] = {}
        self.readers: list[Reader] = []

    def _door(self) -> Member:
        return self.chance.choice([self.fleet.cluster.a, self.fleet.cluster.b])

    async def run(self, until: float) -> None:
        number = 0
        while time.monotonic() < until:
            number += 1
            await self._insist(f"p{number}")
            if not self.readers:
                self.readers = [Reader(self.session, member) for member in (self.fleet.cluster.a, self.fleet.cluster.b)]
                self.fleet.readers += self.readers

    async def _insist(self, prompt_id: str) -> None:
        deadline = time.monotonic() + SECONDS + STORM
        while prompt_id not in self.results:
            assert time.monotonic() < deadline, f"{self.session.session} {prompt_id} has no result"
            await self._try(prompt_id)
            await asyncio.sleep(self.chance.uniform(0, 0.2))

    async def _try(self, prompt_id: str) -> None:
        turn = self.session.dispatch(self._door(), PROMPT, harness="demo", prompt_id=prompt_id)
        try:
            result = await turn.result()
        except (ApiError, TimeoutError):
            await turn.drop()
        else:
            if result["turn_id"] is not None:
                self.results[prompt_id] = result
        self.told.append((prompt_id, turn.events))


class Weather:
    """One trouble after the other, and sometimes two at once; everything is well behind it."""

    def __init__(self, fleet: Fleet, chance: random.Random) -> None:
        self.fleet, self.chance = fleet, chance
        self.story: list[str] = []

    async def rage(self, until: float) -> None:
        while time.monotonic() < until:
            names = self.chance.sample(["worker", "postgres", "redis", "a", "b"], self.chance.choice([1, 1, 2]))
            if {"a", "b"} <= set(names):
                names.remove("b")
            await asyncio.gather(*(self._hurt(name) for name in names))
            await asyncio.sleep(self.chance.uniform(0, 1))

    async def _hurt(self, name: str) -> None:
        fleet, seconds = self.fleet, self.chance.uniform(0.1, 3)
        frozen = name in ("postgres", "redis") and self.chance.random() < 0.4
        self.story.append(f"{name} {'frozen' if frozen else 'killed'} for {seconds:.1f} s")
        servers = {"postgres": fleet.postgres, "redis": fleet.redis, "worker": fleet.worker}
        victim: Any = servers.get(name) or (fleet.cluster.a if name == "a" else fleet.cluster.b)
        await asyncio.to_thread(victim.stop if frozen else victim.kill)
        await asyncio.sleep(seconds)
        if frozen:
            await asyncio.to_thread(victim.cont)
        elif name in ("postgres", "redis"):
            await asyncio.to_thread(victim.start)
        else:
            await self._started(victim)

    async def _started(self, victim: Any) -> None:
        """What it needs may be away: then it says so, and is started again."""
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                await asyncio.to_thread(victim.start)
                return
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.to_thread(victim.kill)


async def judge(fleet: Fleet, client: Client) -> Counter[str]:
    """Both replicas and all readers tell the same, and all that any client was told is in it."""
    records = await client.session.check(fleet.cluster.a, fleet.cluster.b)
    stored = normal_form(records)
    last = records[-1]["cursor"]
    for reader in client.readers:
        await until_async(lambda reader=reader: _has(reader, last), f"a reader of {client.session.session} has it all")
        assert normal_form(reader.events) == stored, client.session.session
    for prompt_id, events in client.told:
        own = normal_form(one for one in records if one["prompt_id"] == prompt_id)
        assert_all_of(normal_form(event for event in events if event.get("cursor")), own)
    endings = {one["turn_id"]: one["data"]["outcome"] for one in records if one["type"] == "done"}
    assert {result["turn_id"]: result["outcome"] for result in client.results.values()}.items() <= endings.items()
    assert set(endings.values()) <= set(RUN), endings
    return Counter(endings.values())


async def _has(reader: Reader, cursor: str) -> bool:
    return reader.cursor == cursor


@pytest.mark.timeout(150 + 2 * STORM)
async def test_a_storm_of_troubles(fleet: Fleet) -> None:
    """Cases G1, G5, G10, H4 and M3, in any order, several at once."""
    chance = random.Random(SEED)
    clients = [Client(fleet, number, chance.getrandbits(32)) for number in range(SESSIONS)]
    weather = Weather(fleet, chance)
    until = time.monotonic() + STORM
    try:
        await asyncio.gather(weather.rage(until), *(client.run(until) for client in clients))
        await until_async(fleet.ready, "both runners are ready")
        total: Counter[str] = Counter()
        for client in clients:
            total += await judge(fleet, client)
        await until_async(fleet.settled, f"nothing is under way: {fleet.pending()}, {fleet.in_stream()}")
        assert fleet.count("*") == fleet.count("DISTINCT (project, session_id, epoch, n)")
        aside = int(fleet.postgres.sql("SELECT count(*) FROM quarantine", fleet.postgres.database))
        print(dict(total), f"{aside} in quarantine", weather.story)
        assert total["completed"] > 0
    except BaseException:
        print(weather.story)
        raise
