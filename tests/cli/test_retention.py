"""``acp-runner worker --retention``: what is too old goes, once, and a dry run only counts."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable
from pathlib import Path

import pytest

from runner.rules.retention import DAY_MS
from runner.store.port import RecordRow, Store
from runner.store.postgres.store import PostgresStore
from runner.store.sqlite import SqliteStore
from tests.cli.conftest import Invoke
from tests.store.rows import PROJECT, admission, ended, ending, record, turn


async def fill(opening: Awaitable[Store]) -> None:
    store = await opening
    old, new = (int(time.time() * 1000) - days * DAY_MS for days in (31, 1))
    await store.admit(admission(records=[record(1, at=old), record(2, at=old)]))
    await store.end(ending(turn(), turn=ended(turn(), ended_at=old)))
    await store.admit(admission("t2", 2, records=[record(1, 2, at=new)]))
    await store.quarantine([record(9)], "why", old)
    await store.close()


async def left(path: Path) -> list[RecordRow]:
    store = await SqliteStore.open(path)
    rows = await store.records(PROJECT, "s", None, 10)
    await store.close()
    return rows


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ACP_RUNNER_RECORDS__RETENTION_DAYS", "30")
    (tmp_path / "state").mkdir()
    asyncio.run(fill(SqliteStore.open(tmp_path / "state" / "store.sqlite3")))
    return tmp_path / "state" / "store.sqlite3"


def test_a_dry_run_counts_and_the_real_one_deletes(bare: Invoke, path: Path):
    dry = bare("worker", "--retention", "--dry-run")
    assert dry.exit_code == 0, dry.output
    said = json.loads(dry.stdout)
    assert said["dry_run"] is True
    assert said["cutoff"].endswith("Z")
    assert (said["records"], said["quarantined"]) == ({PROJECT: 2}, {PROJECT: 1})
    assert len(asyncio.run(left(path))) == 3
    done = json.loads(bare("worker", "--retention").stdout)
    assert (done["dry_run"], done["records"], done["quarantined"]) == (False, {PROJECT: 2}, {PROJECT: 1})
    assert [row.epoch for row in asyncio.run(left(path))] == [2]
    again = json.loads(bare("worker", "--retention").stdout)
    assert (again["records"], again["quarantined"]) == ({}, {})


def test_a_shared_store_is_named_by_the_settings(
    bare: Invoke, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shared = path.rename(tmp_path / "shared.sqlite3")
    missing = bare("worker", "--retention")
    assert missing.exit_code == 1
    assert "There is no store" in missing.stderr
    assert not path.exists(), "and none is made"
    monkeypatch.setenv("ACP_RUNNER_STORE__URL", f"sqlite:///{shared}")
    assert json.loads(bare("worker", "--retention").stdout)["records"] == {PROJECT: 2}


def test_on_postgresql(bare: Invoke, postgres_url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACP_RUNNER_RECORDS__RETENTION_DAYS", "30")
    monkeypatch.setenv("ACP_RUNNER_STORE__URL", postgres_url)
    asyncio.run(fill(PostgresStore.open(postgres_url)))
    dry = json.loads(bare("worker", "--retention", "--dry-run").stdout)
    assert (dry["records"], dry["quarantined"]) == ({PROJECT: 2}, {PROJECT: 1})
    done = json.loads(bare("worker", "--retention").stdout)
    assert (done["records"], done["quarantined"]) == ({PROJECT: 2}, {PROJECT: 1})
    assert json.loads(bare("worker", "--retention").stdout)["records"] == {}


def test_without_days_everything_is_kept(bare: Invoke, path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACP_RUNNER_RECORDS__RETENTION_DAYS", "0")
    done = bare("worker", "--retention")
    assert "retention_days is 0" in done.stderr
    assert json.loads(done.stdout) == {
        "dry_run": False,
        "cutoff": None,
        "records": {},
        "quarantined": {},
        "complete": True,
    }
    assert len(asyncio.run(left(path))) == 3


def test_a_plane_s_store_is_the_plane_s_affair(bare: Invoke, path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACP_RUNNER_LEASES__URL", "http://127.0.0.1:1")
    refused = bare("worker", "--retention")
    assert refused.exit_code == 1
    assert "on the plane's machine" in refused.stderr


def test_a_dry_run_of_nothing_is_bad_usage(bare: Invoke, path: Path):
    refused = bare("worker", "--dry-run")
    assert refused.exit_code == 2
    assert "--retention" in refused.stderr
