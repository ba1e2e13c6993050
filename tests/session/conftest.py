"""The bed of every session test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.session.bed import Bed


@pytest.fixture
async def bed() -> AsyncIterator[Bed]:
    """A replica in memory, taken apart at the end: nothing may be left."""
    made = await Bed.make()
    yield made
    await made.close()
    assert made.provider.alive == set()
