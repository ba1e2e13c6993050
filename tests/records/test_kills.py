"""kill -9 of a worker and of a runner at named points, under running turns: what was streamed is what is stored."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.postgres_server import PostgresServer
from tests.records.bed import DemoGate, Fleet, Turns, WorkerProcess, compared, outcomes
from tests.records.dying import AFTER_COMMIT, AFTER_PUBLISH, BEFORE_COMMIT, BEFORE_PUBLISH
from tests.redis_server import RedisServer

MODULE = "tests.records.dying"
TURNS = 8
GATE = DemoGate("gate")
PACED = "/stream 4\n/sleep 0.1\n/tool echo hi\n"


def prompt(number: int) -> str:
    """Each turn ends at an instant of its own."""
    return f"/think first\n/stream 4\n{GATE.command}\n{PACED * (3 + number)}/think last"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Whoever finds it dies."""
    return tmp_path / "die"


@pytest.fixture
def make(
    tmp_path: Path, redis_server: RedisServer, postgres_server: PostgresServer, postgres_url: str
) -> Callable[..., Fleet]:
    return lambda **more: Fleet(tmp_path / "fleet", redis_server, postgres_server, **more)


async def begun(fleet: Fleet) -> list[Turns]:
    everything = [Turns(fleet, number) for number in range(TURNS)]
    await asyncio.gather(*(turns.begin(prompt(number)) for number, turns in enumerate(everything)))
    return everything


@pytest.mark.timeout(150)
@pytest.mark.parametrize("heir", ["itself", "one that reclaims"])
@pytest.mark.parametrize("point", [BEFORE_COMMIT, AFTER_COMMIT])
async def test_a_worker_is_killed(make: Callable[..., Fleet], file: Path, point: str, heir: str) -> None:
    """Cases G1, G9 and G10: what it held is stored once, by its next start or by another worker."""
    fleet = make(module=MODULE, env={"DYING_AT": point, "DYING_FILE": str(file)}, reclaim_idle_seconds=1)
    another = WorkerProcess(file.parent / "another", fleet.cluster.a.config, "--name", "another", "--reclaim")
    try:
        await fleet.start()
        everything = await begun(fleet)
        await asyncio.to_thread(file.touch)
        await asyncio.gather(*(turns.open(GATE) for turns in everything))
        assert await asyncio.to_thread(fleet.worker.ended) == -signal.SIGKILL
        assert fleet.pending() > 0, "it held something"
        await asyncio.to_thread((fleet.worker if heir == "itself" else another).start)
        await asyncio.gather(*(turns.result() for turns in everything))
        found = await compared(fleet, everything)
        found.expect_nothing_left()
        assert outcomes(everything) == {"completed": TURNS}
    finally:
        await asyncio.to_thread(another.stop)
        await fleet.over()


@pytest.mark.timeout(150)
@pytest.mark.parametrize("heir", ["itself", "the other runner"])
@pytest.mark.parametrize("point", [BEFORE_PUBLISH, AFTER_PUBLISH, BEFORE_COMMIT, AFTER_COMMIT])
async def test_a_runner_is_killed(make: Callable[..., Fleet], file: Path, point: str, heir: str) -> None:
    """Cases G1, H4 and M3: what its clients had seen is stored once, in order, and its turns have one ending each."""
    fleet = make(lease=1.2)
    a, b = fleet.cluster.a, fleet.cluster.b
    a.instead_of_itself(MODULE, {"DYING_AT": point, "DYING_FILE": str(file)})
    try:
        await fleet.start()
        everything = await begun(fleet)
        await asyncio.to_thread(file.touch)
        await asyncio.gather(*(turns.open(GATE) for turns in everything))
        assert await asyncio.to_thread(a.exit_code) == -signal.SIGKILL
        orphans = [turns for turns in everything if turns.member is a]
        await asyncio.gather(*(turns.died() for turns in orphans))
        if heir != "itself":
            await asyncio.gather(*(turns.session.check(b) for turns in orphans))
        await asyncio.to_thread(a.start)
        await asyncio.gather(*(turns.result() for turns in everything if turns.member is b))
        found = await compared(fleet, everything)
        found.expect_nothing_left()
        assert outcomes(everything) == {"completed": TURNS // 2}
        assert found.lost > 0
    finally:
        await fleet.over()
