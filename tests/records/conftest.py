"""A fleet of one test: two runners and a worker over an empty Redis and an empty database."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.postgres_server import PostgresServer
from tests.records.bed import Fleet
from tests.redis_server import RedisServer


@pytest.fixture
async def fleet(
    tmp_path: Path, redis_server: RedisServer, postgres_server: PostgresServer, postgres_url: str
) -> AsyncIterator[Fleet]:
    made = Fleet(tmp_path, redis_server, postgres_server)
    try:
        await made.start()
        yield made
    finally:
        await made.over()
