"""Whatever goes away and whenever: the store ends up as if it had always answered."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from runner.store.memory import MemoryStore
from runner.store.port import Admission, Store
from runner.store.spool import SpooledStore
from tests.plane.remote import Remote
from tests.store.rows import ending, prompt, question, record, session, turn
from tests.virtual_time import LoopClock, VirtualTimeLoop

SESSIONS = ("a", "b")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.sampled_from(SESSIONS)),
        st.tuples(st.just("turn"), st.sampled_from(SESSIONS)),
        st.tuples(st.just("store"), st.sampled_from(["away", "deaf", "hang", "back"])),
        st.tuples(st.just("wait"), st.sampled_from([0.1, 1.0, 7.0])),
        st.tuples(st.just("restart"), st.none()),
    ),
    max_size=40,
)


class Writer:
    """One owner's writes of two sessions, in the order that sessions make them."""

    def __init__(self) -> None:
        self.turns = dict.fromkeys(SESSIONS, 0)
        self.records = dict.fromkeys(SESSIONS, 0)

    async def next_turn(self, store: Store, name: str) -> None:
        """End the turn before, and admit the next."""
        if self.turns[name]:
            await self._end(store, name)
        self.turns[name] += 1
        self.records[name] = 0
        own = turn(f"{name}{self.turns[name]}", self.turns[name], name)
        first = self._record(name)
        asked = prompt(f"p{name}{self.turns[name]}", in_session=name, turn_id=own.turn_id)
        assert await store.admit(Admission(self._head(name), own, asked, (), [first]))

    async def write(self, store: Store, name: str) -> None:
        """A record, a question and a prompt of the turn."""
        if not self.turns[name]:
            await self.next_turn(store, name)
        row = self._record(name)
        asked = question(f"i{name}{self.turns[name]}", in_session=name, turn_id=f"{name}{self.turns[name]}")
        done = await store.append([row], [replace(asked, answer={"n": row.n})])
        assert done.quarantined == 0

    async def _end(self, store: Store, name: str) -> None:
        own = turn(f"{name}{self.turns[name]}", self.turns[name], name)
        row = self._record(name)
        closed = question(f"i{name}{self.turns[name]}", "cancelled", name, turn_id=own.turn_id)
        done = prompt(f"p{name}{self.turns[name]}", "done", name, turn_id=own.turn_id)
        assert await store.end(ending(own, session=self._head(name), records=[row], interactions=[closed], prompt=done))

    def _record(self, name: str) -> Any:
        self.records[name] += 1
        epoch, n = self.turns[name], self.records[name]
        return record(n, epoch, name, turn_id=f"{name}{epoch}")

    def _head(self, name: str) -> Any:
        return session(name, 1000 + self.turns[name], head_epoch=self.turns[name], head_n=self.records[name])


async def everything(store: Store) -> list[Any]:
    found: list[Any] = [await store.open_turns(), await store.paused_turns(), await store.quarantined("p", 100)]
    for name in SESSIONS:
        found += [await store.session("p", name), await store.records("p", name, None, 1000)]
        found += [await store.interactions("p", name), await store.last_turn("p", name)]
        found += [await store.prompt("p", name, f"p{name}{n}") for n in range(12)]
    return found


async def run(steps: list[tuple[str, Any]], path: Path) -> None:
    remote, twin, writer, mirror = Remote(), MemoryStore("store_twin"), Writer(), Writer()
    rejected: list[str] = []

    async def opened() -> SpooledStore:
        return await SpooledStore.open(
            remote,
            path,
            LoopClock(),
            may_spool=lambda *_: True,
            on_rejected=lambda project, session_id, turn_id: rejected.append(turn_id),
        )

    store = await opened()
    for kind, what in steps:
        if kind == "write":
            await writer.write(store, what)
            await mirror.write(twin, what)
        elif kind == "turn":
            await writer.next_turn(store, what)
            await mirror.next_turn(twin, what)
        elif kind == "wait":
            await asyncio.sleep(what)
        elif kind == "restart":
            shut = remote.unavailable
            await store.close()
            remote.unavailable = shut
            store = await opened()
        else:
            remote.unavailable = what == "away"
            remote.deaf = what == "deaf"
            remote.hang = 5.0 if what == "hang" else 0.0
    remote.unavailable = remote.deaf = False
    remote.hang = 0.0
    async with asyncio.timeout(60):
        while store.waiting:
            await asyncio.sleep(0.1)
    assert await everything(store) == await everything(twin)
    assert rejected == []
    await store.close()


@settings(max_examples=80)
@given(STEPS)
def test_outages_lost_answers_and_restarts_leave_no_trace(steps: list[tuple[str, Any]]):
    with TemporaryDirectory() as folder, asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run(steps, Path(folder) / "spool"))
