"""Session control under a seeded scheduler: 2,000 random lives of one to three replicas, and what is simulated."""

from __future__ import annotations

import gc
import inspect
import warnings
from functools import cache
from pathlib import Path

import pytest

import runner
from runner.leases.heartbeat import Heartbeats
from runner.leases.memory import MemoryLeasePlane
from runner.pool.pool import Pool
from runner.rules.pool import Book
from runner.session.coordinator import Coordinator
from runner.session.run import TurnRun
from runner.store.memory import MemoryStore
from runner.turn.driver import Driver
from tests.simulation.doubles import WatchedPlane, WatchedStore
from tests.simulation.loop import SimulationLoop
from tests.simulation.run import run_seed
from tests.simulation.visited import Visited
from tests.simulation.world import World

SEEDS = 2000
BLOCK = 200


@cache
def block(first: int) -> tuple[str | None, Visited]:
    """The first fault of a block of seeds as it is to be read, and what was visited."""
    visited = Visited()
    with warnings.catch_warnings():
        # What a killed replica had just begun is never awaited, as it should be.
        warnings.simplefilter("ignore", RuntimeWarning)
        for seed in range(first, first + BLOCK):
            run = run_seed(seed)
            visited.add(run.visited)
            if run.fault is not None:
                again = f"again: scripts/simulate --seeds 1 --from {seed}"
                return f"{run.story()}\nseed {seed}: {run.fault}\n{again}", visited
        gc.collect()
    return None, visited


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
def test_whatever_happens_every_promise_is_kept(first: int) -> None:
    fault, _ = block(first)
    if fault is not None:
        pytest.fail(fault)


@pytest.mark.timeout(600)
def test_every_transition_of_every_table_is_visited() -> None:
    visited = Visited()
    for first in range(0, SEEDS, BLOCK):
        visited.add(block(first)[1].tables)
    assert visited.missing() == {}


def test_one_seed_is_one_story() -> None:
    first, second = run_seed(3, tell=True), run_seed(3, tell=True)
    assert first.story() == second.story()
    assert '"machine": "turn"' in first.story()
    assert run_seed(4, tell=True).story() != first.story()


def test_the_production_classes_are_simulated() -> None:
    async def boot() -> World:
        world = World(0)
        await world.begin()
        return world

    loop = SimulationLoop()
    try:
        replica = loop.run_until_complete(boot()).replicas[0]
    finally:
        loop.bury()
    services = replica.services
    assert type(replica.coordinator) is Coordinator
    assert type(services.beats) is Heartbeats
    assert type(services.pool) is Pool
    assert type(services.pool.book) is Book
    home = Path(inspect.getfile(runner)).parent
    for kind in (Coordinator, Heartbeats, Pool, Book, TurnRun, Driver, MemoryStore, MemoryLeasePlane):
        assert Path(inspect.getfile(kind)).is_relative_to(home)
    assert issubclass(WatchedStore, MemoryStore)
    assert issubclass(WatchedPlane, MemoryLeasePlane)
