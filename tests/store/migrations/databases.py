"""An empty SQLite file and an empty PostgreSQL database behind one face, for tests of the schema."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import asyncpg

from runner.store import sqlite_file
from runner.store.migrations import sqlite
from runner.store.postgres import schema
from runner.store.sql.dialect import Dialect
from tests.store.migrations.old import squeezed


class Database(Protocol):
    """A database that may be migrated; ``fetch`` and ``execute`` speak to it directly."""

    dialect: Dialect

    async def migrate(self, target: int, *, discard: bool = False) -> list[str]: ...

    async def create(self) -> str:
        """What a store does when it opens it; the store's id."""
        ...

    async def fetch(self, query: str) -> list[tuple[Any, ...]]: ...

    async def execute(self, statements: Sequence[str]) -> None: ...

    async def catalog(self) -> list[tuple[Any, ...]]:
        """Its tables with their columns in order, and its indexes: equal catalogs are equal schemas."""
        ...


class SqliteDatabase:
    dialect: Dialect = "sqlite"

    def __init__(self, path: Path) -> None:
        self.path = path

    async def migrate(self, target: int, *, discard: bool = False) -> list[str]:
        return [step.text for step in sqlite.migrate(self.path, target, "{}_made".format, discard=discard)]

    async def create(self) -> str:
        store_id, connections = sqlite_file.open_file(self.path, "{}_made".format)
        for connection in connections:
            connection.close()
        return store_id

    async def fetch(self, query: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.path)) as connection:
            return connection.execute(query).fetchall()

    async def execute(self, statements: Sequence[str]) -> None:
        with closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
            for statement in statements:
                connection.execute(statement)

    async def catalog(self) -> list[tuple[Any, ...]]:
        found = await self.fetch("SELECT type, name, sql FROM sqlite_schema WHERE name <> 'sqlite_sequence'")
        return sorted((kind, name, str(squeezed(sql))) for kind, name, sql in found)


class PostgresDatabase:
    dialect: Dialect = "postgresql"

    def __init__(self, url: str) -> None:
        self.url = url

    async def migrate(self, target: int, *, discard: bool = False) -> list[str]:
        steps = await schema.migrate_database(self.url, target, "{}_made".format, discard=discard)
        return [step.text for step in steps]

    async def create(self) -> str:
        connection = await asyncpg.connect(self.url)
        try:
            return await schema.prepare(connection, "the database", "{}_made".format)
        finally:
            await connection.close()

    async def fetch(self, query: str) -> list[tuple[Any, ...]]:
        connection = await asyncpg.connect(self.url)
        try:
            return [tuple(row) for row in await connection.fetch(query)]
        finally:
            await connection.close()

    async def execute(self, statements: Sequence[str]) -> None:
        connection = await asyncpg.connect(self.url)
        try:
            for statement in statements:
                await connection.execute(statement)
        finally:
            await connection.close()

    async def catalog(self) -> list[tuple[Any, ...]]:
        columns = await self.fetch(
            "SELECT table_name, column_name, ordinal_position - (SELECT count(*) FROM pg_attribute"
            " WHERE attrelid = table_name::regclass AND attisdropped AND attnum < ordinal_position), data_type,"
            " is_nullable, column_default, collation_name, is_identity FROM information_schema.columns"
            " WHERE table_schema = 'public'"
        )
        indexes = await self.fetch("SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'")
        rules = await self.fetch(
            "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint"
            " WHERE connamespace = 'public'::regnamespace"
        )
        triggers = await self.fetch("SELECT tgname, pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal")
        functions = await self.fetch("SELECT proname, prosrc FROM pg_proc WHERE pronamespace = 'public'::regnamespace")
        return sorted([*columns, *indexes, *rules, *triggers, *functions], key=repr)
