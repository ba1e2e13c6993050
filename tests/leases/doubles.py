"""Lease planes that do what a test says: admit, refuse, raise, crash, never answer, or wait at a gate."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

from runner.errors import RunnerError
from runner.leases.memory import MemoryLeasePlane
from runner.leases.port import BeatAnswer, Heartbeat, Holder, Note, OnNote, ReplicaInfo
from tests.virtual_time import LoopClock

LEASE = 20.0
Step = Literal["admit", "refuse", "owned", "raise", "crash", "hang"] | asyncio.Event | BeatAnswer


@dataclass
class ScriptedPlane:
    """Takes one step per beat from ``steps``, then ``then`` for ever.

    ``admit`` grants ``epoch``; ``refuse`` names this replica as the owner, ``owned`` another one; ``raise`` is
    ``plane_unavailable``, ``crash`` a foreign exception; ``hang`` never answers; an event holds the answer until it
    is set and then admits; a ``BeatAnswer`` is given as it is. ``beats`` holds (loop time, beat) of every call.
    ``announcing`` has the steps of announcements, ``announced`` (loop time, replica) of every one.
    """

    steps: list[Step] = field(default_factory=list)
    then: Step = "admit"
    epoch: int = 1
    lease_seconds: float = 20.0
    beats: list[tuple[float, Heartbeat]] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    announcing: list[Literal["raise", "crash", "hang"]] = field(default_factory=list)
    announced: list[tuple[float, ReplicaInfo]] = field(default_factory=list)
    shared: bool = False

    def of(self, turn_id: str) -> list[tuple[float, str]]:
        """(loop time, phase) of every beat of one turn."""
        return [(at, beat.phase) for at, beat in self.beats if beat.turn_id == turn_id]

    async def beat(self, beat: Heartbeat) -> BeatAnswer:
        self.beats.append((asyncio.get_running_loop().time(), beat))
        step = self.steps.pop(0) if self.steps else self.then
        if isinstance(step, BeatAnswer):
            return step
        if isinstance(step, asyncio.Event):
            await step.wait()
        elif step == "raise":
            raise RunnerError("plane_unavailable", "scripted")
        elif step == "crash":
            raise ConnectionResetError("scripted")
        elif step == "hang":
            await asyncio.Event().wait()
        elif step in ("refuse", "owned"):
            owner = beat.replica_id if step == "refuse" else "another"
            return BeatAnswer(False, False, owner, 0, self.lease_seconds)
        current = beat.phase in ("running", "paused")
        return BeatAnswer(True, current, beat.replica_id, self.epoch, self.lease_seconds)

    async def release_replica(self, replica_id: str) -> int:
        self.released.append(replica_id)
        return 0

    async def look(self, project: str, session_id: str) -> Holder | None:
        return None

    async def announce(self, replica: ReplicaInfo) -> None:
        self.announced.append((asyncio.get_running_loop().time(), replica))
        step = self.announcing.pop(0) if self.announcing else None
        if step == "raise":
            raise RunnerError("plane_unavailable", "scripted")
        if step == "crash":
            raise ConnectionResetError("scripted")
        if step == "hang":
            await asyncio.Event().wait()

    async def replicas(self) -> list[ReplicaInfo]:
        return [replica for _, replica in self.announced]

    async def take_lease(self, name: str, replica_id: str, seconds: float) -> bool:
        return True

    async def push(self, replica_id: str, note: Note) -> bool:
        return False

    async def listen(self, replica_id: str, on_note: OnNote) -> None:
        return None

    async def close(self) -> None:
        return None


class GatedPlane(MemoryLeasePlane):
    """A shared plane in memory whose beats can be held before they are decided, or have their answers held or lost.

    Keys are (turn, phase); an entry of ``asks`` holds the question until it is set, of ``answers`` the answer. While
    ``down`` nothing is decided. ``sent`` holds (loop time, turn, phase, predecessor) of every beat.
    """

    def __init__(self) -> None:
        super().__init__(LoopClock(), LEASE, shared=True)
        self.asks: dict[tuple[str, str], asyncio.Event] = {}
        self.answers: dict[tuple[str, str], asyncio.Event] = {}
        self.down = False
        self.sent: list[tuple[float, str, str, str | None]] = []

    async def beat(self, beat: Heartbeat) -> BeatAnswer:
        self.sent.append((asyncio.get_running_loop().time(), beat.turn_id, beat.phase, beat.predecessor))
        key = (beat.turn_id, beat.phase)
        if key in self.asks:
            await self.asks[key].wait()
        if self.down:
            raise RunnerError("plane_unavailable", "scripted")
        answer = await super().beat(beat)
        if key in self.answers:
            await self.answers[key].wait()
        return answer
