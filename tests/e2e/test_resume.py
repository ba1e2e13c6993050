"""The next process of a session remembers: after a kill of the server, of the agent, and whatever a load brings."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.agents import SCRIPTED, AgentScript, steps
from tests.e2e.conftest import Serve
from tests.e2e.server import Server, until
from tests.e2e.talk import Talk

CONFIG = f"""
[harness.loading]
command = [{json.dumps(sys.executable)}, {json.dumps(str(SCRIPTED))}]
read = [{json.dumps(str(SCRIPTED.parent))}]
resume = "load"
"""
START = {"max_line_bytes": "start_seconds = 10\nmax_line_bytes"}


def messages(records: list[dict[str, Any]]) -> list[str]:
    return [record["data"]["text"] for record in records if record["type"] == "message"]


def notices(records: list[dict[str, Any]]) -> list[str]:
    kinds = [record["data"]["kind"] for record in records if record["type"] == "notice"]
    return [kind for kind in kinds if kind in ("resume_failed", "context_lost")]


async def killed(talk: Talk) -> int:
    """The idle agent is killed, and its seat is free; the pid that it had."""
    pid = await talk.kill_agent()
    await until(lambda: not talk.server.census(), "the seat is free")
    return pid


async def test_a_killed_server_costs_no_memory(serve: Serve) -> None:
    """Cases C5, L2, M6: kill -9 of the runner between two turns; its successor resumes at once, nothing comes twice.

    What the agent had written to the workspace is there: nothing that can start again was deleted.
    """
    server = serve()
    async with server.client() as client:
        talk = Talk(server, client, "s", harness="demo")
        assert (await talk.prompt("/write draft.txt not committed"))["ok"]
        before = await talk.records()
    server.kill()
    server.start()
    async with server.client() as client:
        talk = Talk(server, client, "s", harness="demo")
        result = await talk.prompt("two")
        assert (result["ok"], result["start"], result.get("context_lost")) == (True, "resumed", None)
        assert result["text"] == "You said: two (message 2 of this conversation)"
        assert result["timings"]["total_ms"] < 20_000
        records = await talk.records()
        assert records[: len(before)] == before
        assert len(messages(records)) == 2
        assert notices(records) == []
        kept = await talk.prompt("/read draft.txt")
        assert (kept["start"], kept["text"]) == ("hit", "not committed\n")
        await talk.check()


@pytest.mark.parametrize("turn", ["first", "second"])
async def test_a_server_killed_in_a_turn_costs_that_turn(serve: Serve, turn: str) -> None:
    """What the agent had kept is loaded; of a first turn it had kept nothing: then it is told."""
    server = serve()
    async with server.client() as client:
        talk = Talk(server, client, "s", harness="demo")
        if turn == "second":
            await talk.prompt("one")
        hanging = talk.dispatch("/hang")
        await hanging.event("user_message")
        path = server.state_dir / "homes" / "default" / "s" / "home" / ".demo-agent"
        assert path.exists() == (turn == "second")
        server.kill()
        await hanging.drop()
    server.start()
    async with server.client() as client:
        talk = Talk(server, client, "s", harness="demo")
        result = await talk.prompt("/told")
        if turn == "second":
            assert (result["start"], result["text"]) == ("resumed", "nothing was told")
        else:
            assert (result["start"], result["context_lost"]) == ("cold", True)
            assert "/hang" in result["text"]
            assert "This turn was cut off" in result["text"]
        await talk.check()


@pytest.fixture
def patient(serve: Serve, tmp_path: Path) -> Server:
    """A server whose agents have 10 s to start."""
    return serve(f"{CONFIG}write = [{json.dumps(str(tmp_path))}]\n", instead=START)


@pytest.mark.parametrize("manner", ["well", "flood 500", "fail", "empty", "crash", "hang", "silent"])
async def test_whatever_a_load_brings_the_turn_goes_on(patient: Server, manner: str) -> None:
    """Cases C5, G13, M6, M7, with a real process: kill the agent, and prompt again; what was replaced is told."""
    async with patient.client() as client:
        talk = Talk(patient, client, "s", harness="demo", limits={"first_update_seconds": 2})
        await talk.prompt("the first question")
        await talk.prompt(f"/on-load {manner}")
        pid = await killed(talk)
        result = await talk.prompt("and now")
        assert result["ok"], result.get("error")
        assert await talk.agent_pid() != pid
        records = await talk.records()
        if manner in ("well", "flood 500"):
            assert (result["start"], result["reason"]) == ("resumed", "agent_exited")
            assert result["text"] == "You said: and now (message 3 of this conversation)"
            assert notices(records) == []
        else:
            assert (result["start"], result["context_lost"]) == ("cold", True)
            assert result["text"] == "You said: and now (message 1 of this conversation)"
            assert notices(records) == ["resume_failed", "context_lost"]
            assert "the first question" in (await talk.prompt("/told"))["text"]
        assert not [text for text in messages(records) if "old" in text or "late" in text]
        assert len([record for record in records if record["type"] == "user_message"]) == 3
        await talk.check()


async def test_a_replay_with_questions_and_stragglers_is_not_shown(patient: Server, tmp_path: Path) -> None:
    """Case G13: 500 updates and a question before the answer to the load, three updates behind it."""
    late = [step for _ in range(3) for step in (steps.sleep(0.04), steps.text("late "))]
    script = AgentScript(tmp_path, "loads")
    script.on_load(steps.text("of old ", 500), steps.ask("old"), steps.reply_with(None), *late)
    async with patient.client() as client:
        talk = Talk(patient, client, "s", harness="loading", env=script.env)
        await talk.prompt("one")
        await killed(talk)
        turn = talk.dispatch("two")
        result = await turn.result()
        assert (result["start"], result["text"]) == ("resumed", "answer 1")
        assert turn.streamed == "answer 1"
        assert turn.of("interaction_requested") == []
        assert messages(await talk.records()) == ["answer 1", "answer 1"]
        await talk.check()


async def test_reconnecting_clients_cause_no_load_case_d3(patient: Server, tmp_path: Path) -> None:
    """20 clients, one after the other, on one live session: one process, no load."""
    script = AgentScript(tmp_path, "once")
    for _ in range(20):
        async with patient.client() as client:
            talk = Talk(patient, client, "s", harness="loading", env=script.env)
            assert (await talk.prompt("again", keep_on_disconnect=True))["ok"]
            assert len(patient.seats()) == 1
    methods = [frame.get("method") for frame in script.log.frames()]
    assert methods.count("session/prompt") == 20
    assert (methods.count("initialize"), methods.count("session/load")) == (1, 0)


async def test_a_killed_session_starts_cold(patient: Server) -> None:
    """DESIGN 3.7: kill destroys the seat, and nobody goes on with what its agent had become."""
    async with patient.client() as client:
        talk = Talk(patient, client, "s", harness="demo")
        await talk.prompt("one")
        hanging = talk.dispatch("/hang")
        await hanging.event("user_message")
        await client.kill("s")
        await hanging.result()
        await until(lambda: not patient.census(), "the seat is gone")
        result = await talk.prompt("two")
        assert (result["start"], result["context_lost"]) == ("cold", True)
        assert result["text"] == "You said: two (message 1 of this conversation)"
        await talk.check()


async def test_a_deleted_session_leaves_nothing_to_load(patient: Server) -> None:
    """DESIGN 3.7: workspace, home and the home's identity are gone."""
    async with patient.client() as client:
        talk = Talk(patient, client, "s", harness="demo")
        await talk.prompt("one")
        home = patient.state_dir / "homes" / "default" / "s"
        assert (home / "identity").read_text()
        await client.delete("s")
        assert not home.exists()
