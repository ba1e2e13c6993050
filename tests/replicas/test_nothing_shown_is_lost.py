"""kill -9 of an owner: what anybody was shown, at whatever replica, is what every replica tells later (DESIGN 3.9)."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.agents import Gate, directive, steps
from tests.e2e.server import SECONDS
from tests.normal_form import Final, normal_form
from tests.postgres_server import PostgresServer
from tests.redis_server import RedisServer
from tests.replicas.bed import Cluster, Member, Session, until, until_async
from tests.replicas.conftest import Sessions

Line = dict[str, Any]
TOLD = [
    steps.thought("let me "),
    steps.thought("see"),
    *(steps.text(f"word {n} ") for n in range(30)),
    steps.tool("call-1", "in_progress", "ls"),
    steps.tool_status("call-1", "completed"),
    steps.text("and "),
    steps.text("on"),
]
"""Records that wait for a flush, and a message that is not closed."""


def streamed(events: list[Line]) -> str:
    return "".join(event["data"]["text"] for event in events if event["type"] == "message_delta")


def all_of_it(events: list[Line]) -> bool:
    return streamed(events).endswith("and on")


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


@dataclass
class Kind:
    """What the replicas share, and how it is kept from taking anything."""

    name: str
    cluster: Cluster
    redis: RedisServer
    postgres: PostgresServer

    @contextmanager
    def takes_nothing(self) -> Iterator[None]:
        """Nothing can be written to the store meanwhile; at the end of it the stream is gone, if there is one."""
        if self.name in ("postgres", "stream"):
            self.postgres.stop()
            try:
                yield
                self.redis.command("DEL", "acp:records")
            finally:
                self.postgres.cont()
            return
        plane, folder = self.cluster.plane, self.cluster.a.folder.parent
        store = plane.state_dir / "store.sqlite3" if plane is not None else folder / "shared.sqlite3"
        database = sqlite3.connect(store, isolation_level=None, timeout=SECONDS)
        try:
            database.execute("BEGIN IMMEDIATE")
            yield
        finally:
            database.close()


@pytest.fixture(params=["redis", "plane", "postgres", "stream"])
def kind(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    redis_server: RedisServer,
    postgres_server: PostgresServer,
    postgres_url: str,
) -> Iterator[Kind]:
    """Two runners over a shared SQLite file, a plane, a PostgreSQL, or that behind a stream that nobody reads."""
    name = request.param
    redis = None if name == "plane" else redis_server
    postgres = postgres_server if name in ("postgres", "stream") else None
    made = Cluster(tmp_path_factory.mktemp(name), redis, postgres=postgres)
    if name == "stream":
        for member in made.members:
            member.config.write_text(f'{member.config.read_text()}\n[records]\nstream = "{redis_server.url}"\n')
    try:
        made.start()
        yield Kind(name, made, redis_server, postgres_server)
    finally:
        postgres_server.ready()
        redis_server.ready()
        made.over()


@pytest.fixture
def fresh(kind: Kind) -> Cluster:
    """The cluster of the test."""
    return kind.cluster


def before_the_end(items: list[Final]) -> list[Final]:
    """All but the lost turn's ending."""
    return items[: next(place for place, item in enumerate(items) if item.type == "error")]


async def test_a_killed_owner_loses_nothing_that_was_shown(
    kind: Kind, fresh: Cluster, sessions: Sessions, tmp_path: Path
) -> None:
    """Cases G1 and H4: the survivor of the machine proves the death, reads what was shown, then ends the turn."""
    session = sessions()
    gate, end = Gate(tmp_path / "gate"), Gate(tmp_path / "end")
    turn = session.dispatch(fresh.a, directive(steps.gate(gate), *TOLD, steps.gate(end)))
    await gate.reached(SECONDS)
    assert await session.owner(turn) is fresh.a
    here, there = Follower(session, fresh.a), Follower(session, fresh.b)
    await until(lambda: here.events and there.events, "both read")
    with kind.takes_nothing():
        gate.open()
        await until(lambda: all_of_it(here.events), "who follows at the owner has seen it")
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


async def test_a_restarted_owner_hands_in_what_it_had_shown(
    kind: Kind, fresh: Cluster, sessions: Sessions, tmp_path: Path
) -> None:
    """Nobody else was there: its own successor reads the state directory (cases L2, M3)."""
    session = sessions()
    gate, end = Gate(tmp_path / "gate"), Gate(tmp_path / "end")
    await asyncio.to_thread(fresh.b.stop)
    turn = session.dispatch(fresh.a, directive(steps.gate(gate), *TOLD, steps.gate(end)))
    await gate.reached(SECONDS)
    here = Follower(session, fresh.a)
    await until(lambda: here.events, "it reads")
    with kind.takes_nothing():
        gate.open()
        await until(lambda: all_of_it(here.events), "who follows has seen it")
        fresh.a.kill()
    await turn.drop()
    seen = normal_form(await here.over())
    fresh.a.start()
    await until_async(lambda: _ended(session, fresh.a), "the turn has its ending")
    assert before_the_end(normal_form(await session.records(fresh.a))) == seen


async def _ended(session: Session, member: Member) -> bool:
    return any(record["type"] == "session_idle" for record in await session.records(member))
