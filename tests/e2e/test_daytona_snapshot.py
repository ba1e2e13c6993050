"""A turn in a sandbox of a snapshot that was built by the recipe: the whole way, from the build to the answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.assembly import snapshots
from runner.clock import SystemClock
from runner.harness.catalogue import Catalogue
from runner.sandbox.bridge_files import bridge_digest
from tests.daytona_emulator.fixture import EmulatorProcess
from tests.e2e.conftest import Serve
from tests.e2e.talk import Talk
from tests.sandbox import image_bed


@pytest.mark.timeout(120)
async def test_the_baked_agent_answers_over_the_baked_bridge(
    daytona_emulator: EmulatorProcess, serve: Serve, tmp_path: Path
) -> None:
    """As the image's own user, who cannot change the programs; a recipe of its own has its own snapshot."""
    root = tmp_path / "image" / "acp-runner"
    path = image_bed.programs(tmp_path / "bin")
    daytona_emulator.scenario("run_builds", path=path, writable=str(root.parent))
    known = Catalogue.build({}, tmp_path / "state")
    made, _ = await snapshots.build(image_bed.settings(daytona_emulator, root), known, SystemClock(), lambda line: None)
    members = {"api_url": daytona_emulator.api_url, "api_key": daytona_emulator.api_key, "root": str(root)}
    lines = [f"{name} = {json.dumps(value)}" for name, value in members.items()]
    config = "\n".join(["[daytona]", *lines, "[daytona.snapshots]", f'agents = "{made.name}"', 'gone = "nowhere"', ""])
    server = serve(config)
    async with server.client() as client:

        def talk(session: str, recipe: str) -> Talk:
            sandbox = {"provider": "daytona", "recipe": recipe}
            return Talk(server, client, session, harness="demo", sandbox=sandbox)

        first = await talk("s1", "agents").prompt("/tool id -u > $HOME/mine", permissions={"default": "allow"})
        assert first["ok"], first
        (box,) = daytona_emulator.state()["sandboxes"]
        assert box["labels"]["acp-runner-recipe"] == "agents"
        home = Path(box["home"]) / "acp-runner"
        assert (home / "home/mine").read_text() == "1000\n"
        assert list((home / f"bridge-{bridge_digest()}").iterdir()) == []

        assert "is another version's" not in server.log.read_text()
        (root / "content").write_text("of an earlier version")
        await client.write_file("s1", "given.txt", b"given")
        other = await talk("s1", "default").prompt("hello")
        assert other["error"]["code"] == "invalid_request"
        assert "the session's disk is made of agents" in other["error"]["message"]
        assert await client.read_file("s1", "given.txt") == b"given"
        again = await talk("s1", "agents").prompt("hello")
        assert again["ok"], again
        assert "its snapshot is another version's: acp-runner snapshot build" in server.log.read_text()

        missing = await talk("s2", "gone").prompt("hello")
        assert missing["error"]["code"] == "sandbox_start_failed"
        assert "Snapshot nowhere not found" in missing["error"]["message"]
        unknown = await talk("s3", "unheard").refused()
        assert (unknown.status, unknown.code) == (422, "recipe_unknown")
        assert "known: agents, default, gone" in unknown.message
