"""The beds of session tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.session.bed import Bed
from tests.session.several import Several


@pytest.fixture
async def bed() -> AsyncIterator[Bed]:
    """A replica in memory, taken apart at the end: nothing may be left."""
    made = await Bed.make()
    yield made
    await made.close()
    assert made.provider.alive == set()


@pytest.fixture
async def several() -> AsyncIterator[Several]:
    """Replicas over one store and one plane, in memory."""
    world = Several()
    yield world
    await world.close()
