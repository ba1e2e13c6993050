"""Turns in Daytona sandboxes: a real server, the real SDK, an emulated service (DESIGN 3.4, 3.5)."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from runner.clock import rfc3339
from tests.daytona_emulator.fixture import SECRET, EmulatorProcess
from tests.e2e.conftest import Serve
from tests.e2e.server import Server, until
from tests.e2e.talk import Talk


def config(emulator: EmulatorProcess, pool: str = "", *, orphan_seconds: int = 5, key: str = "") -> str:
    return f"""
[daytona]
api_url = {json.dumps(emulator.api_url)}
api_key = {json.dumps(key or emulator.api_key)}
python = {json.dumps(sys.executable)}
root = ""
orphan_seconds = {orphan_seconds}
[pool.daytona]
{pool}
"""


def states(emulator: EmulatorProcess) -> list[str]:
    boxes = emulator.sandboxes()
    return [box["state"] for box in boxes if box["state"] not in ("destroying", "destroyed")]


async def asleep(talk: Talk) -> dict[str, Any]:
    """The seat in the session's view, once it is asleep: its disk has an end."""
    async with asyncio.timeout(20):
        while (view := (await talk.view())["pool"])["state"] != "asleep":
            await asyncio.sleep(0.05)
    assert view["warm_until"] > rfc3339(int(time.time() * 1000) + 1_000_000)
    assert (view["start"], view["reason"]) == (None, "expired")
    return dict(view)


async def metrics(server: Server) -> str:
    request = urllib.request.Request(f"{server.url}/metrics", headers={"Authorization": f"Bearer {server.token}"})
    return await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=10).read().decode())


def talk_in(server: Server, client: object, session: str) -> Talk:
    return Talk(server, client, session, harness="demo", sandbox={"provider": "daytona"})  # type: ignore[arg-type]


async def test_a_stop_kills_the_turn_s_processes_and_not_the_agent(
    daytona_emulator: EmulatorProcess, serve: Serve
) -> None:
    """Cases D1, D4, remote: the seat stays warm, the next turn has its memory."""
    server = serve(config(daytona_emulator))
    async with server.client() as client:
        talk = talk_in(server, client, "s")
        assert (await talk.prompt("one"))["ok"]
        before = len(daytona_emulator.state()["processes"])
        running = talk.dispatch("/tool sleep 300")
        await running.event("tool_call")
        await until(lambda: len(daytona_emulator.state()["processes"]) > before, "the tool runs")
        assert (await talk.stop())["outcome"] == "stopped"
        assert (await running.result())["outcome"] == "cancelled"
        await until(lambda: len(daytona_emulator.state()["processes"]) == before, "nobody of the turn is left")
        again = await talk.prompt("two")
        assert (again["ok"], again["start"]) == (True, "hit")


async def test_a_lost_sandbox_fails_its_turn_and_the_next_one_works(
    daytona_emulator: EmulatorProcess, serve: Serve
) -> None:
    """Case C5: the service stops it in the middle of a turn; the disk, and so the memory, is kept."""
    server = serve(config(daytona_emulator))
    async with server.client() as client:
        talk = talk_in(server, client, "s")
        assert (await talk.prompt("one"))["ok"]
        running = talk.dispatch("/tool sleep 300")
        await running.event("tool_call")
        daytona_emulator.scenario("auto_stop", sandbox=daytona_emulator.sandboxes()[0]["name"])
        failed = await running.result()
        assert (failed["ok"], failed["outcome"], failed["error"]["code"]) == (False, "failed", "sandbox_lost")
        again = await talk.prompt("two")
        assert (again["ok"], again["start"]) == (True, "woken")


async def test_a_killed_runner_s_successor_goes_on_at_once(daytona_emulator: EmulatorProcess, serve: Serve) -> None:
    """Case D2, remote: the old agent still waits for its runner; it is gone before the new one has its home."""
    server = serve(config(daytona_emulator, orphan_seconds=60))
    async with server.client() as client:
        assert (await talk_in(server, client, "s").prompt("one"))["ok"]
    before = daytona_emulator.state()["processes"]
    server.kill()
    assert before
    server.start()
    async with server.client() as client:
        again = await talk_in(server, client, "s").prompt("two")
        assert (again["ok"], again["start"]) == (True, "woken")
        assert again["text"] == "You said: two (message 2 of this conversation)"
        now = daytona_emulator.state()["processes"]
        assert len(now) == len(before) and not {*now} & {*before}


