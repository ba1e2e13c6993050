"""A plane and two runners as processes: what a runner accepted while the plane was away counts (cases G1, M3)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp import ClientSession

from runner.client import Client
from tests.agents import Gate
from tests.e2e.server import SECONDS, Server
from tests.replicas.bed import Cluster, Session, until_async
from tests.replicas.test_any_replica import POLITE, gated
from tests.replicas.test_deaths import outcomes
from tests.server.scraped import Scraped, scrape


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, None, lease=30.0)
    try:
        made.start()
        yield made
    finally:
        made.over()


@pytest.fixture
async def session(cluster: Cluster) -> AsyncIterator[Session]:
    async with AsyncExitStack() as stack:
        clients: dict[str, Client] = {}
        for member in cluster.doors:
            clients[member.folder.name] = await stack.enter_async_context(member.client())
        yield Session(cluster, clients, "s1")


async def numbers(member: Server) -> Scraped:
    async with ClientSession(member.url, headers={"Authorization": f"Bearer {member.token}"}) as http:
        return await scrape(http)


async def finished_without_the_plane(cluster: Cluster, session: Session, tmp_path: Path) -> str:
    """A turn at ``a`` that the plane admitted and whose ending it does not know; its id."""
    gate = Gate(tmp_path / "gate")
    turn = session.dispatch(cluster.a, gated(gate))
    await gate.reached(SECONDS)
    assert cluster.plane is not None
    cluster.plane.freeze()
    gate.open()
    result = await turn.result()
    assert (result["outcome"], result["text"]) == ("completed", "one two"), cluster.said()
    now = await numbers(cluster.a)
    assert now.of("spool_writes") > 0
    assert now.of("spool_bytes") > 0
    assert now.of("store_errors_total", code="store_unavailable") > 0
    cluster.a.kill()
    return str(result["turn_id"])


async def whole(cluster: Cluster, session: Session, turn_id: str) -> None:
    records = await session.records(cluster.b)
    assert outcomes(records) == {turn_id: "completed"}, cluster.said()
    assert "".join(record["data"]["text"] for record in records if record["type"] == "message") == "one two"


async def test_who_takes_over_hands_in_what_the_dead_owner_had_accepted(
    cluster: Cluster, session: Session, tmp_path: Path
) -> None:
    """The client was told ``completed``: that stays so although its runner died before the plane woke."""
    turn_id = await finished_without_the_plane(cluster, session, tmp_path)
    assert cluster.plane is not None
    cluster.plane.thaw()

    async def ended() -> bool:
        return bool(outcomes(await session.records(cluster.b)))

    await until_async(ended, "the turn has its ending")
    await whole(cluster, session, turn_id)
    assert (await session.prompt(cluster.b, POLITE))["ok"]


async def test_a_runner_that_comes_back_hands_in_its_own(cluster: Cluster, session: Session, tmp_path: Path) -> None:
    turn_id = await finished_without_the_plane(cluster, session, tmp_path)
    assert cluster.plane is not None
    cluster.b.kill()
    cluster.plane.kill()
    cluster.a.start()
    cluster.plane.start()
    cluster.b.start()

    async def ended() -> bool:
        return bool(outcomes(await session.records(cluster.b)))

    await until_async(ended, "the turn has its ending")
    await whole(cluster, session, turn_id)
    assert (await session.prompt(cluster.a, POLITE))["ok"]
    assert (await numbers(cluster.plane)).of("records_written_total") > 0
    assert (await numbers(cluster.plane)).of("turns_total") == 0, "a turn is counted where it ended"
    assert (await numbers(cluster.a)).of("turns_total", outcome="completed") == 1
