"""Random double sends and stops at all replicas at once, and an oracle that knows what may have come of them.

``STORM`` sets how many (150; ``scripts/storm`` takes 500), ``STORM_SEED`` which.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from runner.client import ApiError
from tests.agents import directive, steps
from tests.e2e.server import SECONDS
from tests.replicas.bed import Cluster, Member, Session
from tests.replicas.conftest import Sessions

ROUNDS = int(os.environ.get("STORM", "150"))
SEED = int(os.environ.get("STORM_SEED", "1"))
SESSIONS = 6
SLOWEST = 0.08
NOTHING_TO_STOP = frozenset({"execution_mismatch", "not_found"})
TURNED_AWAY = frozenset({"owned_elsewhere", "plane_unavailable", "store_unavailable"})


@dataclass
class Ledger:
    """What clients of one session were told."""

    sent: int = 0
    refused: int = 0
    turned_away: int = 0
    results: list[dict[str, Any]] = field(default_factory=list)
    stops: list[dict[str, Any]] = field(default_factory=list)
    not_stopped: list[ApiError] = field(default_factory=list)


class Storm:
    """Sends and stops of one session."""

    def __init__(self, session: Session, chance: random.Random) -> None:
        self.session = session
        self.chance = chance
        self.told = Ledger()
        self._prompts = 0

    async def round(self) -> None:
        """Two sends at once, of one prompt or of two, and perhaps a Stop, or two, somewhere in between."""
        self._prompts += 1
        ids = self.chance.choice([("x", "x"), ("x", "y"), ("x", "y")])
        work = [self._send(f"{self._prompts}{name}", self._pause()) for name in ids]
        for _ in range(self.chance.choice([0, 1, 1, 2])):
            work.append(self._stop(self._pause()))
        self.chance.shuffle(work)
        await asyncio.gather(*work)

    def _pause(self) -> float:
        return self.chance.choice([0.0, self.chance.uniform(0, SLOWEST)])

    def _door(self) -> Member:
        return self.chance.choice(self.session.cluster.doors)

    async def _send(self, prompt_id: str, pause: float) -> None:
        seconds = random.Random(prompt_id).uniform(0, SLOWEST)
        door = self._door()
        self.told.sent += 1
        await asyncio.sleep(pause)
        text = directive(steps.text(prompt_id), steps.sleep(seconds), steps.reply())
        try:
            result = await self.session.dispatch(door, text, prompt_id=prompt_id).result()
        except ApiError as error:
            if error.code not in TURNED_AWAY:
                raise
            self.told.turned_away += 1
            return
        if result["turn_id"] is None:
            # Refused, or cancelled by a Stop while it was prepared: nothing of it ever ran.
            assert result["outcome"] == "cancelled" or result["error"]["code"] == "session_turn_in_use"
            self.told.refused += 1
        else:
            self.told.results.append(result)

    async def _stop(self, pause: float) -> None:
        door = self._door()
        await asyncio.sleep(pause)
        try:
            self.told.stops.append(await self.session.at(door).cancel(self.session.session, wait_seconds=SECONDS))
        except ApiError as error:
            if error.code not in NOTHING_TO_STOP:
                raise
            self.told.not_stopped.append(error)

    def judge(self, records: list[dict[str, Any]]) -> Counter[str]:
        """Every send is admitted, refused or attached; every turn has one ending; cancelled is who was stopped.

        Returns:
            How many there were of each.
        """
        told = self.told
        endings = [record["data"] for record in records if record["type"] == "done"]
        outcomes = {ending["turn_id"]: ending["outcome"] for ending in endings}
        prompts = {
            record["data"]["turn_id"]: record["data"]["prompt_ids"]
            for record in records
            if record["type"] == "turn_admitted"
        }
        assert len(outcomes) == len(endings)
        assert outcomes.keys() == prompts.keys()
        assert len({prompt for ids in prompts.values() for prompt in ids}) == len(prompts), "a prompt ran twice"
        answered = Counter(result["turn_id"] for result in told.results)
        assert set(answered) == set(prompts), "a turn that nobody was told of, or a result without a turn"
        attached = sum(answered.values()) - len(answered)
        assert told.sent == len(prompts) + told.refused + attached + told.turned_away
        for result in told.results:
            assert result["outcome"] == outcomes[result["turn_id"]]
            assert result["prompt_ids"] == prompts[result["turn_id"]]
        stopped = {stop["turn_id"] for stop in told.stops if stop["outcome"] == "stopped"}
        cancelled = {turn_id for turn_id, outcome in outcomes.items() if outcome == "cancelled"}
        assert cancelled == stopped
        assert set(outcomes.values()) <= {"completed", "cancelled"}, outcomes
        return Counter(
            admitted=len(prompts),
            refused=told.refused,
            attached=attached,
            turned_away=told.turned_away,
            cancelled=len(cancelled),
            stops=len(told.stops) + len(told.not_stopped),
        )


@pytest.mark.timeout(60 + ROUNDS)
async def test_a_storm_of_double_sends_and_stops(cluster: Cluster, sessions: Sessions) -> None:
    """Cases B2 and B6: dispatched = admitted + refused + attached, and cancelled exactly where a Stop was applied."""
    chance = random.Random(SEED)
    storms = [Storm(sessions(), random.Random(chance.random())) for _ in range(SESSIONS)]
    share = [len(range(number, ROUNDS, SESSIONS)) for number in range(SESSIONS)]

    async def run(storm: Storm, rounds: int) -> None:
        for _ in range(rounds):
            await storm.round()

    async with asyncio.TaskGroup() as group:
        for storm, rounds in zip(storms, share, strict=True):
            group.create_task(run(storm, rounds))
    total: Counter[str] = Counter()
    for storm in storms:
        total += storm.judge(await storm.session.check())
    print(dict(total))
    assert total["turned_away"] <= total["admitted"] // 20, total
    assert total["refused"] > 0
    assert total["attached"] > 0
    assert total["cancelled"] > 0
