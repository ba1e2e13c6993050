"""``acp-runner migrate``: on the state directory's file, on a shared one, on PostgreSQL; what refuses."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest
from typer.testing import Result

from runner.sandbox.statelock import StateLock
from runner.store.sql.schema import SCHEMA_VERSION
from runner.store.sqlite import SqliteStore
from tests.cli.conftest import Invoke
from tests.store.migrations.databases import PostgresDatabase
from tests.store.migrations.old import old_file


@pytest.fixture
def state(tmp_path: Path) -> Path:
    directory = tmp_path / "state"
    directory.mkdir()
    return directory


def refused(result: Result) -> str:
    assert result.exit_code == 1
    assert result.stdout == ""
    return result.stderr


def test_the_file_of_the_state_directory(bare: Invoke, state: Path):
    old_file(state / "store.sqlite3", 1).close()
    done = bare("migrate")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line[:12] for line in lines[:2]] == ["0001 -> 0002", "0002 -> 0003"]
    assert len(lines) == SCHEMA_VERSION - 1
    assert "is migrated" in done.stderr
    again = bare("migrate")
    assert (again.exit_code, again.stdout) == (0, "")
    assert "has that version already" in again.stderr
    assert list((state / "replicas").iterdir()) == [], "nothing for the next boot to bury"


def test_the_way_back_is_gone_only_with_leave(bare: Invoke, state: Path):
    old_file(state / "store.sqlite3", SCHEMA_VERSION).close()
    assert "would lose" in refused(bare("migrate", "--to", "2"))
    assert bare("migrate", "--to", "2", "--discard").exit_code == 0
    assert f"no schema version {SCHEMA_VERSION + 1}" in refused(bare("migrate", "--to", str(SCHEMA_VERSION + 1)))


def test_sql_is_printed_and_nothing_is_changed(bare: Invoke, state: Path):
    old_file(state / "store.sqlite3", 1).close()
    before = (state / "store.sqlite3").read_bytes()
    printed = bare("migrate", "--sql")
    assert printed.exit_code == 0
    assert (state / "store.sqlite3").read_bytes() == before
    connection = sqlite3.connect(state / "store.sqlite3")
    connection.executescript(printed.stdout)
    connection.close()

    async def opened() -> str:
        store = await SqliteStore.open(state / "store.sqlite3")
        await store.close()
        return store.store_id

    assert asyncio.run(opened()) == "store_old"


def test_a_state_directory_that_is_served_refuses(bare: Invoke, state: Path):
    lock = StateLock.acquire(state, "rep_1")
    assert "invalid_request" in refused(bare("migrate"))
    lock.release()


def test_a_shared_file(bare: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACP_RUNNER_STORE__URL", f"sqlite:///{tmp_path / 'shared'}")
    held = old_file(tmp_path / "shared", 2)
    held.execute("PRAGMA journal_mode = WAL")
    held.execute("SELECT * FROM meta").fetchall()
    monkeypatch.setattr("runner.store.migrations.sqlite.BUSY_SECONDS", 0.05)
    assert "Stop the runners that use it first" in refused(bare("migrate"))
    held.close()
    assert bare("migrate").stdout.startswith("0002 -> 0003")


async def test_postgresql(bare: Invoke, postgres_url: str, monkeypatch: pytest.MonkeyPatch):
    await PostgresDatabase(postgres_url).migrate(1)
    monkeypatch.setenv("ACP_RUNNER_STORE__URL", postgres_url)
    done = await asyncio.to_thread(bare, "migrate")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("0001 -> 0002")
    assert "postgres:" not in done.output, "no user, no password"


def test_a_runner_on_a_shared_file_of_an_earlier_version_does_not_start(
    bare: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ACP_RUNNER_STORE__URL", f"sqlite:///{tmp_path / 'shared'}")
    old_file(tmp_path / "shared", 2).close()
    assert refused(bare("serve", "--port", "0")).strip().endswith("then run: acp-runner migrate")


async def test_a_runner_on_a_postgresql_of_an_earlier_version_does_not_start(
    bare: Invoke, postgres_url: str, monkeypatch: pytest.MonkeyPatch
):
    await PostgresDatabase(postgres_url).migrate(2)
    monkeypatch.setenv("ACP_RUNNER_STORE__URL", postgres_url)
    said = refused(await asyncio.to_thread(bare, "serve", "--port", "0"))
    assert said.strip().endswith("then run: acp-runner migrate")
    assert "postgres:" not in said, "no user, no password"


def test_the_store_of_a_plane_is_migrated_there(bare: Invoke, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACP_RUNNER_LEASES__URL", "http://127.0.0.1:1")
    assert "the plane's" in refused(bare("migrate"))
