"""Doubles whose calls can be held, failed or slowed: every await of a dispatch becomes a place to stand still."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from runner.errors import RunnerError
from runner.leases.memory import MemoryLeasePlane
from runner.leases.port import BeatAnswer, Heartbeat
from runner.store.memory import MemoryStore
from tests.virtual_time import LoopClock

CALLS = (
    "admit",
    "end",
    "save_session",
    "append",
    "create_session",
    "caught_up",
    "pruned_to",
    "unstorable",
    "quarantine",
    "quarantined",
    "submit_command",
    "claim_command",
    "settle_command",
    "command",
    "open_commands",
    "answer_interaction",
    "session",
    "sessions",
    "prompt",
    "turn",
    "last_turn",
    "open_turns",
    "paused_turns",
    "records",
    "interactions",
    "open_interactions",
    "interaction",
    "delete_session_content",
    "feed",
    "feed_span",
)


class Gate:
    """Holds whoever passes until it is opened; ``reached`` tells that somebody stands there."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self._open = asyncio.Event()

    async def passes(self) -> None:
        self.reached.set()
        await self._open.wait()

    def open(self) -> None:
        self._open.set()


class SlowStore(MemoryStore):
    """A ``MemoryStore`` whose calls suspend, as a database's do: once before and once behind the work.

    ``latency`` is how long each of the two takes, ``gates`` holds a call by its name, ``failing`` makes that many calls
    of a name fail, ``unanswered`` that many fail behind their work, ``broken`` makes them raise.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gates: dict[str, Gate] = {}
        self.failing: Counter[str] = Counter()
        self.unanswered: Counter[str] = Counter()
        self.broken: dict[str, Exception] = {}
        self.called: Counter[str] = Counter()
        self.inside = False
        self.latency = 0.0

    async def passes(self, name: str) -> None:
        self.called[name] += 1
        await asyncio.sleep(self.latency)
        gate = self.gates.get(name)
        if gate is not None:
            await gate.passes()
        if name in self.broken:
            raise self.broken[name]
        if self.failing[name] > 0:
            self.failing[name] -= 1
            raise RunnerError("store_unavailable", "The store cannot be used.")


def _suspending(name: str) -> Callable[..., Awaitable[Any]]:
    async def call(self: SlowStore, *args: Any, **named: Any) -> Any:
        work = getattr(MemoryStore, name)
        if self.inside:  # one call that uses another is one transaction
            return await work(self, *args, **named)
        await self.passes(name)
        self.inside = True
        try:
            answer = await work(self, *args, **named)
        finally:
            self.inside = False
        await asyncio.sleep(self.latency)
        if self.unanswered[name] > 0:
            self.unanswered[name] -= 1
            raise RunnerError("store_unavailable", "The store gave no answer.")
        return answer

    return call


for _name in CALLS:
    setattr(SlowStore, _name, _suspending(_name))


class SlowPlane(MemoryLeasePlane):
    """A lease plane in memory whose beats suspend and can be held by phase."""

    def __init__(self) -> None:
        super().__init__(LoopClock(), 20)
        self.gates: dict[str, Gate] = {}
        self.down = False
        self.latency = 0.0

    async def beat(self, beat: Heartbeat) -> BeatAnswer:
        await asyncio.sleep(self.latency)
        gate = self.gates.get(beat.phase)
        if gate is not None:
            await gate.passes()
        if self.down:
            raise RunnerError("plane_unavailable", "The plane is away.")
        answer = await super().beat(beat)
        await asyncio.sleep(self.latency)
        return answer
