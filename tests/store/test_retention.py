"""Retention at work: batches, a dry run, an hour between two runs (DESIGN 3.9)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.rules.retention import DAY_MS
from runner.store import retention
from runner.store.memory import MemoryStore
from runner.store.port import Admission, Expired, RecordKey, Store
from runner.store.postgres.store import PostgresStore
from runner.store.retention import BATCH_ROWS, EVERY_SECONDS, Retention, run_once
from tests.store.rows import PROJECT, ended, ending, record, session, turn
from tests.virtual_time import LoopClock

NOW = 100 * DAY_MS


class Today(LoopClock):
    def now_ms(self) -> int:
        return NOW


async def filled(store: Store, rows: int, *, at: int, name: str = "s", project: str = PROJECT) -> None:
    """A session with one turn that ended at an instant, with as many records."""
    of = turn(f"t-{name}", 1, name, project=project, prompt_id=None, started_at=at)
    place: dict[str, Any] = {"in_session": name, "project": project, "turn_id": of.turn_id, "prompt_id": None, "at": at}
    await store.admit(Admission(session(name, project=project, head_epoch=1), of))
    records = [record(n, **place) for n in range(1, rows + 1)]
    over = session(name, project=project, head_epoch=1, head_n=rows)
    await store.end(ending(of, session=over, turn=ended(of, ended_at=at), records=records))


async def test_what_is_older_than_its_days_goes_and_the_rest_stays(store: Store):
    await filled(store, 3, at=NOW - 31 * DAY_MS, name="old")
    await filled(store, 2, at=NOW - 31 * DAY_MS, name="old", project="p2")
    await filled(store, 4, at=NOW - 29 * DAY_MS, name="new")
    await store.quarantine([record(1, in_session="old", record_id="rec_aside")], "why", NOW - 40 * DAY_MS)
    await store.quarantine([record(2, in_session="old", record_id="rec_kept")], "why", NOW)
    dry = await run_once(store, Today(), 30, dry_run=True)
    assert dry.as_json() == {
        "dry_run": True,
        "cutoff": "1970-03-12T00:00:00.000Z",
        "records": {PROJECT: 3, "p2": 2},
        "quarantined": {PROJECT: 1},
        "complete": True,
    }
    assert len(await store.records(PROJECT, "old", None, 9)) == 3, "a dry run only counts"
    done = await run_once(store, Today(), 30)
    assert (done.records, done.quarantined, done.complete) == (dry.records, dry.quarantined, True)
    assert await store.records(PROJECT, "old", None, 9) == []
    assert await store.records("p2", "old", None, 9) == []
    assert len(await store.records(PROJECT, "new", None, 9)) == 4
    assert [row.record.record_id for _, row in await store.quarantined(PROJECT, 9)] == ["rec_kept"]
    assert await store.session(PROJECT, "old") is not None
    assert await store.turn(PROJECT, "old", "t-old") is not None
    again = await run_once(store, Today(), 30)
    assert (again.records, again.quarantined) == ({}, {})


async def test_two_that_delete_at_the_same_moment_count_nothing_twice(postgres_url: str):
    stores = [await PostgresStore.open(postgres_url) for _ in range(2)]
    for number in range(4):
        await filled(stores[0], BATCH_ROWS, at=number, name=f"s{number}")
    done = await asyncio.gather(*(run_once(store, Today(), 30) for store in stores))
    assert sum(one.records.get(PROJECT, 0) for one in done) == 4 * BATCH_ROWS
    assert await stores[0].count_expired(None, NOW) == Expired({}, {})
    for store in stores:
        await store.close()


async def test_without_days_everything_is_kept():
    store = MemoryStore()
    await filled(store, 1, at=0)
    done = await run_once(store, Today(), 0)
    assert done.as_json() == {"dry_run": False, "cutoff": None, "records": {}, "quarantined": {}, "complete": True}
    assert len(await store.records(PROJECT, "s", None, 9)) == 1


class Counting(MemoryStore):
    """Counts its transactions; the last one of ``allowed`` is followed by an outage."""

    def __init__(self, allowed: int = 99) -> None:
        super().__init__()
        self.batches: list[int] = []
        self.allowed = allowed

    async def delete_records(self, keys: Sequence[RecordKey]) -> int:
        if len(self.batches) == self.allowed:
            raise RunnerError("store_unavailable", "away")
        self.batches.append(len(keys))
        return await super().delete_records(keys)


@pytest.mark.virtual_time
async def test_each_transaction_is_small_and_others_have_their_turn_in_between():
    store, loop = Counting(), asyncio.get_running_loop()
    await filled(store, 2 * BATCH_ROWS + 7, at=0)
    began = loop.time()
    done = await run_once(store, Today(), 30)
    assert store.batches == [BATCH_ROWS, BATCH_ROWS, 7]
    assert done.records == {PROJECT: 2 * BATCH_ROWS + 7}
    assert loop.time() - began == pytest.approx(2 * retention.PAUSE_SECONDS)


@pytest.mark.virtual_time
async def test_what_a_round_had_no_time_for_goes_in_the_next():
    store = Counting()
    await filled(store, 2 * BATCH_ROWS, at=0)
    done = await run_once(store, Today(), 30, seconds=retention.PAUSE_SECONDS / 2)
    assert (done.records, done.complete) == ({PROJECT: BATCH_ROWS}, False)
    assert len(await store.records(PROJECT, "s", None, 10_000)) == BATCH_ROWS
    assert await store.pruned_to(PROJECT, "s") is not None


@pytest.mark.virtual_time
async def test_a_run_that_is_stopped_leaves_whole_batches_behind():
    store = Counting()
    await filled(store, 3 * BATCH_ROWS, at=0)
    run = asyncio.create_task(run_once(store, Today(), 30))
    while not store.batches:
        await asyncio.sleep(0)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert len(await store.records(PROJECT, "s", None, 10_000)) == 3 * BATCH_ROWS - sum(store.batches)


@pytest.mark.virtual_time
async def test_the_job_runs_each_hour_and_goes_on_after_an_outage():
    store = Counting(allowed=1)
    await filled(store, BATCH_ROWS + 1, at=0)
    job = Retention(store, Today(), 30)
    with pytest.raises(RunnerError):
        await job()
    store.allowed = 99
    await job()
    assert await store.records(PROJECT, "s", None, 10_000) == []
    assert job.deleted == {"records": 1, "quarantined": 0}
    await filled(store, 1, at=0, name="other")
    await job()
    assert len(await store.records(PROJECT, "other", None, 9)) == 1, "not before an hour is over"
    await asyncio.sleep(EVERY_SECONDS)
    await job()
    assert await store.records(PROJECT, "other", None, 9) == []
    keeps = Retention(store, Today(), 0)
    await filled(store, 1, at=0, name="third")
    await keeps()
    assert len(await store.records(PROJECT, "third", None, 9)) == 1


@pytest.mark.virtual_time
async def test_a_worker_s_rounds_outlive_an_outage():
    store = Counting(allowed=0)
    await filled(store, 3, at=0)
    rounds = asyncio.create_task(Retention(store, Today(), 30).run())
    await asyncio.sleep(1)
    assert len(await store.records(PROJECT, "s", None, 9)) == 3
    store.allowed = 99
    await asyncio.sleep(retention.AGAIN_SECONDS)
    assert await store.records(PROJECT, "s", None, 9) == []
    await filled(store, 1, at=0, name="other")
    await asyncio.sleep(EVERY_SECONDS + retention.AGAIN_SECONDS)
    assert await store.records(PROJECT, "other", None, 9) == []
    rounds.cancel()
