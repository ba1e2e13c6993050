"""Random hands, outages and kills; whoever followed saw what is history (DESIGN 3.9)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from runner.errors import RunnerError
from tests.normal_form import normal_form
from tests.session.bed import CALLER, Bed, FakeSandbox
from tests.session.test_prompt_queue import Storm
from tests.session.test_restart import crash

pytestmark = pytest.mark.virtual_time
AWAY = RunnerError("store_unavailable", "The disk is away.")
PAUSES = (0, 0.01, 0.1, 0.3, 1)


class Followed(Storm):
    """Each session has a follower, who comes back by its cursor after a kill."""

    def __init__(self, seed: int, sessions: int, live_dir: Path) -> None:
        super().__init__(seed, sessions)
        self.live_dir = live_dir
        self.seen: dict[str, list[dict[str, Any]]] = {name: [] for name in self.sessions}
        self.followers: list[asyncio.Task[None]] = []
        self.said = 0

    async def begin(self) -> None:
        self.bed = await Bed.make(live_dir=self.live_dir)
        self.follow()

    def follow(self) -> None:
        self.followers = [asyncio.create_task(self._follow(self.bed, name)) for name in self.sessions]

    async def _follow(self, bed: Bed, name: str) -> None:
        seen = self.seen[name]
        while True:
            with contextlib.suppress(RunnerError):
                after = seen[-1]["cursor"] if seen else None
                reader = await bed.sessions.follow(CALLER, name, after, True)
                while True:
                    lines = await reader.next(3600)
                    seen += [json.loads(line) for line in (lines or b"").splitlines()]
            await asyncio.sleep(0.01)

    async def outage(self) -> None:
        """Only endings and admissions are written for a while: the rest waits in memory."""
        self.bed.store.broken["append"] = AWAY
        for _ in range(self.random.randrange(6)):
            self.step()
            await asyncio.sleep(self.random.choice(PAUSES))

    async def killed(self) -> None:
        """Kill -9, and another runner over the same store and state directory."""
        for task in (*self.clients, *self.followers):
            task.cancel()
        await asyncio.sleep(0)
        self.sandboxes += self.bed.provider.sandboxes
        self.lives += 1
        left, self.live_dir = self.live_dir, self.live_dir.with_name(f"live{self.lives}")
        if left.exists():
            shutil.copytree(left, self.live_dir)
        store = await crash(self.bed)
        for name in list(self.aborted):
            row = await store.prompt("p", self.homes[name], name)
            if row is not None and row.state == "active":
                self.aborted.discard(name)  # its interrupt was on its way
        self.bed = await Bed.make(store=store, replica_id=f"rep_{self.lives}", live_dir=self.live_dir)
        self.follow()

    def agent_does(self, sandbox: FakeSandbox, *, well: bool = False) -> None:
        agent = sandbox.agent
        if not sandbox.gone.is_set() and agent.all("session/prompt"):
            for _ in range(self.random.randrange(4)):
                self.said += 1
                match self.random.choice(["text", "text", "thought", "call", "ended"]):
                    case "text":
                        agent.say(f"{self.said} ")
                    case "thought":
                        chunk = {"type": "text", "text": f"({self.said})"}
                        agent.update(sessionUpdate="agent_thought_chunk", content=chunk)
                    case "call":
                        call = f"c{self.said}"
                        agent.update(sessionUpdate="tool_call", toolCallId=call, title=call, status="in_progress")
                    case "ended":
                        agent.update(
                            sessionUpdate="tool_call_update", toolCallId=f"c{self.said - 1}", status="completed"
                        )
        super().agent_does(sandbox, well=well)

    async def compare(self) -> None:
        await asyncio.sleep(1)
        for name, seen in self.seen.items():
            if await self.bed.store.session("p", name) is not None:
                assert normal_form(seen) == normal_form(await self.bed.history(name)), name
        assert await self.bed.store.quarantined("p", 10) == []
        for task in self.followers:
            task.cancel()


@pytest.mark.parametrize("seed", range(24))
async def test_whoever_followed_saw_what_is_history(seed: int, tmp_path: Path) -> None:
    scene = Followed(seed, 2, tmp_path / "live")
    await scene.begin()
    for nth in range(12):
        scene.submit()
        for _ in range(scene.random.randrange(5)):
            await asyncio.sleep(scene.random.choice(PAUSES))
            scene.step()
        if nth % 4 == seed % 4:
            await scene.outage()
            await scene.killed()
    await scene.calm()
    await scene.compare()
    await scene.close()
