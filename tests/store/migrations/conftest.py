"""Both databases, empty."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from runner.store.sql.dialect import DIALECTS, Dialect
from tests.postgres_server import PostgresServer
from tests.store.migrations.databases import Database, PostgresDatabase, SqliteDatabase

Fresh = Callable[[], Database]


@pytest.fixture(params=DIALECTS)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    chosen: Dialect = request.param
    return chosen


@pytest.fixture
def fresh(dialect: Dialect, request: pytest.FixtureRequest, tmp_path: Path) -> Fresh:
    """Makes an empty database; PostgreSQL has one at a time."""
    if dialect == "sqlite":
        files = iter(range(99))
        return lambda: SqliteDatabase(tmp_path / f"db{next(files)}")
    server: PostgresServer = request.getfixturevalue("postgres_server")
    return lambda: PostgresDatabase(server.fresh())
