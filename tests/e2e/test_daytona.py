"""Turns in Daytona sandboxes: a real server, the real SDK, an emulated service (DESIGN 3.4, 3.5)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.daytona_emulator.fixture import EmulatorProcess
from tests.e2e.conftest import Serve
from tests.e2e.server import Server, until
from tests.e2e.talk import Talk


def config(emulator: EmulatorProcess, pool: str = "") -> str:
    return f"""
[daytona]
api_url = {json.dumps(emulator.api_url)}
api_key = {json.dumps(emulator.api_key)}
python = {json.dumps(sys.executable)}
root = ""
orphan_seconds = 5
[pool.daytona]
{pool}
"""


def states(emulator: EmulatorProcess) -> list[str]:
    boxes = emulator.state()["sandboxes"]
    return [box["state"] for box in boxes if box["state"] not in ("destroying", "destroyed")]


def talk_in(server: Server, client: object, session: str) -> Talk:
    return Talk(server, client, session, harness="demo", sandbox={"provider": "daytona"})  # type: ignore[arg-type]


async def test_a_session_s_life(daytona_emulator: EmulatorProcess, serve: Serve) -> None:
    """Created, warm, asleep at the end of the window, woken with its memory, deleted with the session (C3, I5)."""
    server = serve(config(daytona_emulator, "idle_seconds = 1"))
    async with server.client() as client:
        talk = talk_in(server, client, "s")
        first = await talk.prompt("/write kept.txt hello")
        assert (first["ok"], first["start"]) == (True, "cold")
        assert (await talk.prompt("two"))["start"] == "hit"
        assert states(daytona_emulator) == ["started"]
        await until(lambda: states(daytona_emulator) == ["stopped"], "it sleeps")
        woken = await talk.prompt("three")
        assert (woken["ok"], woken["start"], woken.get("context_lost")) == (True, "woken", None)
        assert woken["text"] == "You said: three (message 3 of this conversation)"
        await client.delete("s")
        await until(lambda: states(daytona_emulator) == [], "it is deleted")


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
        daytona_emulator.scenario("auto_stop", sandbox=daytona_emulator.state()["sandboxes"][0]["name"])
        failed = await running.result()
        assert (failed["ok"], failed["outcome"]) == (False, "failed")
        again = await talk.prompt("two")
        assert (again["ok"], again["start"]) == (True, "woken")


async def test_a_killed_runner_leaves_no_agent_and_its_successor_goes_on(
    daytona_emulator: EmulatorProcess, serve: Serve
) -> None:
    """Case C3: nobody resumes the link, so the cell is torn down; the disk waits for the next runner."""
    server = serve(config(daytona_emulator))
    async with server.client() as client:
        assert (await talk_in(server, client, "s").prompt("one"))["ok"]
    server.kill()
    await until(lambda: daytona_emulator.state()["processes"] == [], "the orphan is gone")
    server.start()
    async with server.client() as client:
        again = await talk_in(server, client, "s").prompt("two")
        assert (again["ok"], again["start"]) == (True, "resumed")
        assert again["text"] == "You said: two (message 2 of this conversation)"


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
        said = await talk.prompt("/env MY_KEY", secrets={"MY_KEY": "marker-5ecret"})
        assert "dtn_secret_" in said["text"]
        assert seen(daytona_emulator, b"marker-5ecret") == []


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
