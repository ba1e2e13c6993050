"""Two ``serve`` processes over a Redis and a PostgreSQL, which is killed and frozen under them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents import Gate
from tests.e2e.server import SECONDS
from tests.postgres_server import PostgresServer
from tests.redis_server import RedisServer
from tests.replicas.bed import Cluster, until_async
from tests.replicas.conftest import Sessions
from tests.replicas.test_any_replica import (
    POLITE,
    gated,
    test_a_question_is_answered_at_another_replica,
    test_a_retry_at_another_replica_attaches,
    test_a_stop_while_questions_are_open_leaves_no_card,
    test_dispatch_here_and_follow_everywhere,
    test_kill_and_delete_at_another_replica,
    test_the_next_prompt_is_warm_wherever_it_comes,
    test_two_at_once_at_two_replicas_b2,
)
from tests.replicas.test_deaths import (
    outcomes,
    test_a_drain_hands_its_sessions_over,
    test_a_restart_takes_over_from_itself,
    test_an_owner_that_is_killed_is_survived,
    test_nothing_counts_that_a_frozen_owner_does_when_it_wakes,
)

__all__ = [
    "test_a_drain_hands_its_sessions_over",
    "test_a_question_is_answered_at_another_replica",
    "test_a_restart_takes_over_from_itself",
    "test_a_retry_at_another_replica_attaches",
    "test_a_stop_while_questions_are_open_leaves_no_card",
    "test_an_owner_that_is_killed_is_survived",
    "test_dispatch_here_and_follow_everywhere",
    "test_kill_and_delete_at_another_replica",
    "test_nothing_counts_that_a_frozen_owner_does_when_it_wakes",
    "test_the_next_prompt_is_warm_wherever_it_comes",
    "test_two_at_once_at_two_replicas_b2",
]


@pytest.fixture
def fresh(
    tmp_path_factory: pytest.TempPathFactory,
    redis_server: RedisServer,
    postgres_server: PostgresServer,
    postgres_url: str,
) -> Iterator[Cluster]:
    """A cluster of one test, with an empty database."""
    made = Cluster(tmp_path_factory.mktemp("postgres"), redis_server, postgres=postgres_server)
    try:
        made.start()
        yield made
    finally:
        postgres_server.ready()
        made.over()


@pytest.fixture
def cluster(fresh: Cluster) -> Cluster:
    """The same for tests that would share one."""
    return fresh


@pytest.mark.parametrize("trouble", ["killed", "frozen"])
async def test_a_turn_ends_while_the_database_is_away(
    fresh: Cluster, sessions: Sessions, postgres_server: PostgresServer, tmp_path: Path, trouble: str
) -> None:
    """Case G1: its result comes, its records wait on the machine; afterwards both replicas tell the same history."""
    session = sessions()
    gate = Gate(tmp_path / "gate")
    turn = session.dispatch(fresh.a, gated(gate))
    await gate.reached(SECONDS)
    owner = await session.owner(turn)
    if trouble == "killed":
        postgres_server.kill()
    else:
        postgres_server.stop()
    gate.open()
    result = await turn.result()
    assert (result["ok"], result["text"]) == (True, "one two")
    assert not (await session.at(owner).ready())["ready"]
    postgres_server.ready()
    await until_async(lambda: ready(fresh, sessions), "everybody is ready again")
    records = await session.check()
    assert outcomes(records) == {result["turn_id"]: "completed"}
    assert [one["data"]["text"] for one in records if one["type"] == "message"] == ["one two"]
    again = await session.prompt(session.other(owner), POLITE)
    assert again["ok"]
    assert outcomes(await session.check())[again["turn_id"]] == "completed"
    assert postgres_server.password not in fresh.said()


async def ready(cluster: Cluster, sessions: Sessions) -> bool:
    session = sessions()
    told = await asyncio.gather(*(session.at(door).ready() for door in cluster.doors))
    return all(one["ready"] for one in told)
