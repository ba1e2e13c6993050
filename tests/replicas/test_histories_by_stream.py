"""Export and fork where records travel by a stream into PostgreSQL, and no worker brings them there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.client import ApiError
from tests.agents import Gate, directive, steps
from tests.e2e.server import SECONDS
from tests.postgres_server import PostgresServer
from tests.redis_server import RedisServer
from tests.replicas.bed import Cluster, Session, until_async
from tests.replicas.conftest import Sessions
from tests.replicas.test_histories import POLITE, exported


@pytest.fixture
def fresh(
    tmp_path_factory: pytest.TempPathFactory,
    redis_server: RedisServer,
    postgres_server: PostgresServer,
    postgres_url: str,
) -> Iterator[Cluster]:
    """Two runners over an empty database and a stream that nobody reads."""
    made = Cluster(tmp_path_factory.mktemp("streaming"), redis_server, postgres=postgres_server)
    for member in made.members:
        member.config.write_text(f'{member.config.read_text()}\n[records]\nstream = "{redis_server.url}"\n')
    try:
        made.start()
        yield made
    finally:
        redis_server.ready()
        made.over()


async def test_what_is_still_in_the_stream_is_exported_and_forked(
    fresh: Cluster, sessions: Sessions, tmp_path: Path
) -> None:
    session, gate = sessions(), Gate(tmp_path / "gate")
    assert (await session.prompt(fresh.a, POLITE))["ok"]
    work = directive(steps.tool("call-1", "completed"), steps.gate(gate), steps.text("over"), steps.reply())
    turn = session.dispatch(fresh.a, work)
    await gate.reached(SECONDS)
    await turn.event("tool_call")
    *_, last, end = await exported(session, fresh.a)
    assert (last["type"], end["complete"], end["running_turn"]) == ("tool_call", True, last["turn_id"])
    assert (await exported(session, fresh.b))[-2:] == [last, end]
    made = await session.at(fresh.b).fork(session.session, last["cursor"], session_id=f"{session.session}-fork")
    assert made["complete"]
    fork = Session(fresh, session._clients, made["session_id"])
    result = await fork.prompt(fresh.b, POLITE)
    assert (result["ok"], result["context_lost"]) == (True, True)
    assert [one["data"]["tool_call_id"] for one in await fork.check() if one["type"] == "tool_call"] == ["call-1"]
    gate.open()
    assert (await turn.result())["ok"]
    await session.check()


async def test_a_killed_owners_history_is_exported_whole_by_another_replica(
    fresh: Cluster, sessions: Sessions, tmp_path: Path
) -> None:
    session, gate = sessions(), Gate(tmp_path / "gate")
    work = directive(steps.tool("call-1", "completed"), steps.text("half "), steps.gate(gate), steps.reply())
    turn = session.dispatch(fresh.a, work)
    await gate.reached(SECONDS)
    await turn.text("half ")
    owner = await session.owner(turn)
    seen = turn.events[-1]["cursor"]
    owner.kill()
    await turn.drop()
    other = session.other(owner)
    assert (await session.prompt(other, POLITE))["ok"]
    records = await session.check(other)
    assert next(one["data"]["text"] for one in records if one["type"] == "message") == "half "
    assert [one["data"]["outcome"] for one in records if one["type"] == "done"] == ["lost", "completed"]
    made = await session.at(other).fork(session.session, seen)
    assert made["complete"]
    *_, end = await exported(session, other, made["session_id"])
    assert end["complete"]


async def test_what_may_still_be_in_a_stream_that_is_away_is_not_passed_over(
    fresh: Cluster, sessions: Sessions, redis_server: RedisServer, tmp_path: Path
) -> None:
    session, gate = sessions(), Gate(tmp_path / "gate")
    work = directive(steps.tool("call-1", "completed"), steps.gate(gate), steps.text("over"), steps.reply())
    turn = session.dispatch(fresh.a, work)
    await gate.reached(SECONDS)
    await turn.event("tool_call")
    redis_server.kill()
    with pytest.raises(ApiError) as caught:
        await exported(session, await session.owner(turn))
    assert (caught.value.status, caught.value.retryable) == (503, True)
    redis_server.start()

    async def whole() -> bool:
        *_, last, end = await exported(session, fresh.a)
        return end["complete"] and last["type"] == "tool_call"

    await until_async(whole, "the export is whole again")
    gate.open()
    assert (await turn.result())["ok"]
    await session.check()
