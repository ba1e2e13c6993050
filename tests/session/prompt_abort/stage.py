"""The stage of the numbered scenarios of prompt-specific abort: one session, its agents, and gates at every step.

On the virtual-time loop time passes only when nothing can move: ``calm`` is no race, it waits until all stands still.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from runner.session.session import Session
from tests.session.bed import CALLER, Bed, types
from tests.session.fake_agent import FakeAgent
from tests.session.gates import Gate, SlowStore

CALM_SECONDS: Final = 0.5
Scenario = Callable[["Stage"], Awaitable[None]]
SCENARIOS: Final[dict[str, Scenario]] = {}


def scenario(number: str) -> Callable[[Scenario], Scenario]:
    """Registers a scenario under its number."""

    def register(play: Scenario) -> Scenario:
        assert number not in SCENARIOS, number
        SCENARIOS[number] = play
        return play

    return register


class StagedStore(SlowStore):
    """A store that can be held for one prompt: ``PREP`` before it is looked up, ``PERSISTED`` behind its row."""

    def __init__(self) -> None:
        super().__init__()
        self.holds: dict[tuple[str, str], Gate] = {}
        self.refused: set[str] = set()

    async def _passes(self, place: str, prompt_id: str) -> None:
        gate = self.holds.get((place, prompt_id))
        if gate is not None:
            await gate.passes()

    async def prompt(self, project: str, session_id: str, prompt_id: str) -> Any:
        await self._passes("PREP", prompt_id)
        return await super().prompt(project, session_id, prompt_id)

    async def append(self, records: Any, interactions: Any = (), prompts: Any = ()) -> Any:
        names = [row.prompt_id for row in prompts]
        if self.refused.intersection(names):
            self.failing["append"] += 1
        answer = await super().append(records, interactions, prompts)
        for name in names:
            await self._passes("PERSISTED", name)
        return answer

    async def admit(self, admission: Any) -> Any:
        answer = await super().admit(admission)
        if admission.prompt is not None:
            await self._passes("PERSISTED", admission.prompt.prompt_id)
        return answer


class Stage:
    """One session ``s`` whose prompts are called by their texts, and what a scenario does to it."""

    def __init__(self, bed: Bed) -> None:
        self.bed = bed
        self.handles: dict[str, Any] = {}
        self.tasks: list[asyncio.Task[Any]] = []

    @classmethod
    async def make(cls, **settings: Any) -> Stage:
        """A stage over a fresh replica."""
        return cls(await Bed.make(store=StagedStore(), settings=settings))

    async def close(self) -> None:
        """Take it apart: nothing may be left."""
        for task in self.tasks:
            task.cancel()
        await self.bed.close()
        assert self.bed.provider.alive == set()

    # What clients do.

    async def send(self, name: str, **fields: Any) -> Any:
        """Dispatch a prompt with this text and id."""
        fields = {"on_busy": "queue", "keep_on_disconnect": True, "prompt_id": name, **fields}
        handle = self.handles[name] = await self.bed.dispatch("s", name, **fields)
        return handle

    def sending(self, name: str, **fields: Any) -> asyncio.Task[Any]:
        """Dispatch it in a task of its own."""
        task = asyncio.create_task(self.send(name, **fields))
        self.tasks.append(task)
        return task

    async def context(self, name: str) -> Any:
        """A context-only prompt."""
        return await self.send(name, context_only=True)

    def abort(self, name: str) -> bool:
        """Abort one prompt."""
        return self.session.queue.abort(name)

    async def stop(self, **fields: Any) -> Any:
        """A session-wide Stop."""
        return await self.bed.cancel(**fields)

    async def active(self, *waiting: str) -> None:
        """A is with the model, the others are queued."""
        await self.send("A")
        await self.model(1)
        for name in waiting:
            await self.send(name)

    async def result(self, name: str) -> dict[str, Any]:
        """What the prompt's caller gets."""
        result: dict[str, Any] = await self.handles[name].result()
        return result

    # Gates.

    @property
    def store(self) -> StagedStore:
        store: StagedStore = self.bed.store
        return store

    def hold(self, place: str, name: str) -> Gate:
        """A gate for one prompt, at ``PREP`` or ``PERSISTED``."""
        gate = self.store.holds[place, name] = Gate()
        return gate

    def hold_store(self, call: str) -> Gate:
        """A gate for a call of the store: ``admit`` is READ, ``end`` is TEARDOWN."""
        gate = self.store.gates[call] = Gate()
        return gate

    def hold_beat(self, phase: str) -> Gate:
        """A gate for a beat: ``parked`` is FINAL, for the decision to finish was taken."""
        plane: Any = self.bed.replica.plane
        gate: Gate = plane.gates.setdefault(phase, Gate())
        return gate

    def hold_mark(self) -> asyncio.Event:
        """A gate at the last await before the claim."""
        gate = self.bed.provider.mark_gate = asyncio.Event()
        return gate

    def release(self, call: str) -> None:
        """Open the gate of a store call for good."""
        self.store.gates.pop(call).open()

    async def calm(self) -> None:
        """Until nothing moves any more."""
        await asyncio.sleep(CALM_SECONDS)

    # The agent.

    async def agent(self, nth: int = 1) -> FakeAgent:
        """The ``nth`` agent that was started."""
        return await self.bed.agent(nth)

    async def model(self, nth: int, agent: int = 1) -> dict[str, Any]:
        """The ``nth`` frame of an agent, once it is with it."""
        return await (await self.agent(agent)).prompt(nth)

    async def finish(self, nth: int, agent: int = 1) -> None:
        """The agent answers its ``nth`` frame with the text ``a<nth>``."""
        await (await self.agent(agent)).finish(nth, f"a{nth}")

    async def yields(self, nth: int = 1, agent: int = 1, cancels: int = 1) -> None:
        """The agent answers its ``nth`` frame to the cancel that it got, behind half an answer."""
        speaker = await self.agent(agent)
        await speaker.heard("session/cancel", cancels)
        speaker.say(f"a{nth}*")
        speaker.answer(await speaker.prompt(nth), "cancelled")

    @property
    def frames(self) -> list[list[str]]:
        """The texts of each prompt frame that an agent received, in the agents' own logs."""
        return [
            [block["text"] for block in frame["params"]["prompt"]]
            for sandbox in self.bed.provider.sandboxes
            for frame in sandbox.agent.all("session/prompt")
        ]

    @property
    def cancels(self) -> int:
        """How many cancel frames the agents received."""
        return sum(len(sandbox.agent.all("session/cancel")) for sandbox in self.bed.provider.sandboxes)

    # What is seen.

    @property
    def session(self) -> Session:
        session = self.bed.sessions._registry.known(("p", "s"))
        assert session is not None
        return session

    async def events(self) -> list[dict[str, Any]]:
        """The session's history."""
        return await self.bed.history()

    async def idles(self) -> int:
        """How many busy periods are over."""
        return types(await self.events()).count("session_idle")

    async def texts(self) -> list[str]:
        """The answers in the history."""
        return [event["data"]["text"] for event in await self.events() if event["type"] == "message"]

    async def queue(self) -> list[str]:
        """The waiting prompts of the session view."""
        view = await self.bed.sessions.view(CALLER, "s")
        return [item["prompt_id"] for item in view["queue"]]

    async def check(
        self, *frames: list[str], errors: int = 0, idles: int = 1, tokens: bool = False, **ended: str
    ) -> None:
        """What must hold when all stands still: the frames, one ending for each prompt, one idle per busy period."""
        await self.calm()
        events = await self.events()
        told = [(e["data"]["prompt_id"], e["data"]["state"]) for e in events if e["type"] == "prompt_ended"]
        assert self.frames == list(frames)
        assert dict(told) == ended
        assert len(told) == len(ended), "one ending each"
        beats = [kind for kind in types(events) if kind in ("session_busy", "session_idle")]
        assert beats == ["session_busy", "session_idle"] * idles
        assert types(events).count("error") == errors
        if not tokens:
            assert self.session.queue.rules.tokens == {}
            assert await self.bed.state() == "idle"
        for name, state in ended.items():
            row = await self.store.prompt("p", "s", name)
            assert row is not None and row.state == state, (name, row)
            assert row.result is not None, name
