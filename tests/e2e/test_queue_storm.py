"""Queued prompts over many sessions while prompts are aborted and the runner is killed and restarted, at random.

``QUEUE_STORM_SEED`` sets which storm.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from runner.client import ApiError, Client
from tests.agents import AgentScript, steps
from tests.e2e.conftest import Serve, scripted_talk
from tests.e2e.server import Server
from tests.e2e.talk import Talk

SEED = int(os.environ.get("QUEUE_STORM_SEED", "1"))
SESSIONS, EACH = 20, 10
RESTARTS = {60: "kill -9", 110: "SIGTERM", 160: "kill -9"}
"""How the runner goes down once so many prompts are acknowledged."""
OUTCOMES = {
    "done": {"completed"},
    "absorbed": {"absorbed"},
    "aborted": {"cancelled"},
    "cancelled": {"cancelled"},
    "failed": {"failed", "lost"},
}
BROKEN = frozenset({"unreachable", "stream_broken"})
SETTLED_SECONDS = 150.0
T = TypeVar("T")


class Door:
    """A server that goes down now and then, and a client for whatever process it has now."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.client = server.client()
        self.acknowledged = 0
        self.restarts = 0

    async def restart(self, how: str) -> None:
        if how == "kill -9":
            self.server.kill()
        else:
            await asyncio.to_thread(self.server.stop)
        await asyncio.to_thread(self.server.start)
        old, self.client = self.client, self.server.client()
        await old.close()
        self.restarts += 1

    async def restarting(self) -> None:
        """Take it down each time that enough was acknowledged."""
        for count, how in RESTARTS.items():
            while self.acknowledged < count:
                await asyncio.sleep(0.01)
            await self.restart(how)

    async def asked(self, ask: Callable[[Client], Awaitable[T]]) -> T:
        """Ask until there is an answer, as a client should."""
        while True:
            try:
                return await ask(self.client)
            except ApiError as error:
                if error.code not in BROKEN and not error.retryable:
                    raise
                await asyncio.sleep(0.05)


class Storm:
    """One session: what was sent and aborted in it, and what must have come of that."""

    def __init__(self, door: Door, number: int, folder: Path, chance: random.Random) -> None:
        self.door = door
        self.name = f"s{number}"
        self.chance = chance
        slow = steps.sleep(chance.choice([0.05, 0.2, 0.5]))
        self.script = AgentScript(folder, self.name).on_prompt(steps.text("ok"), slow, steps.reply())
        self.fields: dict[str, Any] = {
            "harness": "scripted",
            "env": self.script.env,
            "queue_mode": "fifo" if number % 2 else "coalesce",
        }
        self.sent: list[str] = []
        self.aborted: list[str] = []

    async def run(self) -> None:
        for number in range(EACH):
            await asyncio.sleep(self.chance.choice([0.0, 0.0, 0.1, 0.4]))
            await self._send(f"{self.name}-p{number}", self.chance.choice(["queue", "queue", "queue", "steer"]))
            if self.chance.random() < 0.4:
                await asyncio.sleep(self.chance.choice([0.0, 0.05]))
                await self._abort(self.chance.choice([*self.sent[-3:], await self._active() or self.sent[0]]))

    async def _send(self, name: str, on_busy: str) -> None:
        fields = {**self.fields, "prompt_id": name, "on_busy": on_busy}
        reply = await self.door.asked(lambda client: client.submit(self.name, name, **fields))
        assert reply["prompt_id"] == name
        self.sent.append(name)
        self.door.acknowledged += 1

    async def _active(self) -> str | None:
        listed: dict[str, Any] = await self.door.asked(lambda client: client.prompts(self.name))
        return listed["active"]

    async def _abort(self, name: str) -> None:
        try:
            if await self.door.client.abort_prompt(self.name, name):
                self.aborted.append(name)
        except ApiError as error:
            if error.code not in BROKEN and not error.retryable:
                raise

    async def judge(self) -> Counter[str]:
        """One terminal state each, told and stored; none in two frames, a cancelled one in none.

        Returns:
            How many prompts came to what.
        """
        talk = scripted_talk(self.door.server, self.door.client, self.name, self.script)
        states = await self._ended(talk)
        assert set(states) == set(self.sent)
        for name, state in states.items():
            result = await talk.prompt(name, **{**self.fields, "prompt_id": name, "on_busy": "queue"})
            assert result["outcome"] in OUTCOMES[state], (name, state, result)
        times = self._times_sent()
        assert max(times.values(), default=0) <= 1, times
        for name, state in states.items():
            assert state != "done" or times[name] == 1, name
            assert state != "cancelled" or times[name] == 0, name
        assert len(set(self.aborted)) == len(self.aborted), self.aborted
        told = {states[name] for name in self.aborted}
        assert told <= {"aborted", "cancelled", "failed"}, told
        beats = [r["type"] for r in await talk.records() if r["type"] in ("session_busy", "session_idle")]
        assert beats == ["session_busy", "session_idle"] * (len(beats) // 2), beats
        await talk.check()
        return Counter(states.values())

    async def _ended(self, talk: Talk) -> dict[str, str]:
        """Wait until each prompt has its terminal state."""
        async with asyncio.timeout(SETTLED_SECONDS):
            while True:
                view, records = await talk.view(), await talk.records()
                told = [record["data"] for record in records if record["type"] == "prompt_ended"]
                if len(told) >= EACH and view["state"] == "idle":
                    break
                await asyncio.sleep(0.1)
        states = {data["prompt_id"]: data["state"] for data in told}
        assert len(states) == len(told), told
        return states

    def _times_sent(self) -> Counter[str]:
        """In how many frames each prompt was, by the agents' own logs."""
        blocks = [block for frame in self.script.log.frames("session/prompt") for block in frame["params"]["prompt"]]
        return Counter(block["text"] for block in blocks if block.get("text") in self.sent)


@pytest.mark.timeout(400)
async def test_two_hundred_queued_prompts_with_aborts_and_restarts(serve: Serve, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    door = Door(serve())
    storms = [Storm(door, number, tmp_path, random.Random(chance.random())) for number in range(SESSIONS)]
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(door.restarting())
            for storm in storms:
                group.create_task(storm.run())
        total: Counter[str] = Counter()
        for storm in storms:
            total += await storm.judge()
    finally:
        await door.client.close()
    print(dict(total))
    assert door.restarts == len(RESTARTS)
    assert total.total() == SESSIONS * EACH
    assert min(total[state] for state in ("done", "absorbed", "cancelled")) > 0, total
