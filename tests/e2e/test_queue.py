"""Prompts that wait in one session, over HTTP with real processes: queued, steered, aborted, stopped, restarted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from runner.client import ApiError, Client
from tests.agents import AgentScript, Gate, directive, steps
from tests.e2e.conftest import Scripted, Serve, scripted_talk
from tests.e2e.server import SECONDS
from tests.e2e.talk import Dispatched, Talk, gone


def holding(script: AgentScript, gate: Gate) -> AgentScript:
    """Its first frame is answered once the gate is open, each later one at once."""
    return script.on_prompt(steps.text("a1"), steps.gate(gate), steps.reply()).on_prompt(
        steps.text("next"), steps.reply()
    )


def frames(script: AgentScript) -> list[list[str]]:
    """The texts of each prompt frame that the session's agents received, by their own logs."""
    sent = script.log.frames("session/prompt")
    return [[block.get("text", "") for block in frame["params"]["prompt"]] for frame in sent]


def queued(talk: Talk, name: str, **fields: Any) -> Dispatched:
    """A prompt that is called by its text, and waits."""
    return talk.dispatch(name, **{"prompt_id": name, "on_busy": "queue", **fields})


async def waiting(talk: Talk, *names: str, **fields: Any) -> list[Dispatched]:
    """They wait in this order."""
    turns = []
    for position, name in enumerate(names, 1):
        turns.append(queued(talk, name, **fields))
        assert await turns[-1].event("turn_queued") == {"prompt_id": name, "position": position}
    return turns


async def active(talk: Talk, script: AgentScript, gate: Gate, *names: str, **fields: Any) -> list[Dispatched]:
    """A is with the agent, the others wait."""
    holding(script, gate)
    first = queued(talk, "A", **fields)
    await gate.reached(SECONDS)
    return [first, *await waiting(talk, *names, **fields)]


async def ended(talk: Talk) -> dict[str, str]:
    """What became of each prompt: told once."""
    told = [record["data"] for record in await talk.records() if record["type"] == "prompt_ended"]
    states = {data["prompt_id"]: data["state"] for data in told}
    assert len(told) == len(states), told
    return states


async def periods(talk: Talk) -> list[str]:
    """Beginnings and ends of busy periods."""
    return [record["type"] for record in await talk.records() if record["type"] in ("session_busy", "session_idle")]


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


async def test_what_waits_runs_behind_what_runs(scripted: Scripted, gate: Gate, client: Client) -> None:
    """Two wait: one turn takes both, the older one is absorbed by the newer; the session is idle once."""
    talk, script = scripted()
    first, second, third = await active(talk, script, gate, "B", "C")
    listed = await client.prompts(talk.session)
    shown = [{"prompt_id": name, "state": "queued", "position": place} for place, name in enumerate("BC", 1)]
    assert (listed["items"], listed["active"], (await talk.view())["queue"]) == (shown, "A", shown)
    gate.open()
    results = [await turn.result() for turn in (first, second, third)]
    assert [(result["outcome"], result["text"]) for result in results] == [
        ("completed", "a1"),
        ("absorbed", ""),
        ("completed", "next"),
    ]
    assert (results[1]["absorbed_by"], results[2]["prompt_ids"], results[2]["start"]) == ("C", ["B", "C"], "hit")
    assert frames(script) == [["A"], ["B", "C"]]
    await talk.idle()
    assert await ended(talk) == {"A": "done", "B": "absorbed", "C": "done"}
    assert await periods(talk) == ["session_busy", "session_idle"]


async def test_one_at_a_time(scripted: Scripted, gate: Gate) -> None:
    talk, script = scripted()
    turns = await active(talk, script, gate, "B", "C", queue_mode="fifo")
    gate.open()
    assert [(await turn.result())["text"] for turn in turns] == ["a1", "next", "next"]
    assert frames(script) == [["A"], ["B"], ["C"]]
    assert await periods(talk) == ["session_busy", "session_idle"]


