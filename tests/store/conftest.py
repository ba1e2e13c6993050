"""Every store behind the port."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from runner.clock import SystemClock
from runner.metrics import Metrics
from runner.store.counted import CountedStore
from runner.store.http import HttpStore
from runner.store.memory import MemoryStore
from runner.store.port import Store
from runner.store.postgres.store import PostgresStore
from runner.store.spool import SpooledStore
from runner.store.sqlite import SqliteStore
from tests.plane.bed import BOTH, serve_plane
from tests.store.rows import AT


class FixedClock(SystemClock):
    def now_ms(self) -> int:
        return AT


@asynccontextmanager
async def memory(path: Path) -> AsyncIterator[Store]:
    made = MemoryStore(clock=FixedClock())
    yield made
    await made.close()


@asynccontextmanager
async def on_sqlite(path: Path) -> AsyncIterator[Store]:
    made = await SqliteStore.open(path / "store.sqlite3", clock=FixedClock())
    yield made
    await made.close()


@asynccontextmanager
async def http(path: Path) -> AsyncIterator[Store]:
    async with on_sqlite(path) as behind:
        served = await serve_plane(store=behind, max_body_bytes=32 * 1024 * 1024)
        made = await HttpStore.open(served.url, BOTH)
        yield made
        await made.close()
        await served.stop()


@asynccontextmanager
async def spooled(path: Path) -> AsyncIterator[Store]:
    async with memory(path) as behind:
        made = await SpooledStore.open(behind, path / "spool.sqlite3", SystemClock())
        yield made
        await made.close()


@asynccontextmanager
async def counted(path: Path) -> AsyncIterator[Store]:
    async with memory(path) as behind:
        yield CountedStore(behind, Metrics())


@asynccontextmanager
async def postgres(url: str) -> AsyncIterator[Store]:
    made = await PostgresStore.open(url, clock=FixedClock())
    yield made
    await made.close()


BACKENDS: dict[str, Callable[[Path], AbstractAsyncContextManager[Store]]] = {
    "sqlite": on_sqlite,
    "memory": memory,
    "http": http,
    "spooled": spooled,
    "counted": counted,
}


@pytest.fixture(params=[*BACKENDS, "postgres"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    on_server = request.param == "postgres"
    opened: AbstractAsyncContextManager[Store] = (
        postgres(request.getfixturevalue("postgres_url")) if on_server else BACKENDS[request.param](tmp_path)
    )
    async with opened as made:
        yield made


@pytest.fixture
async def sqlite(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    made = await SqliteStore.open(tmp_path / "store.sqlite3")
    yield made
    await made.close()
