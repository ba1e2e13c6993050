"""The show of the Daytona provider: a session's life, every fault's outcome, and a hundred faulty rounds.

The real SDK speaks to the emulated service; its exchanges are judged behind every test (``daytona_emulator``).
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

from runner.errors import RunnerError
from tests.daytona.house import House
from tests.daytona_emulator.fixture import EmulatorProcess
from tests.e2e.conftest import Serve
from tests.e2e.server import until
from tests.e2e.test_daytona import asleep, config, metrics, states, talk_in
from tests.sandbox import bed

LANES, ROUNDS = 10, 10
CREATE = "^POST /api/sandbox$"
BEFORE: list[tuple[str, dict[str, Any]]] = [
    ("rate_limit", {"retry_after": 1}),
    ("server_error", {"status": 502, "times": 2}),
    ("dropped", {"match": CREATE}),
    ("dropped", {"when": "after", "match": "^(POST|DELETE) /api/sandbox"}),
    ("create_answer_lost", {}),
    ("create_dies_polling", {}),
    ("server_error", {"match": "/toolbox/", "status": 502}),
    ("slow", {"seconds": 0.2, "times": 4}),
    ("no_runners", {}),
    ("muted_events", {}),
]
DURING = ("auto_stop", "vanished", "errored", "daemon_dead", "dropped_links", "expired_link", "stuck_delete", "deaf")
CODES = ("provider_at_capacity", "sandbox_start_failed", "sandbox_lost")
"""How a start and its first answer may fail; no other code is known to them."""


async def test_a_life(daytona_emulator: EmulatorProcess, serve: Serve) -> None:
    """Create, a turn through the bridge, park, stop, wake, a turn with memory, delete (cases C2, C3, I5)."""
    server = serve(config(daytona_emulator, "idle_seconds = 1"))
    async with server.client() as client:
        talk = talk_in(server, client, "s")
        first = await talk.prompt("/write kept.txt hello")
        assert (first["ok"], first["start"], states(daytona_emulator)) == (True, "cold", ["started"])
        warm = await talk.prompt("two")
        assert (warm["ok"], warm["start"]) == (True, "hit")
        view = await asleep(talk)
        assert (states(daytona_emulator), daytona_emulator.state()["processes"]) == (["stopped"], [])
        (seat,) = (await client.pool())["items"]
        del seat["warm_until"], view["warm_until"]
        assert {name: seat[name] for name in view} == view
        assert (seat["session_id"], seat["provider"]) == ("s", "daytona")
        (remote,) = [one for one in (await client.health())["providers"] if one["name"] == "daytona"]
        assert (remote["available"], remote["running"], remote["asleep"], remote["capacity"]) == (True, 0, 1, None)
        shown = await metrics(server)
        assert 'acp_runner_seats{state="asleep"} 1.0' in shown
        assert 'acp_runner_daytona_changes_total{change="created"} 1.0' in shown
        woken = await talk.prompt("three")
        assert (woken["ok"], woken["start"]) == (True, "woken")
        assert woken["text"] == "You said: three (message 3 of this conversation)"
        assert states(daytona_emulator) == ["started"]
        await client.delete("s")
        await until(lambda: states(daytona_emulator) == [], "it is deleted")
    assert daytona_emulator.state()["processes"] == []


OUTCOMES: list[tuple[str, dict[str, Any], str]] = [
    # what goes wrong before a session's first turn, and how that turn ends
    ("rate_limit", {"retry_after": 1}, "ok"),
    ("server_error", {"match": CREATE, "status": 502}, "ok"),
    ("server_error", {"match": "^GET /api/sandbox/", "status": 503, "times": 2}, "ok"),
    ("dropped", {"match": CREATE}, "ok"),
    ("create_answer_lost", {}, "ok"),
    ("create_dies_polling", {}, "ok"),
    ("server_error", {"match": "/process/execute", "status": 502}, "ok"),
    ("dropped", {"match": "/files/bulk-upload"}, "ok"),
    ("server_error", {"match": "preview-url", "status": 500}, "ok"),
    ("quota", {"cpu": 0}, "provider_at_capacity"),
    ("quota", {"cpu": 0, "status": 403}, "provider_at_capacity"),
    ("disk_quota", {"disk": 0}, "provider_at_capacity"),
    ("no_runners", {}, "provider_at_capacity"),
    ("suspended", {}, "sandbox_start_failed"),
]
LOSSES: list[tuple[str, str, str]] = [
    # what goes wrong in a turn, how that turn ends, how the next one starts
    ("dropped_links", "ok", "hit"),
    ("expired_link", "ok", "hit"),
    ("auto_stop", "sandbox_lost", "woken"),
    ("errored", "sandbox_lost", "cold"),
    ("vanished", "sandbox_lost", "cold"),
]


async def test_every_fault_has_its_outcome(daytona_emulator: EmulatorProcess, serve: Serve) -> None:
    """Cases C5, C7, I9: told by the turn that met it, and the next turn of the session works."""
    server = serve(config(daytona_emulator))
    found: list[tuple[str, dict[str, Any], str]] = []
    async with server.client() as client:
        for number, (scenario, asked, _) in enumerate(OUTCOMES):
            talk = talk_in(server, client, f"s{number}")
            daytona_emulator.scenario(scenario, **asked)
            ended = await talk.prompt("one")
            daytona_emulator.scenario("restored")
            found.append((scenario, asked, "ok" if ended["ok"] else ended["error"]["code"]))
            assert (await talk.prompt("two"))["start"] == ("hit" if ended["ok"] else "cold"), scenario
            await client.kill(talk.session)
    assert found == OUTCOMES


async def test_every_loss_has_its_outcome(daytona_emulator: EmulatorProcess, serve: Serve) -> None:
    """Cases C5, C8, C13: the turn ends at once; the disk is gone on with where there is one, else that is told."""
    server = serve(config(daytona_emulator))
    found = []
    async with server.client() as client:
        for number, (scenario, _, _) in enumerate(LOSSES):
            talk = talk_in(server, client, f"s{number}")
            assert (await talk.prompt("one"))["ok"]
            running = talk.dispatch("/tool sleep 1")
            await running.event("tool_call")
            (box,) = [box for box in daytona_emulator.sandboxes() if box["state"] == "started"]
            daytona_emulator.scenario(scenario, sandbox=box["id"])
            ended = await running.result()
            again = await talk.prompt("three")
            assert (again["ok"], bool(again.get("context_lost"))) == (True, again["start"] == "cold")
            found.append((scenario, "ok" if ended["ok"] else ended["error"]["code"], again["start"]))
            await client.kill(talk.session)
            await until(lambda: "started" not in states(daytona_emulator), "it sleeps")
    assert found == LOSSES


async def lane(house: House, seed: int, ends: Counter[str]) -> None:
    """Faulty rounds of a few sessions, one after the other; behind each the pool and the service say the same."""
    chance, emulator = random.Random(seed), house.emulator
    sessions = [f"ses_{seed}_{number}" for number in range(3)]
    for number in range(ROUNDS):
        session = chance.choice(sessions)
        for scenario, asked in chance.sample(BEFORE, chance.choice((0, 1, 1, 2))):
            emulator.scenario(scenario, **asked)
            ends[scenario] += 1
        start = asyncio.create_task(house.begin(session))
        if chance.random() < 0.15:
            await asyncio.sleep(chance.random() * 0.4)
            start.cancel()
        try:
            live = await start
        except asyncio.CancelledError:
            ends["given up"] += 1
        except RunnerError as error:
            ends[error.code] += 1
        else:
            ends["started"] += 1
            if chance.random() < 0.6:
                # One after the other over all lanes: each kind comes, whatever the rounds before came to.
                scenario = DURING[sum(ends[name] for name in DURING) % len(DURING)]
                emulator.scenario(scenario, sandbox=house.name(session))
                ends[scenario] += 1
            if chance.random() < 0.3:
                house.park(live)
                ends["parked"] += 1
            else:
                await house.end(live)
        emulator.scenario("restored")
        await house.agrees(f"lane {seed}, round {number}", session)
        if chance.random() < 0.1:
            await house.remove(session)


async def test_a_hundred_faulty_rounds(daytona_emulator: EmulatorProcess) -> None:
    """Cases C7, C8, D9: whatever went wrong, what the service has is what the pool holds; nothing is left over."""
    house, ends = House(daytona_emulator, orphan_seconds=1.0), Counter[str]()
    await asyncio.gather(*(lane(house, seed, ends) for seed in range(LANES)))
    await house.agrees("at the end")
    assert sum(ends[end] for end in ("started", "given up", *CODES)) == LANES * ROUNDS, ends
    assert ends["started"] > LANES * ROUNDS / 2 and all(ends[name] for name in DURING), ends
    for key in [*house.pool.book.seats, *house.pool.asleep]:
        await house.remove(key[1])
    await bed.until(lambda: house.there() == house.held() == {})
    await house.close()
    assert daytona_emulator.state()["processes"] == []