async def test_an_abort_stops_its_prompt_and_no_other(scripted: Scripted, gate: Gate, client: Client) -> None:
    """The queued one, the running one, both again: what came behind them runs to its end."""
    talk, script = scripted()
    first, second, third = await active(talk, script, gate, "B", "C")
    aborted = [await client.abort_prompt(talk.session, name) for name in ("B", "B", "A")]
    assert aborted == [True, False, True]
    assert (await second.result())["outcome"] == "cancelled"
    result = await first.result()
    assert (result["outcome"], result["text"], result["cancel_settled"]) == ("cancelled", "a1", True)
    assert (await third.result())["text"] == "next"
    assert [await client.abort_prompt(talk.session, name) for name in ("A", "B", "C", "nobody")] == [False] * 4
    assert frames(script) == [["A"], ["C"]]
    assert len(script.log.frames("session/cancel")) == 1
    await talk.idle()
    assert await ended(talk) == {"A": "aborted", "B": "cancelled", "C": "done"}
    assert await periods(talk) == ["session_busy", "session_idle"]


async def test_a_steering_prompt_takes_what_waits_along(scripted: Scripted, gate: Gate) -> None:
    talk, script = scripted()
    first, second = await active(talk, script, gate, "B")
    steering = queued(talk, "X", on_busy="steer")
    assert (await first.result())["outcome"] == "cancelled"
    assert [(await turn.result())["outcome"] for turn in (second, steering)] == ["absorbed", "completed"]
    assert frames(script) == [["A"], ["B", "X"]]
    assert await ended(talk) == {"A": "aborted", "B": "absorbed", "X": "done"}


@pytest.mark.parametrize("queue", ["cancel", "keep"])
async def test_a_stop_and_the_queue(scripted: Scripted, gate: Gate, client: Client, queue: str) -> None:
    """Everything that waits is cancelled with what runs, unless it is to be kept: then it runs by itself."""
    talk, script = scripted()
    first, second = await active(talk, script, gate, "B")
    more = {"queue": "keep"} if queue == "keep" else {}
    reply = await client.cancel(talk.session, wait_seconds=SECONDS, **more)
    assert (reply["outcome"], reply["cancelled_prompts"]) == ("stopped", [] if more else ["B"])
    assert (await first.result())["outcome"] == "cancelled"
    assert (await second.result())["outcome"] == ("completed" if more else "cancelled")
    await talk.idle()
    assert await ended(talk) == {"A": "aborted", "B": "done" if more else "cancelled"}
    assert frames(script) == [["A"], ["B"]] if more else [["A"]]
    assert await periods(talk) == ["session_busy", "session_idle"]


async def test_a_client_that_leaves_takes_nothing_along(scripted: Scripted, gate: Gate, client: Client) -> None:
    """A queued prompt outlives its connection; its id finds the stored result, and other content is refused."""
    talk, script = scripted()
    first, second = await active(talk, script, gate, "B")
    behind = await client.submit(talk.session, "C", **talk.fields, prompt_id="C", on_busy="queue")
    assert behind == {"prompt_id": "C", "state": "queued"} | {
        name: behind[name] for name in behind if name == "turn_id"
    }
    await second.drop()
    gate.open()
    await first.result()
    assert (await talk.prompt("C", prompt_id="C", on_busy="queue"))["prompt_ids"] == ["B", "C"]
    assert (await talk.prompt("B", prompt_id="B", on_busy="queue"))["absorbed_by"] == "C"
    assert (await talk.refused("other", prompt_id="B", on_busy="queue")).code == "prompt_conflict"
    assert frames(script) == [["A"], ["B", "C"]]


async def test_what_is_only_told_leads_the_next_frame(scripted: Scripted, gate: Gate, client: Client) -> None:
    talk, script = scripted()
    [first] = await active(talk, script, gate)
    stored = await client._call(
        "POST", f"/v1/sessions/{talk.session}/turns", {"prompt": "X", "prompt_id": "X", "context_only": True}
    )
    assert stored == {"prompt_id": "X", "state": "stored"}
    assert await client.abort_prompt(talk.session, "X") is False
    gate.open()
    assert (await first.result())["outcome"] == "completed"
    assert (await talk.prompt("B", prompt_id="B"))["ok"]
    assert frames(script) == [["A"], ["X", "B"]]
    assert await ended(talk) == {"A": "done", "B": "done"}


