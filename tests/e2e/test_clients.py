"""What clients do: at once, twice, gone in the middle, not reading; over HTTP against the real server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from runner.client import ApiError, Client
from tests.agents import AgentScript, Gate, directive, steps
from tests.e2e.conftest import Scripted, Serve, scripted_talk
from tests.e2e.raw import RawClient
from tests.e2e.server import SECONDS, Server
from tests.e2e.talk import Dispatched, Talk

IN_USE = "Another turn is already running in this session. Your message was not sent."
POLITE = directive(steps.text("next"), steps.reply())
MIB = 1024 * 1024


async def works(talk: Talk, start: str) -> None:
    result = await talk.prompt(POLITE)
    assert (result["ok"], result["text"], result["start"]) == (True, "next", start), result


def body(talk: Talk, prompt: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, **talk.fields, **fields}


def turns_path(talk: Talk) -> str:
    return f"/v1/sessions/{talk.session}/turns"


def shape(line: dict[str, Any]) -> tuple[str, Any]:
    return line["type"], line["data"]


# -- at once -----------------------------------------------------------------------------------------------------------


async def test_of_many_at_once_exactly_one_is_admitted(scripted: Scripted, tmp_path: Path) -> None:
    """Cases B1 and B2: refused at once with one sentence; nothing of them is kept, the running turn does not notice."""
    talk, script = scripted()
    gate = Gate(tmp_path / "gate")
    script.on_prompt(steps.text("one "), steps.gate(gate), steps.text("two"), steps.reply())
    turns = [talk.dispatch(f"prompt {n}", prompt_id=f"p{n}") for n in range(8)]
    await gate.reached()
    async with asyncio.timeout(SECONDS):
        while sum(turn.over for turn in turns) < 7:
            await asyncio.sleep(0.01)
    (admitted,) = [turn for turn in turns if not turn.over]
    for turn in turns:
        if turn is not admitted:
            await refused_as_in_use(turn)
    before = await talk.agent_pid()
    gate.open()
    result = await admitted.result()
    assert (result["ok"], result["text"], admitted.streamed) == (True, "one two", "one two")
    assert len(script.log.prompts()) == 1
    records = await talk.records()
    assert [record["type"] for record in records].count("turn_admitted") == 1
    refused = next(f"p{n}" for n in range(8) if f"p{n}" not in result["prompt_ids"])
    again = await talk.prompt(POLITE, prompt_id=refused)
    assert (again["ok"], again["start"]) == (True, "hit")
    assert await talk.agent_pid() == before


async def refused_as_in_use(turn: Dispatched) -> None:
    result = await turn.result()
    assert (result["ok"], result["outcome"], result["turn_id"]) == (False, "failed", None)
    assert (result["error"]["code"], result["error"]["message"]) == ("session_turn_in_use", IN_USE)
    assert [(event["type"], event["data"]["message"]) for event in turn.events] == [("error", IN_USE)]
    assert "cursor" not in turn.events[0] or turn.events[0]["cursor"] is None


async def test_a_full_server_refuses_turns_but_no_commands(serve: Serve, tmp_path: Path) -> None:
    """Case A13 and DESIGN 3.1.9: 429 with Retry-After; Stop, answers, kill, health and reads work."""
    server = serve("[server]\nmax_turns = 2\n")
    script = AgentScript(tmp_path).on_prompt(steps.text("hm"), steps.hang())
    asking = directive(steps.tool("call-1", "in_progress"), steps.ask(allowed=[steps.text("did")]), steps.reply())
    async with server.client() as client:
        one, two, three = (scripted_talk(server, client, name, script) for name in ("one", "two", "three"))
        assert (await three.prompt(asking))["outcome"] == "paused"
        turns = [one.dispatch("hang"), two.dispatch("hang")]
        for turn in turns:
            await turn.text("hm")
        assert await refused_for_now(server, three) == (429, "runner_at_capacity")
        assert (await client.ready())["capacity"] == {"turns": 2, "max_turns": 2}
        assert (await client.health())["status"] == "ok"
        (question,) = await three.questions()
        assert (await client.answer("three", question["interaction_id"], decision="allow"))["status"] == "consumed"
        await three.idle()
        assert (await one.stop())["outcome"] == "stopped"
        await client.kill("two")
        assert [(await turn.result())["outcome"] for turn in turns] == ["cancelled", "cancelled"]
        await works(one, "hit")
        await works(two, "cold")
        await works(three, "hit")
        for talk in (one, two, three):
            await talk.check()


async def refused_for_now(server: Server, talk: Talk) -> tuple[int, str]:
    """Status and code of a refusal that says when to come again."""
    raw = RawClient(server)
    await raw.connect()
    await raw.send(raw.request("POST", turns_path(talk), body(talk, "hi"), Connection="close"))
    await raw.read_to_end()
    raw.close()
    head, _, content = raw.got.partition(b"\r\n\r\n")
    assert b"\r\nretry-after: 1" in head.lower()
    return int(head.split()[1]), json.loads(content)["code"]


# -- twice -------------------------------------------------------------------------------------------------------------


async def test_a_retry_behind_a_dropped_connection_attaches(scripted: Scripted, server: Server, tmp_path: Path) -> None:
    """Case B5: the request was sent whole, no byte of an answer was read; one run, one user message, all its events."""
    talk, script = scripted()
    gate = Gate(tmp_path / "gate")
    script.on_prompt(steps.text("one "), steps.gate(gate), steps.text("two"), steps.reply())
    raw = RawClient(server)
    await raw.connect()
    await raw.send(raw.request("POST", turns_path(talk), body(talk, "hello", prompt_id="p")))
    await gate.reached()
    raw.close(reset=True)
    running = talk.dispatch("hello", prompt_id="p")
    other = await talk.refused("something else", prompt_id="p")
    assert (other.status, other.code) == (409, "prompt_conflict")
    await running.text("one ")
    gate.open()
    result = await running.result()
    assert (result["ok"], result["text"], running.streamed) == (True, "one two", "one two")
    stored = talk.dispatch("hello", prompt_id="p")
    assert await stored.result() == result
    assert [shape(event) for event in stored.events if event["type"] != "message_delta"] == [
        shape(event) for event in running.events if event["type"] != "message_delta"
    ]
    assert script.log.prompts() == ["hello"]
    assert [record["type"] for record in await talk.records()].count("user_message") == 1


# -- gone --------------------------------------------------------------------------------------------------------------

MOMENTS = ("head", "body", "sent", "line", "delta", "late")
ACCEPTS = {
    "ndjson": "application/x-ndjson",
    "sse": "text/event-stream",
    "json": "application/json",
}


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize("form", ACCEPTS)
async def test_a_client_that_goes_away_leaves_nothing_behind(
    scripted: Scripted, server: Server, tmp_path: Path, form: str, reset: bool
) -> None:
    """Case H8: at each moment of a dispatch; the turn, if it was admitted, ends by itself and the session goes on."""
    talk, script = scripted()
    for moment in MOMENTS:
        if form == "json" and moment in ("line", "delta"):
            continue
        gate = Gate(tmp_path / f"{form}-{moment}")
        text = directive(steps.text("one "), steps.gate(gate), steps.text("two"), steps.reply())
        ran = len(script.log.prompts())
        await go_away(server, talk, text, gate, moment, form, reset)
        gate.open()
        if moment not in ("head", "body"):
            await script.log.wait_for_method("session/prompt", ran + 1)
            view = await talk.idle()
            assert view["last_turn"]["outcome"] == "completed"
    said = [record["data"]["text"] for record in await talk.records() if record["type"] == "message"]
    admitted = len(MOMENTS) - 2 - (2 if form == "json" else 0)
    assert said == ["one two"] * admitted
    await works(talk, "hit")


async def go_away(server: Server, talk: Talk, text: str, gate: Gate, moment: str, form: str, reset: bool) -> None:
    raw = RawClient(server)
    await raw.connect()
    request = raw.request("POST", turns_path(talk), body(talk, text), Accept=ACCEPTS[form])
    head = request.index(b"\r\n\r\n") + 4
    cut = {"head": head - 10, "body": head + 20}.get(moment, len(request))
    await raw.send(request[:cut])
    if moment == "line":
        await raw.read_until(b"turn_admitted")
    elif moment == "delta":
        await raw.read_until(b"one ")
    elif moment == "late":
        await gate.reached()
        gate.open()
        await raw.read_until(b"one two" if form == "json" else b"two")
    elif moment == "sent":
        await gate.reached()
    raw.close(reset=reset)


async def test_a_turn_that_nobody_waits_for_ends_and_frees_its_sandbox(serve: Serve, tmp_path: Path) -> None:
    """Case C11 and DESIGN 3.4: a disconnect ends no turn; without a reader the seat goes, unless it shall be kept."""
    server = serve("[server]\nreader_grace_seconds = 0\n")
    async with server.client() as client:
        talk = scripted_talk(server, client, "s", AgentScript(tmp_path))
        for keep, start, reason in ((False, "cold", "no_reader"), (True, "hit", "hit")):
            gate = Gate(tmp_path / f"gate-{keep}")
            turn = talk.dispatch(
                directive(steps.text("one "), steps.gate(gate), steps.text("two"), steps.reply()),
                keep_on_disconnect=keep,
            )
            await turn.text("one ")
            await turn.drop()
            for _ in range(3):
                # The server hears of the end of a connection no later than of requests that follow it.
                await talk.view()
            gate.open()
            assert (await talk.idle())["last_turn"]["outcome"] == "completed"
            again = await talk.prompt(POLITE)
            assert (again["ok"], again["start"], again["reason"]) == (True, start, reason)
        said = [record["data"]["text"] for record in await talk.records() if record["type"] == "message"]
        assert said == ["one two", "next"] * 2
        await talk.check()


async def test_a_reload_finds_what_runs_and_what_waits(scripted: Scripted, client: Client, tmp_path: Path) -> None:
    """Case H9: the viewer drops, the session tells that it is busy, its records so far, its open question, the rest."""
    talk, script = scripted()
    gate, late = Gate(tmp_path / "gate"), Gate(tmp_path / "late")
    question = steps.ask(allowed=[steps.text("did it")])
    script.on_prompt(
        steps.text("one "),
        steps.gate(gate),
        steps.text("two"),
        steps.tool("call-1", "in_progress"),
        question,
        steps.tool_status("call-1", "completed"),
        steps.gate(late),
        steps.reply(),
    )
    turn = talk.dispatch("hello", prompt_id="p")
    await turn.text("one ")
    await gate.reached()
    seen = turn.events[-1]["cursor"]
    await turn.drop()
    view = await talk.view()
    (admitted,) = turn.of("turn_admitted")
    assert (view["state"], view["running_turn"]) == ("running", admitted["turn_id"])
    assert [record["type"] for record in await talk.records()][-1] == "user_message"
    gate.open()
    follower = Follower(client, talk.session, seen)
    await follower.until("interaction_requested")
    await follower.until("done")
    view = await talk.view()
    assert (view["state"], view["running_turn"]) == ("awaiting_approval", None)
    (waiting,) = await talk.questions()
    assert view["open_interactions"] == [waiting["interaction_id"]]
    assert follower.streamed == "two"
    await client.answer(talk.session, waiting["interaction_id"], decision="allow")
    await late.reached()
    assert (await talk.view())["state"] == "running"
    late.open()
    await follower.until("done", 2)
    await follower.until("session_idle")
    await follower.close()
    assert (await talk.prompt("hello", prompt_id="p"))["text"] == "did it"
    assert len(script.log.prompts()) == 1
    await works(talk, "hit")


class Follower:
    """Reads ``events?follow=1`` in the background."""

    def __init__(self, client: Client, session: str, after: str | None = None) -> None:
        self.events: list[dict[str, Any]] = []
        self._stream = client.events(session, after=after, follow=True)
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for line in self._stream:
                self.events.append(line)
        finally:
            await self._stream.aclose()

    @property
    def streamed(self) -> str:
        return "".join(event["data"]["text"] for event in self.events if event["type"] == "message_delta")

    async def until(self, kind: str, count: int = 1) -> None:
        async with asyncio.timeout(SECONDS):
            while [event["type"] for event in self.events].count(kind) < count:
                assert not self._task.done(), self.events[-3:]
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})


# -- not reading -------------------------------------------------------------------------------------------------------


async def test_a_client_that_does_not_read_disturbs_nobody(
    scripted: Scripted, server: Server, client: Client, tmp_path: Path
) -> None:
    """Who dispatched 48 MiB of text does not read it: agent, records, another reader and other sessions go on."""
    talk, script = scripted()
    other, _ = scripted()
    chunks, chunk = 48, "x" * (MIB - 1) + "\n"
    start, end = Gate(tmp_path / "start"), Gate(tmp_path / "end")
    script.on_prompt(
        steps.gate(start), *[step for _ in range(chunks) for step in (steps.text(chunk), steps.sleep(0.01))],
        steps.gate(end), steps.text("end"), steps.reply(),
    )  # fmt: skip
    deaf = RawClient(server, receive_bytes=4096)
    await deaf.connect()
    await deaf.send(deaf.request("POST", turns_path(talk), body(talk, "flood", prompt_id="p")))
    await start.reached()
    reader = Follower(client, talk.session)
    await reader.until("user_message")
    server.forget_peak()
    before = server.rss_peak()
    start.open()
    await end.reached()
    await works(other, "cold")
    assert server.rss_peak() - before < 112 * MIB, "less than all frames and records, which nobody may keep"
    assert (await client.health())["status"] == "ok"
    end.open()
    await reader.until("session_idle")
    await reader.close()
    assert reader.streamed == chunk * chunks + "end"
    view = await talk.idle()
    assert view["last_turn"]["outcome"] == "completed"
    said = "".join(record["data"]["text"] for record in await talk.records() if record["type"] == "message")
    assert said == reader.streamed
    await deaf.read_to_end()
    deaf.close()
    assert b'"kind":"result"' not in deaf.got, "it was cut, and told so"
    assert b'"resync"' in deaf.got or not deaf.got.endswith(b"0\r\n\r\n")
    result = await talk.prompt("flood", prompt_id="p")
    assert (result["ok"], len(result["text"])) == (True, 16 * MIB)
    await works(talk, "hit")


async def test_refusals_are_problem_documents(scripted: Scripted, client: Client) -> None:
    talk, script = scripted()
    for fields, status, code in (
        ({"on_busy": "later"}, 400, "invalid_request"),
        ({"harness": "nobody"}, 422, "harness_unknown"),
        ({"no_such_field": 1}, 400, "invalid_request"),
    ):
        error = await talk.refused("hi", **fields)
        assert (error.status, error.code, error.retryable) == (status, code, False)
        assert error.problem["title"]
    with pytest.raises(ApiError) as unknown:
        await client.session("unheard-of")
    assert (unknown.value.status, unknown.value.code) == (404, "not_found")
    assert script.log.entries() == []
    await works(talk, "cold")
