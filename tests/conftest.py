"""Settings and fixtures of every test: which loop it runs on, and its clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
from hypothesis import HealthCheck, settings

from tests.daytona_emulator.fixture import daytona_emulator, daytona_emulators
from tests.harness_fixture import installed_harnesses, pytest_collection_modifyitems
from tests.postgres_server import postgres_process, postgres_server, postgres_url
from tests.redis_server import redis_process, redis_server
from tests.virtual_time import LoopClock, VirtualTimeLoop

__all__ = [
    "clock",
    "daytona_emulator",
    "daytona_emulators",
    "installed_harnesses",
    "postgres_process",
    "postgres_server",
    "postgres_url",
    "pytest_asyncio_loop_factories",
    "pytest_collection_modifyitems",
    "redis_process",
    "redis_server",
]

# How long an example takes says what else the machine does.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """``@pytest.mark.virtual_time`` chooses the loop whose clock jumps; every other test has asyncio's own."""
    if item.get_closest_marker("virtual_time"):
        return {"virtual": VirtualTimeLoop}
    return {"real": asyncio.new_event_loop}


@pytest.fixture
def clock() -> LoopClock:
    """The clock of the test's loop; virtual where the test is marked so."""
    return LoopClock()
