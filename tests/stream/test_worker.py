"""The worker on the virtual clock: what it writes, retries, gives up and acknowledges."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
import pytest

from runner.errors import RunnerError
from runner.rules.delivery import Quota
from runner.store.stream.codec import encode
from runner.store.stream.memory import MemoryRecordStream
from runner.store.stream.port import QuotaPort
from runner.store.stream.worker import Worker
from tests.stream.bed import PROJECT, PoisonedStore, admission, ending, row, rows, stored, texts, until
from tests.virtual_time import LoopClock

pytestmark = pytest.mark.virtual_time


class Bed:
    """A stream with any number of workers before one store."""

    def __init__(self) -> None:
        self.clock = LoopClock()
        self.stream = MemoryRecordStream(self.clock)
        self.store = PoisonedStore(clock=self.clock)
        self.workers: list[tuple[Worker, asyncio.Task[None]]] = []

    def work(self, name: str = "w1", **more) -> Worker:
        worker = Worker(self.stream, self.store, self.clock, name, **more)
        self.workers.append((worker, asyncio.create_task(worker.run())))
        return worker

    def kill(self, worker: Worker) -> None:
        next(task for known, task in self.workers if known is worker).cancel()

    async def publish(self, *records) -> None:
        assert (await self.stream.publish([encode(one) for one in records])).entry_ids

    async def empty(self) -> bool:
        seen = await self.stream.look()
        return (seen.length, seen.pending) == (0, 0)


@asynccontextmanager
async def bed() -> AsyncIterator[Bed]:
    made = Bed()
    assert await made.store.admit(admission())
    try:
        yield made
    finally:
        for worker, _ in made.workers:
            worker.stop()
        await asyncio.gather(*(task for _, task in made.workers), return_exceptions=True)


async def test_records_arrive_once_and_leave_an_empty_stream() -> None:
    async with bed() as it:
        await it.publish(*rows(1_200))
        worker = it.work(batch=500)
        await until(it.empty)
        assert await stored(it.store) == rows(1_200)
        assert it.store.batches == [500, 500, 200]
        assert (worker.counts.read, worker.counts.written) == (1_200, 1_200)


async def test_what_was_acknowledged_and_comes_again_changes_nothing() -> None:
    """Case G10: the same fifty entries again, to another worker."""
    async with bed() as it:
        await it.publish(*rows(50))
        it.work("w1")
        await until(it.empty)
        await it.publish(*rows(50))
        it.work("w2")
        await until(it.empty)
        assert await stored(it.store) == rows(50)


async def test_one_key_twice_in_a_batch_is_written_as_the_last_says() -> None:
    """Case G2: a partial and the final frame of one call, in both orders of arrival, beside a neighbour."""
    async with bed() as it:
        partial, final = row(1, text="partial"), row(1, text="final")
        await it.publish(partial, row(2), final)
        it.work()
        await until(it.empty)
        assert await stored(it.store) == [final, row(2)]
    async with bed() as it:
        early, late = row(1)._replace(n=4, data=b'"partial"'), row(1)._replace(n=5, data=b'"final"')
        await it.publish(late, early)
        it.work()
        await until(it.empty)
        assert await stored(it.store) == [late]


async def test_one_poisoned_row_among_a_thousand_is_set_aside_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    """Case G8: 999 stored, one quarantined after its deliveries, loud, its payload kept."""
    async with bed() as it:
        bad = row(500, text="poison")
        await it.publish(*rows(499), bad, *(row(n) for n in range(501, 1_001)))
        worker = it.work(batch=1_000, max_deliveries=5, retry_seconds=2.0)
        await until(lambda: worker.counts.written == 999)
        assert await it.store.quarantined(PROJECT, 10) == []
        assert not await it.empty(), "what was refused once waits"
        await until(it.empty)
        assert len(await stored(it.store)) == 999
        ((_, aside),) = await it.store.quarantined(PROJECT, 10)
        assert (aside.record, aside.reason) == (bad, "undeliverable")
        assert it.clock.monotonic() >= 4 * 2.0, "each delivery had its time"
        assert worker.counts.undeliverable == 1
        loud = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
        assert any("given up after 5 deliveries" in text and bad.record_id in text for text in loud)


async def test_nothing_is_given_up_while_nothing_can_be_written() -> None:
    """Case G8: every row is refused (a fault of the store's): all wait, and all are there once it is mended."""
    async with bed() as it:
        bad = [row(n, text=f"poison {n}") for n in range(1, 6)]
        await it.publish(*bad)
        worker = it.work(max_deliveries=2, retry_seconds=1.0)
        await asyncio.sleep(120)
        assert (await it.stream.look()).pending == 5
        assert worker.counts.undeliverable == 0
        it.store.refuses = False
        await until(it.empty)
        assert await stored(it.store) == bad


async def test_a_store_that_is_away_is_waited_for_with_the_batch_in_hand(caplog: pytest.LogCaptureFixture) -> None:
    """Case G1: nothing is acknowledged before its commit, nothing is delivered twice for it, one line says so."""
    async with bed() as it:
        it.store.unavailable = True
        await it.publish(*rows(10))
        worker = it.work()
        await asyncio.sleep(60)
        assert (await it.stream.look()).pending == 10
        it.store.unavailable = False
        await until(it.empty)
        assert await stored(it.store) == rows(10)
        assert worker.counts.outages == 1
        assert sum("records wait" in one.getMessage() for one in caplog.records) == 1


async def test_a_stream_that_is_away_is_waited_for_without_a_hot_loop(caplog: pytest.LogCaptureFixture) -> None:
    async with bed() as it:
        await it.publish(*rows(3))
        it.stream.unavailable = True
        worker = it.work()
        await asyncio.sleep(600)
        assert sum(one.levelno >= logging.WARNING for one in caplog.records) <= 2
        it.stream.unavailable = False
        await until(it.empty)
        assert worker.counts.written == 3


async def test_a_batch_that_is_too_large_for_an_answer_is_read_in_parts() -> None:
    """A server that cannot answer with so much in time holds up nothing for ever."""

    class Narrow(MemoryRecordStream):
        async def read(self, consumer, limit, wait_seconds):
            found = await super().read(consumer, limit, wait_seconds)
            return self.bounded(found)

        async def again(self, consumer, after, limit):
            return self.bounded(await super().again(consumer, after, limit))

        def bounded(self, found):
            if len(found) > 3:
                raise RunnerError("store_unavailable", "no answer in time")
            return found

    async with bed() as it:
        it.stream = Narrow(it.clock)
        await it.publish(*rows(40))
        it.work(batch=100)
        await until(it.empty, 300)
        assert await stored(it.store) == rows(40)


async def test_a_group_that_is_gone_begins_at_zero_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Case G5: destroyed and flushed under a waiting worker; no hot loop, an alarm, nothing skipped."""
    async with bed() as it:
        worker = it.work()
        await asyncio.sleep(0.5)
        it.stream.drop_group()
        await it.publish(*rows(3))
        await until(it.empty)
        it.stream.flush()
        await it.publish(row(4))
        await until(it.empty)
        assert await stored(it.store) == rows(4)
        gone = sum("begins at 0" in one.getMessage() for one in caplog.records)
        assert gone == worker.counts.groups_made <= 2
        await asyncio.sleep(60)
        assert worker.counts.groups_made == gone


async def test_a_worker_that_died_finds_its_own_again_under_its_name() -> None:
    """Cases G1, G9: killed between read and commit; the same name goes on, another one takes nothing from it."""
    async with bed() as it:
        it.store.gate = asyncio.Event()
        await it.publish(*rows(5))
        dead = it.work("w1")
        await until(lambda: dead.counts.read == 5)
        it.kill(dead)
        it.store.gate = None
        it.work("w2")
        await asyncio.sleep(300)
        assert await stored(it.store) == [], "not reclaimed: nobody opted in"
        it.work("w1")
        await until(it.empty)
        assert await stored(it.store) == rows(5)


async def test_a_reclaiming_worker_takes_over_and_forgets_the_dead_one() -> None:
    """Cases G7, G9: a dead worker's entries, one of them without a body; then its name goes, and no sooner."""
    async with bed() as it:
        it.store.gate = asyncio.Event()
        await it.publish(*rows(5))
        dead = it.work("w1")
        await until(lambda: dead.counts.read == 5)
        it.kill(dead)
        it.store.gate = None
        first = (await it.stream.scan((0, 0), 1))[0]
        it.stream.delete_bodies([first.entry_id])
        taker = it.work("w2", reclaim_idle_seconds=60.0, forget_seconds=100.0)
        await asyncio.sleep(50)
        assert taker.counts.reclaimed == 0
        await until(it.empty, 200)
        assert await stored(it.store) == rows(5)[1:]
        assert (taker.counts.reclaimed, taker.counts.lost) == (4, 1)
        await asyncio.sleep(200)
        assert await it.stream.forget_consumers("w2", 0) == [], "it was forgotten by the worker"


async def test_bodies_that_are_gone_are_counted_and_acknowledged(caplog: pytest.LogCaptureFixture) -> None:
    """Case G7: on the own list, after a restart."""
    async with bed() as it:
        it.store.gate = asyncio.Event()
        await it.publish(*rows(3))
        dead = it.work("w1")
        await until(lambda: dead.counts.read == 3)
        it.kill(dead)
        it.store.gate = None
        entries = await it.stream.scan((0, 0), 10)
        it.stream.delete_bodies([entries[1].entry_id])
        worker = it.work("w1")
        await until(it.empty)
        assert await stored(it.store) == [row(1), row(3)]
        assert worker.counts.lost == 1
        assert any("lost their bodies" in one.getMessage() for one in caplog.records)


class Told(QuotaPort):
    def __init__(self, verdict: Quota | Exception) -> None:
        self.answer = verdict

    async def verdict(self, project: str, records: int, size: int) -> Quota:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def test_over_the_quota_is_a_counted_drop_and_unknown_defers() -> None:
    async with bed() as it:
        quota = Told(Quota.UNKNOWN)
        worker = it.work(quota=quota, max_deliveries=2)
        await it.publish(row(1))
        await asyncio.sleep(60)
        quota.answer = RunnerError("plane_unavailable", "nobody knows")
        await asyncio.sleep(60)
        assert (await it.stream.look()).pending == 1
        quota.answer = Quota.ALLOWED
        await until(it.empty)
        assert await stored(it.store) == [row(1)]
        quota.answer = Quota.OVER
        await it.publish(row(2), row(3))
        await until(it.empty)
        assert worker.counts.over_quota == 2
        assert await stored(it.store) == [row(1)]


async def test_an_entry_that_nobody_can_read_ends_in_quarantine_with_its_bytes() -> None:
    """Case G8: its neighbours are written; it is kept as it came."""
    async with bed() as it:
        it.stream.add_raw("9", encode(row(1)))
        it.stream.add_raw("1", b"\xff\x00 nonsense")
        await it.publish(*rows(3))
        worker = it.work(max_deliveries=3, retry_seconds=1.0)
        await until(it.empty)
        assert await stored(it.store) == rows(3)
        assert worker.counts.undeliverable == 2
        ((_, mine),) = await it.store.quarantined(PROJECT, 10)
        ((_, strange),) = await it.store.quarantined("unknown", 10)
        assert orjson.loads(mine.record.data)["version"] == "9"
        assert orjson.loads(strange.record.data)["base64"] == "/wAgbm9uc2Vuc2U="


async def test_late_records_are_set_aside_and_those_of_a_deleted_session_dropped() -> None:
    async with bed() as it:
        assert await it.store.end(ending())
        await it.publish(row(1))
        worker = it.work()
        await until(it.empty)
        assert (worker.counts.set_aside, worker.counts.written) == (1, 0)
        ((_, aside),) = await it.store.quarantined(PROJECT, 10)
        assert aside.record == row(1)


async def test_stop_finishes_the_batch_in_hand() -> None:
    async with bed() as it:
        it.store.gate = asyncio.Event()
        await it.publish(*rows(5))
        worker = it.work()
        await until(lambda: worker.counts.read == 5)
        worker.stop()
        it.store.gate.set()
        _, task = it.workers[0]
        await task
        assert await texts(it.store) == [one.data for one in rows(5)]
        assert await it.empty()


async def test_stop_does_not_wait_for_a_store_that_is_away() -> None:
    async with bed() as it:
        it.store.unavailable = True
        await it.publish(*rows(5))
        worker = it.work()
        await until(lambda: worker.counts.outages == 1)
        worker.stop()
        _, task = it.workers[0]
        async with asyncio.timeout(5):
            await task
        assert (await it.stream.look()).pending == 5
