"""Live events over Redis alone: the owner's address reaches nobody (cases H6, H8, H10, M8, N5)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agents import Gate, directive, steps
from tests.e2e.server import SECONDS
from tests.redis_server import RedisServer
from tests.replicas.bed import Cluster, Member, Session
from tests.replicas.test_any_replica import POLITE

NOWHERE = '[server]\nadvertise_url = "http://127.0.0.1:1"\n'


@pytest.fixture
def cluster(tmp_path: Path, redis_server: RedisServer) -> Iterator[Cluster]:
    """Two runners that reach each other over Redis only; their leases outlive what is done to it."""
    made = Cluster(tmp_path / "cluster", redis_server, 30.0)
    for member in (made.a, made.b):
        member.config.write_text(member.config.read_text() + NOWHERE)
    try:
        made.start()
        yield made
    finally:
        made.over()


@pytest.fixture
async def session(cluster: Cluster) -> AsyncIterator[Session]:
    async with cluster.a.client() as a, cluster.b.client() as b:
        yield Session(cluster, {"a": a, "b": b}, "live")


class Follower:
    """Follows the session at one member."""

    def __init__(self, session: Session, member: Member, after: str | None = None) -> None:
        self.lines: list[dict[str, Any]] = []
        self._task = asyncio.create_task(self._follow(session, member, after))

    async def _follow(self, session: Session, member: Member, after: str | None) -> None:
        async for line in session.at(member).events(session.session, after=after, follow=True):
            self.lines.append(line)

    @property
    def text(self) -> str:
        return "".join(line["data"]["text"] for line in self.lines if line["type"] == "message_delta")

    async def until(self, done: Any) -> None:
        async with asyncio.timeout(SECONDS):
            while not done():
                assert not self._task.done(), self._task
                await asyncio.sleep(0.01)

    async def idle(self, count: int = 1) -> list[dict[str, Any]]:
        """Until the session was idle so often; what it saw."""
        await self.until(lambda: [line["type"] for line in self.lines].count("session_idle") >= count)
        self._task.cancel()
        await asyncio.wait({self._task})
        return self.lines


def script(gates: list[Gate]) -> str:
    """A word, then another behind each gate."""
    words = [part for n, gate in enumerate(gates) for part in (steps.gate(gate), steps.text(f"word{n + 1} "))]
    return directive(steps.text("word0 "), *words, steps.reply())


def contiguous(lines: list[dict[str, Any]]) -> None:
    cursors = [tuple(map(int, line["cursor"].split("."))) for line in lines]
    assert cursors == [(cursors[0][0], cursors[0][1] + n) for n in range(len(cursors))]


async def test_frames_of_an_owner_that_nobody_reaches(cluster: Cluster, session: Session, tmp_path: Path) -> None:
    """Case H6: at once, from the beginning of the open message; and again from a cursor."""
    gates = [Gate(tmp_path / f"gate{n}") for n in range(3)]
    turn = session.dispatch(cluster.a, script(gates))
    await gates[0].reached(SECONDS)
    first = Follower(session, cluster.b)
    await first.until(lambda: first.text == "word0 ")
    gates[0].open()
    await first.until(lambda: first.text == "word0 word1 ")
    second = Follower(session, cluster.b, first.lines[-1]["cursor"])
    gates[1].open()
    await second.until(lambda: second.text == "word2 ")
    assert (await session.records(cluster.b))[0]["type"] == "session_busy"
    gates[2].open()
    assert (await turn.result())["ok"]
    seen, rest = await first.idle(), await second.idle()
    contiguous(seen)
    assert seen[-len(rest) :] == rest
    assert [line["type"] for line in seen][:1] == ["session_busy"]


async def test_a_hundred_followers_cost_one_writer(
    cluster: Cluster, session: Session, redis_server: RedisServer, tmp_path: Path
) -> None:
    """Case H8: Redis counts what is appended."""

    def appended() -> int:
        found = re.search(rb"cmdstat_xadd:calls=(\d+)", redis_server.command("INFO", "commandstats"))
        return int(found[1]) if found else 0

    counts = []
    for nth, many in ((1, 1), (2, 100)):
        gates = [Gate(tmp_path / f"gate{nth}.{n}") for n in range(20)]
        turn = session.dispatch(cluster.a, script(gates))
        await gates[0].reached(SECONDS)
        followers = [Follower(session, cluster.b) for _ in range(many)]
        for follower in followers:
            await follower.until(lambda follower=follower: follower.text.endswith("word0 "))
        before = appended()
        for n, gate in enumerate(gates):
            gate.open()
            for follower in followers:
                await follower.until(lambda follower=follower, n=n: follower.text.endswith(f"word{n + 1} "))
        assert (await turn.result())["ok"]
        seen = [await follower.idle(nth) for follower in followers]
        counts.append(appended() - before)
        assert all(lines == seen[0] for lines in seen)
    assert counts[1] <= counts[0] + 5, counts


async def test_it_goes_on_behind_a_killed_owner(cluster: Cluster, session: Session, tmp_path: Path) -> None:
    """Case H10."""
    gate = Gate(tmp_path / "gate")
    turn = session.dispatch(cluster.a, script([gate]))
    await gate.reached(SECONDS)
    follower = Follower(session, cluster.b)
    await follower.until(lambda: follower.text == "word0 ")
    cluster.a.kill()
    await follower.until(lambda: any(line["type"] == "done" for line in follower.lines))
    await turn.drop()
    assert (await session.prompt(cluster.b, POLITE))["ok"]

    def outcomes() -> list[str]:
        return [line["data"]["outcome"] for line in follower.lines if line["type"] == "done"]

    await follower.until(lambda: outcomes()[-2:] == ["lost", "completed"])
    await follower.idle()
    await session.check(cluster.b)


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_a_redis_that_goes_away_and_comes_back_costs_no_frame(
    cluster: Cluster, session: Session, tmp_path: Path, how: str
) -> None:
    """Cases H10 and M8: emptied, or frozen; the follower keeps its place and sees every event once."""
    gates = [Gate(tmp_path / f"gate{n}") for n in range(3)]
    turn = session.dispatch(cluster.a, script(gates))
    await gates[0].reached(SECONDS)
    follower = Follower(session, cluster.b)
    await follower.until(lambda: follower.text == "word0 ")
    (cluster.kill_plane if how == "killed" else cluster.freeze_plane)()
    gates[0].open()
    await gates[1].reached(SECONDS)
    await asyncio.sleep(2)
    (cluster.restart_plane if how == "killed" else cluster.thaw_plane)()
    gates[1].open()
    await follower.until(lambda: follower.text == "word0 word1 word2 ")
    gates[2].open()
    assert (await turn.result())["ok"]
    contiguous(await follower.idle())
