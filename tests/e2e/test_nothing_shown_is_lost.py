"""kill -9 of the server: what a client had been shown is in the history of the next one (DESIGN 3.9)."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runner.client import Client
from tests.agents import AgentScript, Gate, steps
from tests.agents.steps import Step
from tests.e2e.conftest import Serve, scripted_talk
from tests.e2e.server import SECONDS, Server, until
from tests.normal_form import Final, normal_form

Line = dict[str, Any]
WORDS = [steps.thought("let me "), steps.thought("see"), *(steps.text(f"word {n} ") for n in range(50))]
CALL = steps.tool("call-1", "in_progress", "ls")
CALLED = steps.tool_status(
    "call-1", "completed", content=[{"type": "content", "content": {"type": "text", "text": "x"}}]
)


class Follower:
    """A client that reads a session's events until the server is gone."""

    def __init__(self, client: Client, session: str) -> None:
        self.events: list[Line] = []
        self._task = asyncio.create_task(self._read(client, session))

    async def _read(self, client: Client, session: str) -> None:
        try:
            async for line in client.events(session, follow=True):
                if line["kind"] == "event":
                    self.events.append(line)
        except Exception:
            return

    async def until(self, done: Callable[[list[Line]], bool]) -> None:
        await until(lambda: done(self.events), "the follower has seen it")

    async def over(self) -> list[Line]:
        async with asyncio.timeout(SECONDS):
            await asyncio.wait({self._task})
        return self.events


@contextmanager
def locked(server: Server) -> Iterator[None]:
    """Nothing can be written to the store meanwhile."""
    store = sqlite3.connect(server.state_dir / "store.sqlite3", isolation_level=None, timeout=SECONDS)
    try:
        store.execute("BEGIN IMMEDIATE")
        yield
    finally:
        store.close()


async def history(client: Client, session: str) -> list[Line]:
    return [line async for line in client.events(session) if line["kind"] == "event"]


def said(events: list[Line]) -> str:
    return "".join(event["data"]["text"] for event in events if event["type"] == "message_delta")


def without_end(items: list[Final]) -> list[Final]:
    """Nothing of the lost turn's ending, and no call that it closed as failed."""
    ending = next(place for place, item in enumerate(items) if item.type == "error")
    assert [item.type for item in items[ending:]] == ["error", "prompt_ended", "done", "session_idle"]
    assert items[-2].data["outcome"] == "lost"
    return items[:ending]


def failed(items: list[Final]) -> list[Final]:
    """Calls that were open at the kill have failed."""
    return [
        item._replace(data={**item.data, "status": "failed"})
        if item.type == "tool_call" and item.data["status"] == "in_progress"
        else item
        for item in items
    ]


POINTS: dict[str, tuple[list[Step], Callable[[list[Line]], bool]]] = {
    "in a message": (WORDS, lambda seen: said(seen).endswith("word 49 ")),
    "in a thought": (WORDS[:2], lambda seen: seen[-1]["type"] == "thought_delta"),
    "in a call": ([*WORDS, CALL], lambda seen: seen[-1]["type"] == "tool_call"),
    "right behind a call": ([*WORDS, CALL, CALLED], lambda seen: seen[-1]["data"].get("status") == "completed"),
    "in the message behind a call": (
        [*WORDS, CALL, CALLED, steps.text("done"), steps.text(" it")],
        lambda seen: said(seen).endswith("done it"),
    ),
}


@pytest.mark.parametrize("point", POINTS)
async def test_a_kill_loses_nothing_that_was_shown(serve: Serve, tmp_path: Path, point: str) -> None:
    """Case H4: behind what is shown last, with each record of it in memory: the store's lock was ours all the time."""
    told, seen_all = POINTS[point]
    server = serve()
    script, gate, end = AgentScript(tmp_path), Gate(tmp_path / "gate"), Gate(tmp_path / "end")
    script.on_prompt(steps.gate(gate), *told, steps.gate(end))
    async with server.client() as client:
        talk = scripted_talk(server, client, "s", script)
        turn = talk.dispatch("go")
        await gate.reached(SECONDS)
        follower = Follower(client, "s")
        await follower.until(bool)
        with locked(server):
            gate.open()
            await follower.until(seen_all)
            server.kill()
        seen = await follower.over()
        await turn.drop()
    server.start()
    async with server.client() as client:
        talk = scripted_talk(server, client, "s", script)
        records, events = await talk.records(), await history(client, "s")
        shown = failed(normal_form(seen))
        assert without_end(normal_form(records)) == shown
        assert normal_form(events) == normal_form(records)
        after = [line async for line in client.events("s", after=seen[-1]["cursor"]) if line["kind"] == "event"]
        assert failed(normal_form([*seen, *after])) == normal_form(events), "who goes on by its cursor sees the same"
        await talk.check()
        files = [path.name.rpartition(".")[0] for path in (server.state_dir / "live").iterdir()]
        assert set(files) <= {server.replica_id}, "what is in the store is kept no longer"
