"""Random clients, agents and restarts over the real session: each prompt has one ending, and none runs twice."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.session.chain import CONTINUE
from tests.session.bed import CALLER, Bed, FakeSandbox, types
from tests.session.test_restart import crash

pytestmark = pytest.mark.virtual_time

ENDED = {"done", "aborted", "cancelled", "failed", "absorbed"}
PAUSES = (0.0, 0.0, 0.0, 0.01, 0.2, 1.5, 4.0)
OUTCOMES = {"done": "completed", "absorbed": "absorbed", "cancelled": "cancelled", "aborted": "cancelled"}


class Storm:
    """Sessions under random hands."""

    def __init__(self, seed: int, sessions: int) -> None:
        self.random = random.Random(seed)
        self.sessions = [f"s{n}" for n in range(sessions)]
        self.homes: dict[str, str] = {}
        self.accepted: dict[str, dict[str, Any] | None] = {}
        self.sandboxes: list[FakeSandbox] = []
        self.clients: list[asyncio.Task[Any]] = []
        self.answered: set[tuple[int, Any]] = set()
        self.asked: set[tuple[int, Any]] = set()
        self.aborted: set[str] = set()
        self.lives = 1

    async def begin(self) -> None:
        self.bed = await Bed.make()

    async def restart(self) -> None:
        """Kill -9, and another runner over the same store."""
        for client in self.clients:
            client.cancel()
        await asyncio.sleep(0)
        store = await crash(self.bed)
        for name in list(self.aborted):
            row = await store.prompt("p", self.homes[name], name)
            if row is not None and row.state == "active":
                self.aborted.discard(name)  # its interrupt was on its way; who asks again stops it
        self.sandboxes += self.bed.provider.sandboxes
        self.lives += 1
        self.bed = await Bed.make(store=store, replica_id=f"rep_{self.lives}")

    def client(self, work: Callable[..., Coroutine[Any, Any, Any]], *args: Any, **named: Any) -> None:
        async def quiet() -> None:
            with contextlib.suppress(RunnerError):
                await work(*args, **named)

        self.clients.append(asyncio.create_task(quiet(), name="client"))

    async def dispatch(self, name: str, session_id: str, fields: dict[str, Any]) -> None:
        if await self.bed.store.prompt("p", session_id, name) is None:
            self.aborted.discard(name)  # nothing of it was stored: it is as new
        handle = await self.bed.dispatch(session_id, name, prompt_id=name, keep_on_disconnect=True, **fields)
        if handle.refused is not None:
            return
        self.accepted[name] = None
        result = await handle.result()
        if result["outcome"] != "paused":
            assert self.accepted[name] is None or self.accepted[name] == result
            self.accepted[name] = result

    async def abort(self, name: str) -> None:
        bed = self.bed
        if await bed.sessions.abort_prompt(CALLER, self.homes[name], name):
            assert name not in self.aborted, "only one call cancels it"
            self.aborted.add(name)

    async def answer(self, session_id: str) -> None:
        view = await self.bed.sessions.view(CALLER, session_id)
        for asked in view["open_interactions"]:
            await self.bed.answer(asked, session_id, decision=self.random.choice(["allow", "deny"]))

    def submit(self) -> None:
        """One more prompt."""
        name, session_id = f"P{len(self.homes)}", self.random.choice(self.sessions)
        self.homes[name] = session_id
        busy = self.random.choice(["queue", "queue", "queue", "steer", "reject"])
        fields = {"on_busy": busy, "queue_mode": self.random.choice(["coalesce", "fifo"])}
        self.client(self.dispatch, name, session_id, fields)

    def step(self) -> None:
        """Something that a client or an agent does."""
        session_id = self.random.choice(self.sessions)
        match self.random.choice(["abort", "abort", "agent", "agent", "agent", "stop", "answer", "again"]):
            case "abort" if self.homes:
                self.client(self.abort, self.random.choice(list(self.homes)))
            case "again" if self.homes:
                name = self.random.choice(list(self.homes))
                self.client(self.dispatch, name, self.homes[name], {"on_busy": "queue"})
            case "agent" if self.bed.provider.sandboxes:
                self.agent_does(self.random.choice(self.bed.provider.sandboxes))
            case "stop":
                self.client(self.bed.cancel, session_id, queue=self.random.choice(["drop", "drop", "keep"]))
            case "answer":
                self.client(self.answer, session_id)

    def agent_does(self, sandbox: FakeSandbox, *, well: bool = False) -> None:
        """Answer, ask or die; ``well``: answer, unless a human is waited for."""
        agent = sandbox.agent
        frames = [
            f for f in agent.all("session/prompt") if (agent.pid + 10_000 * self.lives, f["id"]) not in self.answered
        ]
        if sandbox.gone.is_set() or not frames:
            return
        frame = frames[-1]
        known = (agent.pid + 10_000 * self.lives, frame["id"])
        cancelled = len(agent.all("session/cancel")) > 0 and agent.frames.index(frame) < max(
            n for n, f in enumerate(agent.frames) if f.get("method") == "session/cancel"
        )
        choice = "answer" if well else self.random.choice(["answer", "answer", "answer", "ask", "ask", "die"])
        if choice == "die" and self.random.random() < 0.4:
            agent.exit(9)
            return
        if choice == "ask" and not cancelled and known not in self.asked:
            self.asked.add(known)
            agent.ask(f"q{frame['id']}", f"t{frame['id']}")
            return
        waits = known in self.asked and not any(f.get("id") == f"q{frame['id']}" for f in agent.frames)
        if not waits or cancelled:
            self.answered.add(known)
            agent.say("so it is")
            agent.answer(frame, "cancelled" if cancelled else "end_turn")

    # The end.

    async def calm(self) -> None:
        """Everybody behaves until nothing is left to do."""
        for _ in range(60):
            for sandbox in list(self.bed.provider.sandboxes):
                self.agent_does(sandbox, well=True)
            for session_id in self.sessions:
                with contextlib.suppress(RunnerError):
                    await self.answer(session_id)
            await asyncio.sleep(0.5)
        await asyncio.sleep(15)
        for client in self.clients:
            if client.done() and not client.cancelled() and client.exception() is not None:
                raise client.exception() or AssertionError

    async def check(self) -> None:
        """One ending each, durable and told once; nothing was sent twice; nothing is left."""
        self.sandboxes += self.bed.provider.sandboxes
        told: Counter[str] = Counter()
        for session_id in self.sessions:
            if await self.bed.store.session("p", session_id) is None:
                continue
            events = await self.bed.history(session_id)
            told.update(event["data"]["prompt_id"] for event in events if event["type"] == "prompt_ended")
            beats = [kind for kind in types(events) if kind in ("session_busy", "session_idle")]
            assert beats == ["session_busy", "session_idle"] * (len(beats) // 2), (session_id, beats)
            view = await self.bed.sessions.view(CALLER, session_id)
            assert (view["state"], view["queue"]) == ("idle", []), view
        sent = Counter(text for frame in self.frames() for text in frame)
        for name, session_id in self.homes.items():
            row = await self.bed.store.prompt("p", session_id, name)
            assert sent[name] <= 1, (name, sent[name])
            if row is None:
                assert name not in self.accepted or self.accepted[name] is not None, name
                assert (sent[name], told[name]) == (0, 0), name
                continue
            assert row.state in ENDED, (name, row.state)
            assert told[name] == 1, (name, told[name])
            assert row.result is not None, name
            assert row.result["outcome"] == OUTCOMES.get(row.state, row.result["outcome"]) or (
                (row.state, row.result["outcome"]) == ("aborted", "paused")
            ), (
                name,
                row.state,
                row.result,
            )
            assert name not in self.aborted or row.state in ("aborted", "cancelled", "failed"), (name, row.state)
            if row.state == "cancelled":
                assert sent[name] == 0, name

    def frames(self) -> list[list[str]]:
        """The texts of each frame that an agent received, but for those that only go on with a cold chain."""
        found = []
        for sandbox in self.sandboxes:
            for frame in sandbox.agent.all("session/prompt"):
                texts = [block["text"] for block in frame["params"]["prompt"]]
                if texts[-1] != CONTINUE:
                    found.append(texts)
        return found

    async def close(self) -> None:
        for client in self.clients:
            client.cancel()
        await self.bed.close()


async def storm(seed: int, *, sessions: int, prompts: int, restarts: int) -> None:
    """So many prompts, with random steps between them and so many restarts."""
    scene = Storm(seed, sessions)
    await scene.begin()
    due = sorted(scene.random.sample(range(prompts), restarts))
    for nth in range(prompts):
        scene.submit()
        for _ in range(scene.random.randrange(4)):
            await asyncio.sleep(scene.random.choice(PAUSES))
            scene.step()
        if nth in due:
            await scene.restart()
    await scene.calm()
    await scene.check()
    await scene.close()


@pytest.mark.parametrize("seed", range(40))
async def test_each_prompt_has_one_ending_and_none_runs_twice(seed: int) -> None:
    await storm(seed, sessions=2, prompts=12, restarts=seed % 3)


async def test_200_prompts_in_20_sessions_with_restarts() -> None:
    await storm(7, sessions=20, prompts=200, restarts=3)
