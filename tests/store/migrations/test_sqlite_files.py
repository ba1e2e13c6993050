"""A store's file of an earlier version: what opens it, what refuses it, what happens when a migration fails."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.store.migrations.sqlite import migrate
from runner.store.sql.schema import SCHEMA_VERSION
from runner.store.sqlite import SqliteStore
from tests.store.migrations.old import old_file, squeezed
from tests.store.rows import PROJECT, command, record, turn


def schema(path: Path) -> set[tuple[str, ...]]:
    connection = sqlite3.connect(path)
    try:
        rows = connection.execute("SELECT type, name, sql FROM sqlite_schema")
        return {(kind, name, squeezed(sql)) for kind, name, sql in rows}
    finally:
        connection.close()


def version_in(path: Path) -> int:
    connection = sqlite3.connect(path)
    try:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])
    finally:
        connection.close()


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION))
async def test_the_file_of_an_earlier_version_is_brought_to_this_one(tmp_path: Path, version: int):
    old_file(tmp_path / "old", version).close()
    store = await SqliteStore.open(tmp_path / "old", upgrade=True)
    assert store.store_id == "store_old"
    assert await store.open_turns() == await store.open_turns((PROJECT, "s")) == [turn()]
    assert (await store.append([record(2)])).accepted == 1
    assert await store.submit_command(command("c2", kind="steer")) == command("c2", kind="steer")
    await store.close()
    await (await SqliteStore.open(tmp_path / "new")).close()
    assert schema(tmp_path / "old") == schema(tmp_path / "new")
    again = await SqliteStore.open(tmp_path / "old")
    assert command("c2", kind="steer") in await again.open_commands()
    await again.close()


async def test_a_migration_is_whole_or_not_at_all(tmp_path: Path):
    connection = old_file(tmp_path / "db", 1)
    connection.execute("CREATE TABLE quarantine (theirs)")
    connection.close()
    before = schema(tmp_path / "db")
    with pytest.raises(RunnerError) as caught:
        await SqliteStore.open(tmp_path / "db", upgrade=True)
    assert caught.value.code == "store_unavailable"
    with pytest.raises(RunnerError):
        migrate(tmp_path / "db", SCHEMA_VERSION, str)
    assert schema(tmp_path / "db") == before
    assert version_in(tmp_path / "db") == 1


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION))
async def test_a_shared_file_of_an_earlier_version_is_refused_by_name_of_the_command(tmp_path: Path, version: int):
    old_file(tmp_path / "db", version).close()
    with pytest.raises(RunnerError) as caught:
        await SqliteStore.open(tmp_path / "db")
    assert caught.value.code == "store_unavailable"
    assert f"has schema version {version}; this acp-runner needs version {SCHEMA_VERSION}" in caught.value.message
    assert caught.value.message.endswith("acp-runner migrate")
    assert version_in(tmp_path / "db") == version
    assert len(migrate(tmp_path / "db", SCHEMA_VERSION, str)) == SCHEMA_VERSION - version
    await (await SqliteStore.open(tmp_path / "db")).close()


@pytest.mark.parametrize("upgrade", [False, True])
async def test_a_newer_version_is_refused_even_by_whoever_may_upgrade(tmp_path: Path, upgrade: bool):
    connection = old_file(tmp_path / "db", SCHEMA_VERSION)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    with pytest.raises(RunnerError) as caught:
        await SqliteStore.open(tmp_path / "db", upgrade=upgrade)
    assert caught.value.code == "store_unavailable"
    assert f"has schema version {SCHEMA_VERSION + 1}" in caught.value.message
    assert caught.value.message.endswith(f"acp-runner migrate --to {SCHEMA_VERSION}")


async def test_a_file_that_somebody_has_open_is_not_migrated(tmp_path: Path):
    store = await SqliteStore.open(tmp_path / "db")
    with pytest.raises(RunnerError) as caught:
        migrate(tmp_path / "db", SCHEMA_VERSION - 1, str, discard=True)
    assert "Stop the runners that use it first" in caught.value.message
    await store.close()
    assert len(migrate(tmp_path / "db", SCHEMA_VERSION - 1, str)) == 1
    assert version_in(tmp_path / "db") == SCHEMA_VERSION - 1


def test_saying_the_steps_changes_nothing(tmp_path: Path):
    assert len(migrate(tmp_path / "none", SCHEMA_VERSION, str, dry=True)) == SCHEMA_VERSION
    assert not (tmp_path / "none").exists()
    old_file(tmp_path / "db", 1).close()
    before = (tmp_path / "db").read_bytes()
    assert len(migrate(tmp_path / "db", SCHEMA_VERSION, str, dry=True)) == SCHEMA_VERSION - 1
    assert (tmp_path / "db").read_bytes() == before
