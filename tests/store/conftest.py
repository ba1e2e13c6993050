"""Every store behind the port."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from runner.clock import SystemClock
from runner.store.memory import MemoryStore
from runner.store.port import Store
from runner.store.sqlite import SqliteStore
from tests.store.rows import AT


class FixedClock(SystemClock):
    def now_ms(self) -> int:
        return AT


@pytest.fixture(params=["sqlite", "memory"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    clock = FixedClock()
    made: Store = MemoryStore(clock=clock)
    if request.param == "sqlite":
        made = await SqliteStore.open(tmp_path / "store.sqlite3", clock=clock)
    yield made
    await made.close()


@pytest.fixture
async def sqlite(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    made = await SqliteStore.open(tmp_path / "store.sqlite3")
    yield made
    await made.close()
