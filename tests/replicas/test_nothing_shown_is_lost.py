"""kill -9 of an owner: what anybody was shown, at whatever replica, is what every replica tells later (DESIGN 3.9)."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.agents import Gate, directive, steps
from tests.e2e.server import SECONDS
from tests.normal_form import Final, normal_form
from tests.replicas.bed import Cluster, Member, Session, until, until_async
from tests.replicas.conftest import Sessions

Line = dict[str, Any]
WORDS = [steps.thought("let me "), steps.thought("see"), *(steps.text(f"word {n} ") for n in range(30))]
CALL = steps.tool("call-1", "in_progress", "ls")
CALLED = steps.tool_status("call-1", "completed")


def streamed(events: list[Line]) -> str:
    return "".join(event["data"]["text"] for event in events if event["type"] == "message_delta")


POINTS: dict[str, tuple[list[Any], Callable[[list[Line]], bool]]] = {
    "in a message": (WORDS, lambda seen: streamed(seen).endswith("word 29 ")),
    "behind a call": ([*WORDS, CALL, CALLED], lambda seen: seen[-1]["data"].get("status") == "completed"),
}


class Follower:
    """Reads a session's events at one replica until that is gone, or it is cancelled."""

    def __init__(self, session: Session, member: Member) -> None:
        self.events: list[Line] = []
        self._task = asyncio.create_task(self._read(session, member))

    async def _read(self, session: Session, member: Member) -> None:
        try:
            async for line in session.at(member).events(session.session, follow=True):
                if line["kind"] == "event":
                    self.events.append(line)
        except Exception:
            return

    async def over(self) -> list[Line]:
        self._task.cancel()
        await asyncio.wait({self._task})
        return self.events


@contextmanager
def locked(cluster: Cluster) -> Iterator[None]:
    """Nothing can be written to the store meanwhile."""
    plane = cluster.plane
    store = plane.state_dir / "store.sqlite3" if plane is not None else cluster.a.folder.parent / "shared.sqlite3"
    database = sqlite3.connect(store, isolation_level=None, timeout=SECONDS)
    try:
        database.execute("BEGIN IMMEDIATE")
        yield
    finally:
        database.close()


def before_the_end(items: list[Final]) -> list[Final]:
    """All but the lost turn's ending."""
    return items[: next(place for place, item in enumerate(items) if item.type == "error")]


@pytest.mark.parametrize("point", POINTS)
async def test_a_killed_owner_loses_nothing_that_was_shown(
    fresh: Cluster, sessions: Sessions, tmp_path: Path, point: str
) -> None:
    """The survivor of the same machine proves the death, reads what the owner showed, then ends the turn."""
    session, told, seen_all = sessions(), *POINTS[point]
    gate, end = Gate(tmp_path / "gate"), Gate(tmp_path / "end")
    turn = session.dispatch(fresh.a, directive(steps.gate(gate), *told, steps.gate(end)))
    await gate.reached(SECONDS)
    assert await session.owner(turn) is fresh.a
    here, there = Follower(session, fresh.a), Follower(session, fresh.b)
    await until(lambda: here.events and there.events, "both read")
    with locked(fresh):
        gate.open()
        await until(lambda: seen_all(here.events), "who follows at the owner has seen it")
        fresh.a.kill()
    await turn.drop()
    await until_async(lambda: _ended(session, fresh.b), "the turn has its ending")
    history = normal_form(await session.records(fresh.b))
    seen = normal_form(await here.over())
    assert before_the_end(history) == seen
    await until(lambda: there.events[-1]["type"] == "session_idle", "who follows at the survivor goes on")
    assert normal_form(await there.over()) == history, "whatever it had missed"
    fresh.a.start()
    assert normal_form(await session.records(fresh.a)) == history
    assert not list((fresh.a.state_dir / "live").glob("*")), "what is in the store is kept no longer"


async def _ended(session: Session, member: Member) -> bool:
    return any(record["type"] == "session_idle" for record in await session.records(member))
