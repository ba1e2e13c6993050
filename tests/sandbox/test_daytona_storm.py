"""Faulty rounds at a Daytona: whatever went wrong, what the service runs is what the pool holds (cases D9, J3)."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from runner.errors import RunnerError
from tests.daytona_emulator.fixture import EmulatorProcess
from tests.sandbox import bed
from tests.sandbox.daytona_bed import provider, spec, states

BEFORE: list[tuple[str, dict[str, Any]]] = [
    ("rate_limit", {"retry_after": 1}),
    ("server_error", {"status": 502, "times": 2}),
    ("dropped", {"times": 2}),
    ("dropped", {"when": "after", "match": "^(POST|DELETE) /api/sandbox"}),
    ("create_answer_lost", {}),
    ("create_dies_polling", {}),
    ("server_error", {"match": "/toolbox/", "status": 502}),
    ("slow", {"seconds": 0.3, "times": 4}),
    ("no_runners", {}),
    ("muted_events", {}),
]
DURING = ["auto_stop", "vanished", "errored", "daemon_dead", "dropped_links", "expired_link"]
CODES = {"provider_at_capacity", "sandbox_start_failed", "sandbox_lost"}


@pytest.mark.parametrize("seed", range(10))
async def test_what_runs_is_what_is_held(daytona_emulator: EmulatorProcess, seed: int) -> None:
    """Ten times ten rounds."""
    chance = random.Random(seed)
    made = provider(daytona_emulator, orphan_seconds=1.0)
    ends = dict.fromkeys(("started", "refused", "given up"), 0)
    codes: set[str] = set()
    for number in range(10):
        session = f"ses_{chance.randrange(4)}"
        for scenario, asked in chance.sample(BEFORE, chance.choice((0, 1, 1, 2))):
            daytona_emulator.scenario(scenario, **asked)
        start = asyncio.create_task(made.start(spec(session, seat_id=f"seat_{number}", seconds=15.0)))
        if chance.random() < 0.2:
            await asyncio.sleep(chance.random() * 0.4)
            start.cancel()
        try:
            sandbox = await start
        except asyncio.CancelledError:
            ends["given up"] += 1
        except RunnerError as error:
            codes.add(error.code)
            ends["refused"] += 1
        else:
            ends["started"] += 1
            talk = bed.Talk(sandbox)
            assert await talk.say("hello") == "hello"
            if chance.random() < 0.5:
                daytona_emulator.scenario(chance.choice(DURING), sandbox=sandbox.name)
            if chance.random() < 0.3:
                daytona_emulator.scenario("server_error", match="/stop", status=503)
            assert (await sandbox.destroy(0.0)).proven
        daytona_emulator.scenario("restored")
        await bed.until(lambda: made.live == (), f"round {number} is over")
        assert set(states(daytona_emulator).values()) <= {"stopped"}, number
    assert codes <= CODES
    assert ends["started"] >= 3, ends
    for index in range(4):
        await made.remove("default", f"ses_{index}")
    await bed.until(lambda: states(daytona_emulator) == {})
    await made.close()
    assert daytona_emulator.state()["processes"] == []
