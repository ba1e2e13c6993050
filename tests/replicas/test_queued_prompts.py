"""Prompts that wait in a session of one of two replicas: asked about at the other, and left behind by their owner."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from runner.client import ApiError
from tests.agents import AgentScript, Gate, steps
from tests.e2e.server import SECONDS
from tests.e2e.talk import Dispatched
from tests.replicas.bed import Cluster, Member, Session, until_async
from tests.replicas.conftest import Sessions


class Queued:
    """A session whose prompts are called by their texts; its agents' first frame waits for the gate."""

    def __init__(self, session: Session, folder: Path) -> None:
        self.session = session
        self.gate = Gate(folder / f"{session.session}.gate")
        self.script = AgentScript(folder, session.session).on_prompt(
            steps.text("a1"), steps.gate(self.gate), steps.reply()
        )
        self.script.on_prompt(steps.text("next"), steps.reply())

    def send(self, member: Member, name: str, **fields: Any) -> Dispatched:
        given = {"prompt_id": name, "on_busy": "queue", "keep_on_disconnect": True, "env": self.script.env}
        return self.session.dispatch(member, name, **{**given, **fields})

    async def waiting(self, member: Member, *names: str, **fields: Any) -> list[Dispatched]:
        """A is with the agent at ``a``; these wait, sent to ``member``."""
        turns = [self.send(self.session.cluster.a, "A", **fields)]
        await self.gate.reached(SECONDS)
        for name in names:
            turns.append(self.send(member, name, **fields))
            await turns[-1].event("turn_queued")
        return turns

    def sent(self) -> list[str]:
        """Prompts in the frames that agents received, by their own logs."""
        blocks = [block for frame in self.script.log.frames("session/prompt") for block in frame["params"]["prompt"]]
        return [block["text"] for block in blocks if len(block.get("text", "")) == 1]

    async def ended(self, member: Member) -> dict[str, str]:
        """What became of each prompt: told once."""
        records = await self.session.records(member)
        told = [record["data"] for record in records if record["type"] == "prompt_ended"]
        states = {data["prompt_id"]: data["state"] for data in told}
        assert len(told) == len(states), told
        return states


async def test_the_queue_is_one_wherever_it_is_asked_about(
    cluster: Cluster, sessions: Sessions, tmp_path: Path
) -> None:
    """Sent, listed and aborted at the replica that does not have the session."""
    queued = Queued(sessions(), tmp_path)
    session, other = queued.session, cluster.b
    first, second, third = await queued.waiting(other, "B", "C")
    listed = await session.at(other).prompts(session.session)
    assert ([item["prompt_id"] for item in listed["items"]], listed["active"]) == (["B", "C"], "A")
    aborted = [await session.at(other).abort_prompt(session.session, name) for name in ("B", "A", "B", "A")]
    assert aborted == [True, True, False, False]
    outcomes = [(await turn.result())["outcome"] for turn in (first, second, third)]
    assert outcomes == ["cancelled", "cancelled", "completed"]
    assert queued.sent() == ["A", "C"]
    assert await queued.ended(other) == {"A": "aborted", "B": "cancelled", "C": "done"}
    await session.check()


@pytest.mark.parametrize("how", ["kill -9", "SIGTERM"])
async def test_what_waits_outlives_its_owner(fresh: Cluster, sessions: Sessions, tmp_path: Path, how: str) -> None:
    """The survivor runs it, once, although no client asks: what was with the agent is not sent again."""
    queued = Queued(sessions(), tmp_path)
    session, cluster = queued.session, fresh
    turns = await queued.waiting(cluster.a, "B", "C", "D", queue_mode="fifo")
    assert await session.at(cluster.b).abort_prompt(session.session, "C") is True
    if how == "kill -9":
        cluster.a.kill()
    else:
        await asyncio.to_thread(cluster.a.stop)
    queued.gate.open()
    for turn in turns:
        await turn.drop()

    async def over() -> bool:
        return set(await queued.ended(cluster.b)) == set("ABCD")

    await until_async(over, "each prompt has ended")
    assert await queued.ended(cluster.b) == {"A": "failed", "B": "done", "C": "cancelled", "D": "done"}
    assert queued.sent() == ["A", "B", "D"]
    with pytest.raises(ApiError):
        await session.at(cluster.a).prompts(session.session)
    assert [await session.at(cluster.b).abort_prompt(session.session, name) for name in "ABCD"] == [False] * 4
    await session.check(*[door for door in cluster.doors if door is not cluster.a])
