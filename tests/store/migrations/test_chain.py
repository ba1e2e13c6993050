"""One chain, one head, the same schema by either way, up and down on both databases with what is in them."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from typing import Any

import asyncpg
import pytest

from runner.errors import RunnerError
from runner.store.migrations.chain import head, steps
from runner.store.postgres import schema
from runner.store.sql.dialect import DIALECTS, Dialect, statements
from runner.store.sql.schema import SCHEMA_VERSION
from tests.store.migrations.conftest import Fresh
from tests.store.migrations.databases import Database, PostgresDatabase
from tests.store.migrations.old import up_to

ALL = range(SCHEMA_VERSION + 1)
RELEASED = {1: "891d5768", 2: "e40f1321", 3: "b4bca920", 4: "49b6c088", 5: "c715fd92"}


async def content(database: Database) -> dict[str, list[tuple[Any, ...]]]:
    """The rows of every table, but what the database says of itself."""
    names = (
        "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite%'"
        if database.dialect == "sqlite"
        else "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'"
    )
    found = {}
    for (name,) in await database.fetch(names):
        rows = await database.fetch(f"SELECT * FROM {name}")
        found[name] = sorted((row for row in rows if row[0] != "schema"), key=repr)
    return found


def test_the_chain_has_one_head_and_it_is_what_this_code_needs():
    assert head() == SCHEMA_VERSION


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION + 1))
def test_a_released_revision_is_never_edited(version: int):
    """Databases that exist were made by it. A new revision gets its line here."""
    written = [
        statement
        for dialect in DIALECTS
        for planned in (steps(dialect, version - 1, version, str), steps(dialect, version, version - 1, str))
        for step in planned
        for statement in step.statements
    ]
    assert hashlib.sha256("\n".join(written).encode()).hexdigest()[:8] == RELEASED[version]


async def test_a_new_database_is_the_one_that_the_chain_makes(fresh: Fresh):
    created = fresh()
    assert await created.create() == "store_made"
    expected = await created.catalog(), await content(created)
    migrated = fresh()
    assert len(await migrated.migrate(SCHEMA_VERSION)) == SCHEMA_VERSION
    assert await migrated.catalog() == expected[0], "schema.sql and the chain differ"
    assert await content(migrated) == expected[1]
    assert await migrated.create() == "store_made", "and it is opened as it is"


async def test_up_and_down_step_by_step_with_what_is_in_it(fresh: Fresh):
    database = fresh()
    catalogs, contents = [], []
    for version in ALL:
        if version:
            assert len(await database.migrate(version)) == 1
            await database.execute([row for row in up_to(version) if row not in up_to(version - 1)])
        catalogs.append(await database.catalog())
        contents.append(await content(database))
    for version in reversed(ALL[1:-1]):
        before = await content(database)
        with pytest.raises(RunnerError, match="would lose"):
            await database.migrate(version)
        assert await content(database) == before, "refused, and nothing is changed"
        assert len(await database.migrate(version, discard=True)) == 1
        assert await database.catalog() == catalogs[version]
        kept = {name: rows for name, rows in (await content(database)).items() if name != "prompts"}
        assert kept == {name: rows for name, rows in contents[version].items() if name != "prompts"}
        (prompt,) = await database.fetch("SELECT prompt_id, content FROM prompts WHERE prompt_id = 'p1'")
        assert prompt == ("p1", "[]")
    assert len(await database.migrate(SCHEMA_VERSION)) == SCHEMA_VERSION - 1
    assert await database.catalog() == catalogs[-1]
    assert len(await database.migrate(0, discard=True)) == SCHEMA_VERSION
    assert await content(database) == {}
    assert await database.create() == "store_made", "an empty database is a new one"


async def test_a_way_back_that_loses_nothing_needs_no_leave(fresh: Fresh):
    database = fresh()
    await database.create()
    for version in reversed(ALL[:-1]):
        assert len(await database.migrate(version)) == 1


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION))
async def test_this_code_on_an_earlier_schema_refuses_by_name_of_the_command(fresh: Fresh, version: int):
    database = fresh()
    await database.migrate(version)
    before = await database.catalog()
    with pytest.raises(RunnerError) as caught:
        await database.create()
    assert caught.value.code == "store_unavailable"
    assert f"has schema version {version}; this acp-runner needs version {SCHEMA_VERSION}" in caught.value.message
    assert caught.value.message.endswith("acp-runner migrate")
    assert await database.catalog() == before
    await database.migrate(SCHEMA_VERSION)
    assert await database.create() == "store_made"


async def test_this_code_on_a_newer_schema_refuses_and_does_not_migrate_it(fresh: Fresh, dialect: Dialect):
    database = fresh()
    await database.create()
    newer = SCHEMA_VERSION + 1
    mark = {
        "sqlite": f"PRAGMA user_version = {newer}",
        "postgresql": f"UPDATE meta SET value = '{newer}' WHERE name = 'schema'",
    }
    await database.execute([mark[dialect]])
    with pytest.raises(RunnerError) as caught:
        await database.create()
    assert caught.value.message.endswith(f"acp-runner migrate --to {SCHEMA_VERSION}")
    with pytest.raises(RunnerError, match=f"no schema version {newer}"):
        await database.migrate(SCHEMA_VERSION)


async def test_there_is_no_version_behind_the_head(fresh: Fresh):
    database = fresh()
    with pytest.raises(RunnerError) as caught:
        await database.migrate(SCHEMA_VERSION + 1)
    assert caught.value.code == "invalid_request"


@pytest.mark.parametrize("theirs", ["CREATE TABLE meta (x TEXT)", "CREATE TABLE turns (x TEXT)"])
async def test_a_database_of_another_program_is_left_alone(fresh: Fresh, theirs: str):
    database = fresh()
    await database.execute([theirs])
    before = await database.catalog()
    for work in (database.create(), database.migrate(SCHEMA_VERSION)):
        with pytest.raises(RunnerError, match="another program") as caught:
            await work
        assert caught.value.code == "store_unavailable"
    assert await database.catalog() == before


async def test_several_make_a_postgresql_schema_at_the_same_moment(postgres_url: str):
    assert await asyncio.gather(*(PostgresDatabase(postgres_url).create() for _ in range(8))) == ["store_made"] * 8


async def test_a_postgresql_database_that_runners_use_is_not_migrated(postgres_url: str):
    database = PostgresDatabase(postgres_url)
    await database.create()
    names = {"application_name": schema.APPLICATION_NAME}
    running = await asyncpg.connect(postgres_url, server_settings=names)
    with pytest.raises(RunnerError) as caught:
        await database.migrate(SCHEMA_VERSION - 1)
    assert caught.value.code == "store_unavailable"
    assert "Runners hold 1 connections" in caught.value.message
    assert "postgres:" not in caught.value.message, "no user, no password"
    await running.close()
    assert len(await database.migrate(SCHEMA_VERSION - 1)) == 1


async def test_a_server_that_is_away_is_said_without_the_password():
    with pytest.raises(RunnerError) as caught:
        await schema.migrate_database("postgresql://me:hunter2@127.0.0.1:1/db", SCHEMA_VERSION, str)
    assert caught.value.code == "store_unavailable"
    assert "hunter2" not in caught.value.message
    assert "postgresql://127.0.0.1:1/db" in caught.value.message


def test_a_store_that_needs_no_migration_does_not_import_alembic():
    code = (
        "import asyncio, pathlib, sys, tempfile;"
        "from runner.store.sqlite_file import open_file;"
        "open_file(pathlib.Path(tempfile.mkdtemp()) / 'db', str, upgrade=True);"
        "import runner.store.postgres.schema;"
        "sys.exit(bool({'alembic', 'sqlalchemy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_statement_may_be_for_one_database_alone():
    text = "CREATE TABLE a (x INTEGER);\n-- only: sqlite\nCREATE TABLE b (x BLOB);\n-- only: postgresql\nSELECT 1;\n"
    assert statements(text, "sqlite") == ["CREATE TABLE a (x INTEGER)", "CREATE TABLE b (x BLOB)"]
    assert statements(text, "postgresql") == ["CREATE TABLE a (x BIGINT)", "SELECT 1"]
