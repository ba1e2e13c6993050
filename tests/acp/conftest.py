"""Connections over memory, each judged by the published schema when its test ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.acp.bed import Bed
from tests.virtual_time import LoopClock


@pytest.fixture
async def beds(clock: LoopClock) -> AsyncIterator[Callable[..., Bed]]:
    """Makes connections with limits of the test's own."""
    made: list[Bed] = []

    def make(**limits: Any) -> Bed:
        made.append(Bed(clock, **limits))
        return made[-1]

    yield make
    for bed in made:
        bed.judge()


@pytest.fixture
async def bed(beds: Callable[..., Bed]) -> Bed:
    """A connection with the default limits."""
    return beds()
