"""Owners that are killed, frozen and drained; a plane that is killed: nothing is lost, nothing counts twice."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from runner.client import ApiError
from tests.agents import Gate
from tests.e2e.server import SECONDS
from tests.replicas.bed import BEAT, LEASE, Cluster, Session, until, until_async
from tests.replicas.conftest import Sessions
from tests.replicas.test_any_replica import ASKING, POLITE, TWO_QUESTIONS, gated, paused

SURVIVED_SECONDS = 5.0
"""How long a session may be unusable behind the death of its owner on the same machine."""


def outcomes(records: list[dict[str, Any]]) -> dict[str, str]:
    return {record["data"]["turn_id"]: record["data"]["outcome"] for record in records if record["type"] == "done"}


async def test_an_owner_that_is_killed_is_survived(fresh: Cluster, sessions: Sessions, tmp_path: Path) -> None:
    """Cases L2, M1 and M3: one ``lost`` ending, written once; the next prompt runs at the survivor at once."""
    session, cluster = sessions(), fresh
    gate = Gate(tmp_path / "gate")
    turn = session.dispatch(cluster.a, gated(gate))
    await gate.reached(SECONDS)
    assert await session.owner(turn) is cluster.a
    through = session.dispatch(cluster.b, gated(gate))
    assert (await through.result())["error"]["code"] == "session_turn_in_use"
    seen: list[dict[str, Any]] = []
    following = asyncio.create_task(_until_idle(session, cluster, seen))
    await until(lambda: seen, "the follower reads")
    cluster.a.kill()
    began = time.monotonic()
    result = await session.prompt(cluster.b, POLITE)
    assert time.monotonic() - began < SURVIVED_SECONDS
    assert (result["ok"], result["start"]) == (True, "cold")
    with pytest.raises(ApiError) as broken:
        await turn.result()
    assert broken.value.code == "stream_broken"
    lost = (await turn.event("turn_admitted"))["turn_id"]
    records = await session.check(*[door for door in cluster.doors if door is not cluster.a])
    assert outcomes(records) == {lost: "lost", result["turn_id"]: "completed"}
    async with asyncio.timeout(SECONDS):
        await following
    assert [line["data"]["outcome"] for line in seen if line["type"] == "done"] == ["lost", "completed"]
    cluster.a.start()
    assert (await session.prompt(cluster.a, POLITE))["start"] == "hit"
    assert outcomes(await session.check())[lost] == "lost"


async def _until_idle(session: Session, cluster: Cluster, seen: list[dict[str, Any]]) -> None:
    """Follow at the survivor until the next turn is over."""
    async for line in session.at(cluster.b).events(session.session, follow=True):
        seen.append(line)
        if line["type"] == "done" and line["data"]["outcome"] == "completed":
            return


async def test_a_restart_takes_over_from_itself(fresh: Cluster, sessions: Sessions, tmp_path: Path) -> None:
    """Case M1: killed and started again within its own lease, with nobody else there."""
    session, cluster = sessions(), fresh
    gate = Gate(tmp_path / "gate")
    turn = session.dispatch(cluster.a, gated(gate))
    await gate.reached(SECONDS)
    lost = (await turn.event("turn_admitted"))["turn_id"]
    cluster.a.kill()
    with pytest.raises(ApiError):
        await turn.result()
    cluster.a.start()
    began = time.monotonic()
    result = await session.prompt(cluster.a, POLITE)
    assert time.monotonic() - began < SURVIVED_SECONDS
    assert result["ok"], result
    records = await session.check()
    assert outcomes(records) == {lost: "lost", result["turn_id"]: "completed"}


async def test_nothing_counts_that_a_frozen_owner_does_when_it_wakes(
    fresh: Cluster, sessions: Sessions, tmp_path: Path
) -> None:
    """Case B10: frozen past its lease; another replica runs the session; then it wakes with a turn half done."""
    session, cluster = sessions(), fresh
    gate = Gate(tmp_path / "gate")
    turn = session.dispatch(cluster.a, gated(gate))
    await gate.reached(SECONDS)
    lost = (await turn.event("turn_admitted"))["turn_id"]
    cluster.a.freeze()
    with pytest.raises(ApiError) as owned:
        await session.dispatch(cluster.b, POLITE, prompt_id="early").result()
    assert (owned.value.code, owned.value.problem["owner"]) == ("owned_elsewhere", cluster.a.replica_id)
    assert [
        record["data"]["turn_id"] for record in await session.records(cluster.b) if "turn_id" in record["data"]
    ] == [lost]
    await asyncio.sleep(LEASE)
    result = await session.prompt(cluster.b, POLITE, prompt_id="early")
    assert result["ok"], result
    before = await session.records(cluster.b)
    gate.open()
    await asyncio.sleep(BEAT)
    cluster.a.thaw()
    with pytest.raises(ApiError):
        await _whole(turn)
    await until_async(lambda: _forgotten(session, cluster), "the woken replica gives the session up")
    assert await session.records(cluster.b) == before
    assert outcomes(await session.check())[lost] == "lost"
    assert (await session.prompt(cluster.a, POLITE))["start"] == "hit"
    other = sessions()
    assert (await other.prompt(cluster.a, POLITE))["ok"]
    await other.check()


async def _whole(turn: Any) -> None:
    """The stream of a superseded turn either breaks or says so; it never says that the turn went well."""
    result = await turn.result()
    assert not result["ok"], result
    raise ApiError("superseded", 200, "it ended so")


async def _forgotten(session: Session, cluster: Cluster) -> bool:
    view = await session.view(cluster.a)
    return bool(view["state"] == "idle" and view["last_turn"] == (await session.view(cluster.b))["last_turn"])


async def test_a_drain_hands_its_sessions_over(fresh: Cluster, sessions: Sessions, tmp_path: Path) -> None:
    """Case M4: a short turn, a long one and a paused one, with nobody connected; then another replica goes on."""
    cluster = fresh
    short, long, parked = sessions(), sessions(), sessions()
    gates = [Gate(tmp_path / "short"), Gate(tmp_path / "long")]
    await paused(parked, cluster.a, ASKING)
    for session, gate in zip((short, long), gates, strict=True):
        turn = session.dispatch(cluster.a, gated(gate))
        await gate.reached(SECONDS)
        await turn.drop()
    seen: list[dict[str, Any]] = []
    following = asyncio.create_task(_until_idle(long, cluster, seen))
    await until(lambda: seen, "the follower reads")
    cluster.a.terminate()
    gates[0].open()
    assert await asyncio.to_thread(cluster.a.exit_code) == 0, cluster.said()
    doors = [door for door in cluster.doors if door is not cluster.a]
    assert list(outcomes(await short.check(*doors)).values()) == ["completed"]
    assert list(outcomes(await long.check(*doors)).values()) in (["cancelled"], ["failed"])
    for session in (short, long, parked):
        result = await session.prompt(cluster.b, POLITE)
        assert result["ok"], result
        await session.check(*doors)
    async with asyncio.timeout(SECONDS):
        await following
    assert [line["type"] for line in seen].count("done") == 2
    assert len({line["cursor"] for line in seen}) == len(seen)


async def test_questions_outlive_their_owner(fresh: Cluster, sessions: Sessions) -> None:
    """The owner is killed while two are open; at the survivor a new agent asks again and is told what was answered."""
    session, cluster = sessions(), fresh
    await paused(session, cluster.a, TWO_QUESTIONS, 2)
    cluster.a.kill()
    questions = await until_async(lambda: session.questions(cluster.b), "the questions at the survivor")
    by_title = {item["tool_call"]["title"]: item["interaction_id"] for item in questions}
    for title, decision in (("second", "allow"), ("first", "deny")):
        answered = await session.at(cluster.b).answer(session.session, by_title[title], decision=decision)
        assert answered["status"] in ("answered", "consumed"), answered
    records = await session.check(*[door for door in cluster.doors if door is not cluster.a])
    endings = list(outcomes(records).values())
    assert (endings[0], endings[-1]) == ("paused", "completed")
    text = "".join(record["data"]["text"] for record in records if record["type"] == "message")
    assert "first denied. " in text
    assert "second allowed. " in text
    assert (await session.prompt(cluster.b, POLITE))["ok"]


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_a_plane_that_comes_back_is_ridden_out(
    patient: Cluster, sessions: Sessions, tmp_path: Path, how: str
) -> None:
    """Case M8: away for less than a lease; the turn goes on, ends and is whole."""
    session, cluster = sessions(), patient
    gate = Gate(tmp_path / "gate")
    turn = session.dispatch(cluster.a, gated(gate))
    await gate.reached(SECONDS)
    (cluster.kill_plane if how == "killed" else cluster.freeze_plane)()
    await asyncio.sleep(4 * BEAT)
    (cluster.restart_plane if how == "killed" else cluster.thaw_plane)()
    gate.open()
    result = await turn.result()
    assert (result["outcome"], result["text"]) == ("completed", "one two"), cluster.said()
    records = await session.check()
    assert outcomes(records) == {result["turn_id"]: "completed"}
    assert "".join(record["data"]["text"] for record in records if record["type"] == "message") == "one two"
    assert (await session.prompt(cluster.b, POLITE))["ok"]
    await session.check()


async def test_a_plane_that_forgot_everything_gives_no_running_turn_away(
    patient: Cluster, sessions: Sessions, tmp_path: Path
) -> None:
    """Case M8: killed and back empty, and the other replica is asked before the owner beats again."""
    session, cluster = sessions(), patient
    gate = Gate(tmp_path / "gate")
    turn = session.dispatch(cluster.a, gated(gate))
    await gate.reached(SECONDS)
    cluster.a.freeze()
    cluster.kill_plane()
    cluster.restart_plane()
    for _ in range(3):
        refused = await session.prompt(cluster.b, POLITE)
        assert (refused["error"] or {}).get("code") == "session_turn_in_use", refused
    cluster.a.thaw()
    gate.open()
    result = await turn.result()
    assert (result["outcome"], result["text"]) == ("completed", "one two"), cluster.said()
    assert outcomes(await session.check()) == {result["turn_id"]: "completed"}
    assert (await session.prompt(cluster.b, POLITE))["ok"]
    await session.check()


async def test_a_dead_owner_that_the_plane_forgot_is_taken_over(
    fresh: Cluster, sessions: Sessions, tmp_path: Path
) -> None:
    """Cases M3 and M8: nobody can prove its death any more, so its silence for one lease time does."""
    session, cluster = sessions(), fresh
    gate = Gate(tmp_path / "gate")
    turn = session.dispatch(cluster.a, gated(gate))
    await gate.reached(SECONDS)
    lost = (await turn.event("turn_admitted"))["turn_id"]
    cluster.a.freeze()
    cluster.kill_plane()
    cluster.a.kill()
    cluster.restart_plane()
    with pytest.raises(ApiError):
        await turn.result()

    async def taken() -> Any:
        result = await session.dispatch(cluster.b, POLITE).result()
        return result if result["ok"] else None

    result = await until_async(taken, "the survivor takes the session")
    records = await session.check(*[door for door in cluster.doors if door is not cluster.a])
    assert outcomes(records) == {lost: "lost", result["turn_id"]: "completed"}


async def test_a_plane_that_is_away_for_longer_leaves_every_turn_one_ending(
    fresh: Cluster, sessions: Sessions, tmp_path: Path
) -> None:
    """Past the lease another owner has become possible, so the owner stops the turn itself (DESIGN 3.1.7)."""
    session, cluster = sessions(), fresh
    gate = Gate(tmp_path / "gate")
    turn = session.dispatch(cluster.a, gated(gate))
    await gate.reached(SECONDS)
    cluster.kill_plane()
    await asyncio.sleep(2 * LEASE)
    cluster.restart_plane()
    gate.open()
    result = await turn.result()
    assert result["text"].startswith("one ")
    records = await session.check()
    assert outcomes(records).keys() == {result["turn_id"]}
    assert (await session.prompt(cluster.b, POLITE))["ok"]
    await session.check()