async def test_a_full_queue_is_refused_clearly(serve: Serve, tmp_path: Path, gate: Gate) -> None:
    server, script = serve("[prompts]\nmax_queued = 1\n"), AgentScript(tmp_path)
    async with server.client() as client:
        talk = scripted_talk(server, client, "s", script)
        turns = await active(talk, script, gate, "B")
        refused = await talk.refused("C", prompt_id="C", on_busy="queue")
        assert (refused.code, refused.status, refused.retryable) == ("queue_full", 429, True)
        gate.open()
        assert [(await turn.result())["outcome"] for turn in turns] == ["completed", "completed"]
        assert (await talk.prompt("C", prompt_id="C"))["ok"], "a refused id was never stored"
        await talk.check()


async def test_a_hung_agent_gives_way(serve: Serve, tmp_path: Path) -> None:
    """It does not hear the cancel: it is killed, and what waited runs once, by itself, in the next one."""
    server = serve(instead={"[turn]": "[turn]\nsettle_seconds = 1"})
    script = AgentScript(tmp_path).on_cancel()
    async with server.client() as client:
        talk = scripted_talk(server, client, "s", script)
        first = talk.dispatch(directive(steps.text("a1"), steps.hang()), prompt_id="A")
        await first.text("a1")
        hung = await talk.agent_pid()
        [second] = await waiting(talk, "B")
        assert [await client.abort_prompt("s", "A"), await client.abort_prompt("s", "A")] == [True, False]
        result = await first.result()
        assert (result["outcome"], result["cancel_settled"]) == ("cancelled", False)
        assert (await second.result())["outcome"] == "completed"
        assert await client.abort_prompt("s", "A") is False
        assert [frame[-1] for frame in frames(script)][1:] == ["B"]
        assert len(script.log.pids()) == 2
        await gone(hung, "the hung agent")
        assert await ended(talk) == {"A": "aborted", "B": "done"}
        await talk.check()


@pytest.mark.parametrize("mode", ["coalesce", "fifo"])
@pytest.mark.parametrize("how", ["kill -9", "SIGTERM"])
async def test_what_waits_outlives_the_runner(serve: Serve, tmp_path: Path, gate: Gate, how: str, mode: str) -> None:
    """It runs by itself behind the restart, once, without a client; what was with the agent is never sent again."""
    server, script = serve(), AgentScript(tmp_path)
    async with server.client() as client:
        talk = scripted_talk(server, client, "s", script)
        turns = await active(talk, script, gate, "B", "C", "D", queue_mode=mode, keep_on_disconnect=True)
        assert await client.abort_prompt("s", "C") is True
        if how == "kill -9":
            server.kill()
        else:
            await asyncio.to_thread(server.stop)
        for turn in turns:
            await turn.drop()
    gate.path.touch()
    server.start()
    async with server.client() as client:
        talk = scripted_talk(server, client, "s", script)
        await until_ended(talk, "ABCD")
        absorbed = "absorbed" if mode == "coalesce" else "done"
        assert await ended(talk) == {"A": "failed", "B": absorbed, "C": "cancelled", "D": "done"}
        sent = [name for frame in frames(script) for name in frame if name in set("ABCD")]
        assert sent == ["A", "B", "D"]
        assert len(frames(script)) == (2 if mode == "coalesce" else 3)
        assert (await talk.prompt("D", prompt_id="D"))["outcome"] == "completed"
        assert [await client.abort_prompt("s", name) for name in "ABCD"] == [False] * 4
        assert (await talk.prompt("E", prompt_id="E"))["ok"]
        await talk.check()


async def until_ended(talk: Talk, names: str) -> None:
    """Wait until each has a terminal state."""

    async def over() -> bool:
        try:
            return set(names) <= set(await ended(talk))
        except ApiError as error:
            if not error.retryable:
                raise
            return False

    async with asyncio.timeout(SECONDS):
        while not await over():
            await asyncio.sleep(0.05)
    await talk.idle()
