"""Settings and fixtures of every test: which loop it runs on, and its clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from tests.virtual_time import LoopClock, VirtualTimeLoop


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
