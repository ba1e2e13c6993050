"""Turns in Daytona sandboxes: a real server, the real SDK, an emulated service (DESIGN 3.4, 3.5)."""

from __future__ import annotations

import json
import sys

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


async def test_a_session_s_life(serve: Serve, daytona_emulator: EmulatorProcess) -> None:
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
