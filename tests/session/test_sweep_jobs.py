"""The sweep: one replica at a time, and no job keeps another from its turn."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.leases.memory import MemoryLeasePlane
from runner.session.sweep import ALONE_SECONDS, JOB_SECONDS, LEASE_SECONDS, Sweep
from tests.virtual_time import LoopClock

pytestmark = pytest.mark.virtual_time


class Count:
    """A job that counts its turns, then does as it is told."""

    def __init__(self, error: Exception | None = None, seconds: float = 0) -> None:
        self.times: list[float] = []
        self._error = error
        self._seconds = seconds

    async def __call__(self) -> None:
        self.times.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self._seconds)
        if self._error is not None:
            raise self._error


def plane(shared: bool = True) -> MemoryLeasePlane:
    return MemoryLeasePlane(LoopClock(), 20, shared=shared)


async def during(seconds: float, *sweeps: Sweep) -> None:
    tasks = [asyncio.create_task(sweep.run()) for sweep in sweeps]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()


async def test_one_replica_sweeps_at_a_time() -> None:
    shared, one, two = plane(), Count(), Count()
    await during(61, Sweep(shared, "a", {"x": one}), Sweep(shared, "b", {"x": two}))
    assert sorted((len(one.times), len(two.times))) == [0, 12]


async def test_another_takes_over_when_the_sweeper_is_gone() -> None:
    shared, one, two = plane(), Count(), Count()
    await during(6, Sweep(shared, "a", {"x": one}))
    await during(LEASE_SECONDS + 5, Sweep(shared, "b", {"x": two}))
    assert len(one.times) == 1
    assert two.times[0] - one.times[0] == pytest.approx(LEASE_SECONDS, abs=6)


async def test_alone_it_is_rare() -> None:
    job = Count()
    await during(2 * ALONE_SECONDS + 6, Sweep(plane(shared=False), "a", {"x": job}))
    assert job.times == pytest.approx([5, 5 + ALONE_SECONDS, 5 + 2 * ALONE_SECONDS])


@pytest.mark.parametrize(
    "bad",
    [
        Count(RunnerError("store_unavailable", "away")),
        Count(ValueError("a fault")),
        Count(seconds=10 * JOB_SECONDS),
    ],
    ids=["refused", "fault", "slow"],
)
async def test_a_job_that_fails_does_not_stop_the_rest(bad: Count) -> None:
    good = Count()
    sweep = Sweep(plane(), "a", {"bad": bad, "good": good})
    bad.times.clear()
    assert await sweep.round() is True
    assert await sweep.round() is True
    assert (len(bad.times), len(good.times)) == (2, 2)


async def test_without_the_plane_nobody_sweeps() -> None:
    away: Any = plane()
    job = Count()

    async def take_lease(*args: Any) -> bool:
        raise RunnerError("plane_unavailable", "away")

    away.take_lease = take_lease
    sweep = Sweep(away, "a", {"x": job})
    assert await sweep.round() is False
    del away.take_lease
    assert await sweep.round() is True
    assert len(job.times) == 1
