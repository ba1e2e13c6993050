"""Codex and Claude Code as spares: a first turn is served at once, and a later process remembers where it was."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.e2e.server import Server, until
from tests.e2e.talk import Talk
from tests.e2e.test_spares import places, ready, workspace
from tests.harness_fixture import REAL_HARNESSES, InstalledHarnesses, model_variables
from tests.model_server import ModelServer

CONFIG = """[credentials]
hosts = ["127.0.0.1"]
[secrets]
SHARED = "key-of-the-operator"
[pool]
spares = 1
idle_seconds = 2
"""


@pytest.fixture
async def model() -> AsyncIterator[ModelServer]:
    async with ModelServer() as model:
        yield model


@pytest.mark.parametrize("name", REAL_HARNESSES)
async def test_a_real_agent_serves_as_a_spare_and_is_resumed_where_it_was(
    tmp_path: Path, installed_harnesses: InstalledHarnesses, model: ModelServer, name: str
) -> None:
    """Case M6: the agent's own files name the place that the session took over."""
    variables = model_variables(name, model)
    keys = [variable for variable in variables if variable.endswith("_KEY")]
    urls = {variable: value for variable, value in variables.items() if variable.endswith("_URL")}
    server = Server(tmp_path / "own", CONFIG, env=urls)
    installed_harnesses.link_into(server.state_dir)
    server.start()
    try:
        async with server.client() as client:
            fields = {"harness": name, "secrets": {key: {"ref": "SHARED"} for key in keys}}
            first = Talk(server, client, "first", **fields, permissions={"default": "allow"})
            assert (await first.prompt("[[text:warm]]"))["start"] == "cold"
            (spare,) = await ready(client)
            talk = Talk(server, client, "s", **fields, permissions={"default": "allow"})
            result = await talk.prompt("[[shell:echo mine > work.txt]]")
            assert (result["ok"], result["start"]) == (True, "spare"), result
            assert (workspace(server, spare["spare_id"]) / "work.txt").read_text() == "mine\n"
            assert (await talk.view())["proxied_keys"] == keys
            await until(lambda: spare["seat_id"] not in server.seats(), "the seat expired")
            again = await talk.prompt("[[shell:cat work.txt]]")
            assert (again["ok"], again["start"], again.get("context_lost")) == (True, "resumed", None), again
            assert "echo mine" in " ".join(model.turns[-1].user_texts), "what was said to the spare"
            await client.delete("s")
            assert spare["spare_id"] not in places(server)
    finally:
        server.stop()
