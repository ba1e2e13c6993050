"""Export and fork at any replica, whoever holds the session."""

from __future__ import annotations

import asyncio
from pathlib import Path

from runner.client import ApiError
from tests.agents import Gate, directive, steps
from tests.e2e.server import SECONDS
from tests.e2e.talk import Line
from tests.replicas.bed import Cluster, Member, Session
from tests.replicas.conftest import Sessions

POLITE = directive(steps.text("the first answer"), steps.reply())


async def exported(session: Session, door: Member, name: str | None = None) -> list[Line]:
    return [line async for line in session.at(door).export(name or session.session)]


async def test_every_replica_exports_what_one_of_them_runs(
    cluster: Cluster, sessions: Sessions, tmp_path: Path
) -> None:
    session, gate = sessions(), Gate(tmp_path / "gate")
    assert (await session.prompt(cluster.a, POLITE))["ok"]
    work = directive(steps.tool("call-1", "completed"), steps.gate(gate), steps.text("done"), steps.reply())
    turn = session.dispatch(cluster.b, work)
    await gate.reached()
    await turn.event("tool_call")
    running = [await exported(session, door) for door in cluster.doors]
    for lines in running:
        assert lines[-1]["complete"], lines[-1]
        assert (lines[-2]["type"], lines[-1]["running_turn"]) == ("tool_call", lines[-2]["turn_id"])
        assert lines[1:] == running[0][1:]
    gate.open()
    assert (await turn.result())["ok"]
    whole = await session.check()
    for door in cluster.doors:
        *lines, end = await exported(session, door)
        assert end["complete"]
        assert [{**item, "kind": "record"} for item in whole] == lines[1:]


async def test_a_fork_made_anywhere_is_everywhere(cluster: Cluster, sessions: Sessions) -> None:
    session = sessions()
    assert (await session.prompt(cluster.a, POLITE))["ok"]
    head = (await session.check())[-1]["cursor"]
    for n, door in enumerate(cluster.doors):
        made = await session.at(door).fork(session.session, head, session_id=f"{session.session}-{n}")
        fork = Session(cluster, session._clients, made["session_id"])
        seen = [await exported(session, other, fork.session) for other in cluster.doors]
        assert all(lines[1:] == seen[0][1:] and lines[-1]["complete"] for lines in seen)
        result = await fork.prompt(session.other(cluster.a), POLITE)
        assert (result["ok"], result["context_lost"]) == (True, True)
        await fork.check()


async def test_two_replicas_make_one_fork(cluster: Cluster, sessions: Sessions) -> None:
    session = sessions()
    assert (await session.prompt(cluster.a, POLITE))["ok"]
    head = (await session.check())[-1]["cursor"]
    name = f"{session.session}-same"

    async def fork(door: Member) -> str:
        async with asyncio.timeout(SECONDS):
            while True:
                try:
                    made = await session.at(door).fork(session.session, head, session_id=name)
                except ApiError as error:
                    if not error.retryable:
                        raise
                    await asyncio.sleep(0.05)
                else:
                    return str(made["session_id"])

    assert set(await asyncio.gather(*map(fork, [*cluster.doors] * 2))) == {name}
    lines = await exported(session, cluster.a, name)
    assert lines[-1]["complete"]
    assert sum(line.get("type") == "notice" for line in lines) == 1
