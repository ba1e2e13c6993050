"""Spares of a real server: real cells, kills, drains, and what is left on the disk."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from runner.client import Client
from tests.e2e.conftest import Serve
from tests.e2e.server import SECONDS, Server, until
from tests.e2e.talk import Talk, gone

SPARES = '[pool]\nspares = 1\nspare_harnesses = ["demo"]\n'


def places(server: Server) -> set[str]:
    """Spares that have a directory."""
    roots = [server.state_dir / folder / ".spares" for folder in ("workspaces", "homes")]
    return {path.name for root in roots if root.is_dir() for path in root.iterdir()}


def workspace(server: Server, spare_id: str) -> Path:
    return server.state_dir / "workspaces" / ".spares" / spare_id


async def ready(client: Client, count: int = 1) -> list[dict[str, Any]]:
    """Wait until so many spares can be claimed; they."""
    async with asyncio.timeout(SECONDS):
        while True:
            spares = (await client.pool())["spares"]
            if len(spares) == count and all(spare["state"] == "ready" for spare in spares):
                return list(spares)
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("level", ["cell", "landlock", "none"])
async def test_a_session_adopts_a_spare_and_keeps_its_place_over_a_kill(serve: Serve, level: str) -> None:
    """Cases C2 and M1, at every level of isolation: the session's files are where its first turn left them."""
    server = serve(SPARES, env={"ACP_RUNNER_LOCAL__ISOLATION": level})
    async with server.client() as client:
        (spare,) = await ready(client)
        talk = Talk(server, client, "s", harness="demo")
        result = await talk.prompt("/write work.txt mine")
        assert (result["ok"], result["start"], result["reason"]) == (True, "spare", "miss"), result
        assert await talk.agent_pid() == spare["agent_pid"]
        assert (workspace(server, spare["spare_id"]) / "work.txt").read_text() == "mine\n"
        assert (await client.shell("s", "pwd; cat work.txt"))["output"].split()[1] == "mine"
        assert (await talk.prompt("again"))["start"] == "hit"
        (other,) = await ready(client)
        assert other["spare_id"] != spare["spare_id"]
        assert places(server) == {spare["spare_id"], other["spare_id"]}
        server.kill()
        server.assert_nobody()
    server.start()
    async with server.client() as client:
        assert other["spare_id"] not in places(server)
        talk = Talk(server, client, "s", harness="demo")
        assert (await client.shell("s", "cat work.txt"))["output"] == "mine\n"
        result = await talk.prompt("and again")
        assert (result["ok"], result["start"]) == (True, "hit"), result
        await talk.check()
        assert not server.workspace("s").exists()
        await client.delete("s")
        assert spare["spare_id"] not in places(server)


async def test_a_spare_is_never_handed_to_two_and_serves_no_neighbour(serve: Serve) -> None:
    """Cases J1 and B2: eight first turns at once, and nobody finds anything of another."""
    server = serve(SPARES)
    async with server.client() as client:
        await ready(client)
        talks = [Talk(server, client, f"s{number}", harness="demo") for number in range(8)]
        results = await asyncio.gather(*(talk.prompt(f"/write who.txt {talk.session}") for talk in talks))
        assert sorted(result["start"] for result in results) == ["cold"] * 7 + ["spare"]
        seen = await asyncio.gather(*(client.shell(talk.session, "ls -A; cat who.txt") for talk in talks))
        assert [reply["output"].split() for reply in seen] == [["who.txt", talk.session] for talk in talks]
        state = server.state_dir
        look = f"ls -A {state}/workspaces/.spares {state}/workspaces/default 2>/dev/null | grep -c who"
        assert {reply["output"] for reply in [await client.shell(talk.session, look) for talk in talks]} == {"0\n"}
        for talk in talks:
            await talk.check()


async def test_a_kill_while_a_spare_starts_leaves_nothing_case_d1(serve: Serve) -> None:
    """Case D1: no process, and at the next start no directory."""
    server = serve(SPARES.replace("spares = 1", "spares = 3"))
    async with server.client() as client:
        await until(lambda: places(server), "a spare is under way")
        server.kill()
        server.assert_nobody()
    left = places(server)
    assert left
    server.start()
    async with server.client() as client:
        spares = await ready(client, 3)
        assert places(server) == {spare["spare_id"] for spare in spares}
        assert not left & places(server)
        server.terminate()
        assert await asyncio.to_thread(server.exit_code) == 0
    server.assert_nobody()
    assert places(server) == set()


async def test_an_agent_that_dies_as_a_spare_is_replaced_and_a_turn_gives_way_to_nobody(serve: Serve) -> None:
    """Case D2 for spares; with one seat a turn with variables of its own takes the spare's place."""
    server = serve(SPARES + "max_seats = 1\nidle_seconds = 0.2\n")
    async with server.client() as client:
        (spare,) = await ready(client)
        talk = Talk(server, client, "s", harness="demo", env={"A": "1"})
        result = await talk.prompt("hi")
        assert (result["ok"], result["start"]) == (True, "cold"), result
        await gone(spare["agent_pid"], "the spare's agent")
        (second,) = await ready(client)
        assert places(server) == {second["spare_id"]}
        assert (await Talk(server, client, "t", harness="demo").prompt("hi"))["start"] == "spare"


def adopted(server: Server) -> dict[str, str]:
    """Session to the place that its row names, as far as it is there."""
    store = sqlite3.connect(f"file:{server.state_dir / 'store.sqlite3'}?mode=ro", uri=True)
    try:
        rows = store.execute("SELECT session_id, agent_state FROM sessions").fetchall()
    finally:
        store.close()
    named = {session: json.loads(state).get("place") for session, state in rows}
    return {session: place["spare"] for session, place in named.items() if place is not None}


async def test_kills_in_the_middle_of_claims_leave_no_orphan_and_lose_no_file(serve: Serve) -> None:
    """Cases C3, M1 and D1: what a turn said was written is there, and no directory that nobody has."""
    server = serve(SPARES.replace("spares = 1", "spares = 3"))
    written: set[str] = set()
    for number in range(8):
        async with server.client() as client:
            await ready(client, 3)
            names = [f"s{number}-{one}" for one in range(3)]
            turns = [Talk(server, client, name, harness="demo").dispatch(f"/write work.txt {name}") for name in names]
            await asyncio.sleep(0.004 * number)
            server.kill()
            over = await asyncio.gather(*(turn.result() for turn in turns), return_exceptions=True)
            written |= {name for name, one in zip(names, over, strict=True) if isinstance(one, dict) and one["ok"]}
        server.assert_nobody()
        server.start()
        async with server.client() as client:
            spares = {spare["spare_id"] for spare in await ready(client, 3)}
            assert places(server) - spares <= set(adopted(server).values())
    assert written
    assert written <= adopted(server).keys()
    async with server.client() as client:
        for name, place in adopted(server).items():
            assert (workspace(server, place) / "work.txt").exists() or name not in written
        for name in written:
            assert (await client.shell(name, "cat work.txt"))["output"] == f"{name}\n"
