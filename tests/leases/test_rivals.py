"""Replicas over one plane with slow and broken lines: at no instant two hold a session, and nothing is forgotten."""

from __future__ import annotations

import asyncio
from itertools import cycle
from typing import Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from runner.errors import RunnerError
from runner.leases.heartbeat import Heartbeats
from runner.leases.memory import MemoryLeasePlane
from runner.leases.port import BeatAnswer, Heartbeat
from tests.virtual_time import LoopClock, VirtualTimeLoop

BEAT, TIMEOUT, LEASE = 5.0, 3.0, 20.0
REPLICAS = ("r1", "r2")
Word = Literal["dispatch", "fails", "unfenced", "paused", "parked", "ended", "cut", "mend", "wait"]


class Line:
    """One replica's way to the plane: slow in both directions, or cut: then some are asked and not heard."""

    shared = True

    def __init__(self, plane: MemoryLeasePlane, delays: list[float]) -> None:
        self._plane = plane
        self._delays = cycle(delays)
        self.cut = False

    def mend(self) -> None:
        """Quick and whole from now on."""
        self.cut, self._delays = False, cycle([0.0])

    async def beat(self, beat: Heartbeat) -> BeatAnswer:
        await asyncio.sleep(next(self._delays))
        if self.cut and next(self._delays) > 0:
            await asyncio.Event().wait()
        answer = await self._plane.beat(beat)
        await asyncio.sleep(next(self._delays))
        if self.cut:
            raise RunnerError("plane_unavailable", "scripted")
        return answer


class Replica:
    """What a session believes of itself, and the beats that go with it."""

    def __init__(self, name: str, plane: MemoryLeasePlane, delays: list[float]) -> None:
        self.name = name
        self.line = Line(plane, delays)
        self.view: tuple[str, str] | None = None
        self.lost: list[str] = []
        self.turns = 0
        self.tasks: list[asyncio.Task[None]] = []
        self.beats = Heartbeats(
            self.line,  # type: ignore[arg-type]
            LoopClock(),
            beat_seconds=BEAT,
            beat_timeout_seconds=TIMEOUT,
            on_lost=self.on_lost,
            rivals=lambda: True,
        )

    def on_lost(self, turn: str, answer: BeatAnswer) -> None:
        self.lost.append(turn)
        if self.view is not None and self.view[0] == turn:
            self.view = None
        self.tasks.append(asyncio.create_task(self.ends(turn, "ended")))

    def beat(self, turn: str, phase: str, predecessor: str | None = None) -> Heartbeat:
        return Heartbeat("p", "s", turn, self.name, phase, predecessor)  # type: ignore[arg-type]

    @property
    def certain(self) -> bool:
        """Whether it may write for the session because the plane granted it."""
        held = self.beats._held.get(("p", "s"))
        return held is not None and held.lease_seconds == LEASE and self.beats.holds("p", "s", held.beat.turn_id)

    async def dispatch(self, how: Word, predecessor: str | None) -> None:
        self.turns += 1
        turn = f"{self.name}-{self.turns}"
        one = self.beat(turn, "running", predecessor)
        try:
            answer = await self.beats.first(one)
        except RunnerError:
            if how != "unfenced" or (self.view is not None and self.view[1] == "running"):
                return
            answer = self.beats.unfenced(one)
        if not answer.admitted:
            return
        if how == "fails":
            await self.beats.give_back(one)
        elif turn not in self.lost:
            self.view = (turn, "running")

    def do(self, word: Word) -> None:
        if word in ("dispatch", "fails", "unfenced"):
            if self.view is None or self.view[1] != "running":
                self.tasks.append(asyncio.create_task(self.dispatch(word, self.view[0] if self.view else None)))
        elif word in ("cut", "mend"):
            self.line.cut = word == "cut"
        elif word != "wait" and self.view is not None and (self.view[1] == "running" or word == "ended"):
            turn = self.view[0]
            self.view = None if word == "ended" else (turn, word)
            self.tasks.append(asyncio.create_task(self.ends(turn, word)))

    async def ends(self, turn: str, phase: str) -> None:
        await self.beats.end(self.beat(turn, phase))


async def tell(steps: list[tuple[float, str, Word]], delays: list[float]) -> None:
    plane = MemoryLeasePlane(LoopClock(), LEASE, shared=True)
    replicas = {name: Replica(name, plane, delays[n:] + delays[:n]) for n, name in enumerate(REPLICAS)}

    async def watch() -> None:
        while True:
            assert sum(replica.certain for replica in replicas.values()) <= 1, "two replicas hold the session"
            await asyncio.sleep(0.25)

    watching = asyncio.create_task(watch())
    for seconds, name, word in steps:
        replicas[name].do(word)
        await asyncio.sleep(seconds)
    for replica in replicas.values():
        replica.line.mend()
    await asyncio.sleep(3 * LEASE)
    assert not watching.done(), watching.exception()
    watching.cancel()
    quick = 2 * max(delays) < TIMEOUT and not any(word in ("cut", "unfenced") for _, _, word in steps)
    if quick:
        assert [replica.lost for replica in replicas.values()] == [[], []], "nothing is lost while everybody answers"
    for replica in replicas.values():
        await asyncio.gather(*replica.tasks)
        check(replica, plane)
        await replica.beats.close()


def check(replica: Replica, plane: MemoryLeasePlane) -> None:
    """Once all is calm, what a replica believes is what it renews, and what it renews is what the plane has."""
    held, lease = replica.beats._held.get(("p", "s")), plane.lease("p", "s")
    believed = None if held is None else (held.beat.turn_id, held.beat.phase)
    assert believed == replica.view, (believed, replica.view, lease)
    if replica.view is None:
        assert lease.owner != replica.name, lease
        return
    turn, phase = replica.view
    assert lease.owner == replica.name
    assert lease.last_turn == turn
    assert (lease.alive, lease.running) == {
        "running": (turn, turn),
        "paused": (turn, None),
        "parked": (None, None),
    }[phase]


STEPS = st.tuples(
    st.sampled_from([0.0, 0.5, 2.0, 5.0, 12.0, 21.0]),
    st.sampled_from(REPLICAS),
    st.sampled_from(["dispatch", "dispatch", "fails", "unfenced", "paused", "parked", "ended", "cut", "mend", "wait"]),
)
DELAYS = st.sampled_from([0.01, 1.4, 2.0]).flatmap(
    lambda longest: st.lists(st.sampled_from([0.0, longest / 2, longest]), min_size=7, max_size=7)
)


@settings(max_examples=200)
@given(st.lists(STEPS, min_size=2, max_size=25), DELAYS)
def test_at_no_instant_two_replicas_hold_a_session_and_calm_finds_all_agreed(
    steps: list[tuple[float, str, Word]], delays: list[float]
):
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(tell(steps, delays))