async def test_a_killed_runner_leaves_nothing_running(daytona_emulator: EmulatorProcess, serve: Serve) -> None:
    """Case C3: its agent ends by itself, the next runner stops the empty sandbox, the disk has an end."""
    server = serve(config(daytona_emulator, "disk_seconds = 20", orphan_seconds=2))
    async with server.client() as client:
        assert (await talk_in(server, client, "s").prompt("one"))["ok"]
    server.kill()
    await until(lambda: daytona_emulator.state()["processes"] == [], "the orphan is gone")
    assert states(daytona_emulator) == ["started"]
    server.start()
    await until(lambda: states(daytona_emulator) == ["stopped"], "the next runner stopped it")
    async with server.client() as client:
        assert [seat["state"] for seat in (await client.pool())["items"]] in ([], ["asleep"])
    server.stop()
    daytona_emulator.advance(180)
    assert states(daytona_emulator) == []


async def test_a_session_that_was_never_there_is_deleted_without_a_question(
    daytona_emulator: EmulatorProcess, serve: Serve
) -> None:
    server = serve(config(daytona_emulator))
    async with server.client() as client:
        assert (await Talk(server, client, "s", harness="demo").prompt("one"))["ok"]
        await client.delete("s")
    assert [one for one in daytona_emulator.exchanges() if one["path"].startswith("/api/sandbox/")] == []


async def test_a_key_that_is_refused_is_told(daytona_emulator: EmulatorProcess, serve: Serve) -> None:
    """By the turn, by health and by readiness; what needs no key goes on."""
    server = serve(config(daytona_emulator, key="another"))
    async with server.client() as client:
        failed = await talk_in(server, client, "s").prompt("one")
        assert failed["error"]["code"] == "sandbox_start_failed"
        for told in (await client.health(), await client.ready()):
            here, remote = told["providers"]
            assert (here["name"], here["available"], here["running"]) == ("local", True, 0)
            assert (remote["name"], remote["available"], remote["running"]) == ("daytona", False, 0)
            assert "refuses the API key" in remote["reason"]
        assert "acp_runner_daytona_available 0.0" in await metrics(server)
        assert (await Talk(server, client, "t", harness="demo").prompt("one"))["ok"]


async def test_what_is_not_set_up_is_refused_by_name(serve: Serve) -> None:
    server = serve()
    async with server.client() as client:
        refusal = await talk_in(server, client, "s").refused("one")
        assert (refusal.code, "sandbox.provider" in str(refusal)) == ("invalid_request", True)


async def test_a_secret_of_a_dispatch_stays_at_the_service(daytona_emulator: EmulatorProcess, serve: Serve) -> None:
    """The agent sees a placeholder; neither its environment nor its files hold the value."""
    server = serve(config(daytona_emulator))
    async with server.client() as client:
        talk = talk_in(server, client, "s")
        said = await talk.prompt("/env MY_KEY", secrets={"MY_KEY": SECRET})
        assert "dtn_secret_" in said["text"]
        assert seen(daytona_emulator, SECRET.encode()) == []


def seen(emulator: EmulatorProcess, text: bytes) -> list[str]:
    """Where a text lies in the environments and on the disks of the sandboxes."""
    state = emulator.state()
    places = [Path(f"/proc/{pid}/environ") for pid in state["processes"]]
    for box in state["sandboxes"]:
        places += [path for path in Path(box["home"]).rglob("*") if path.is_file()]
    assert places
    return [str(path) for path in places if text in path.read_bytes()]


async def test_a_question_is_answered_in_a_sandbox_over_there(daytona_emulator: EmulatorProcess, serve: Serve) -> None:
    """Paused with its agent, then asleep behind the window: the answer counts both times."""
    server = serve(config(daytona_emulator, "approval_seconds = 2"))
    async with server.client() as client:
        talk = talk_in(server, client, "s")
        assert (await talk.prompt("/ask echo one"))["outcome"] == "paused"
        (question,) = await talk.questions()
        await client.answer("s", question["interaction_id"], decision="allow")
        assert (await talk.idle())["last_turn"]["outcome"] == "completed"
        assert (await talk.prompt("/ask echo two"))["outcome"] == "paused"
        await until(lambda: states(daytona_emulator) == ["stopped"], "it sleeps with its question")
        (question,) = await talk.questions()
        await client.answer("s", question["interaction_id"], decision="allow")
        view = await talk.idle()
        assert (view["last_turn"]["outcome"], view["pool"]["start"]) == ("completed", "woken")
