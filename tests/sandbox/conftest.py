"""Providers under test; after each test nobody may be left."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from runner.sandbox.local import LocalProvider
from tests.sandbox import bed


@pytest.fixture
def store_id() -> str:
    return f"store_{uuid.uuid4().hex}"


@pytest.fixture
async def provider(tmp_path: Path, store_id: str) -> AsyncIterator[LocalProvider]:
    """A local provider; its cells, pipes and children are gone when it was closed."""
    made = bed.local(tmp_path / "state", store_id)
    before = bed.descriptors()
    yield made
    await made.close()
    assert made.live == ()
    assert bed.carriers(store_id) == {}
    assert bed.zombies() == []
    assert bed.descriptors() <= before
