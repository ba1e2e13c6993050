"""A store whose records travel by the stream, on the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from runner.assembly.gauges import read_stream
from runner.errors import RunnerError
from runner.metrics import STREAM_CIRCUIT_OPEN, STREAM_FULL, STREAM_REPUBLISHED, STREAM_UNCONFIRMED, Metrics
from runner.store.behind import StoreBehind
from runner.store.codec import CALLS
from runner.store.memory import MemoryStore
from runner.store.port import InteractionRow
from runner.store.stream.memory import MemoryRecordStream
from runner.store.stream.pipelined import PipelinedStore, Sent
from runner.store.stream.worker import Worker
from tests.stream.bed import PROJECT, SESSION, TURN, admission, ending, row, rows, stored, until
from tests.virtual_time import LoopClock

pytestmark = pytest.mark.virtual_time


class Bed:
    """One database, one stream, any number of replicas' stores before them."""

    def __init__(self, max_entries: int = 1_000) -> None:
        self.clock = LoopClock()
        self.stream = MemoryRecordStream(self.clock, max_entries)
        self.database = MemoryStore(clock=self.clock)
        self.stores: list[PipelinedStore] = []
        self.worker: Worker | None = None
        self._working: asyncio.Task[None] | None = None

    def store(self, **more) -> PipelinedStore:
        self.stores.append(PipelinedStore(self.database, self.stream, **more))
        return self.stores[-1]

    def work(self) -> None:
        self.worker = Worker(self.stream, self.database, self.clock, "w1")
        self._working = asyncio.create_task(self.worker.run())

    async def close(self) -> None:
        if self.worker is not None and self._working is not None:
            self.worker.stop()
            await self._working
        for store in self.stores:
            await store.close()

    async def length(self) -> int:
        return (await self.stream.look()).length


@asynccontextmanager
async def bed(**more) -> AsyncIterator[Bed]:
    made = Bed(**more)
    try:
        yield made
    finally:
        await made.close()


def test_every_call_of_the_port_is_passed_on() -> None:
    assert set(vars(StoreBehind)) >= CALLS | {"close"}


def question() -> InteractionRow:
    return InteractionRow(PROJECT, SESSION, "int_1", TURN, "pending", "permission", 1, 9_999)


async def test_records_travel_by_the_stream_and_are_forgotten_once_they_arrived() -> None:
    async with bed() as it:
        store = it.store()
        assert await store.admit(admission())
        assert (await store.append(rows(3))).accepted == 3
        assert await stored(it.database) == []
        assert store.unconfirmed == 3
        it.work()
        await until(lambda: store.unconfirmed == 0)
        assert await stored(it.database) == rows(3)


async def test_reads_of_this_process_see_what_is_on_its_way() -> None:
    async with bed() as it:
        store = it.store()
        assert await store.admit(admission())
        await it.database.append([row(1)])
        await store.append([row(2), row(3)])
        assert await stored(store) == rows(3)
        assert await stored(store, limit=2) == rows(2)
        assert await store.records(PROJECT, SESSION, (1, 2), 10) == [row(3)]
        it.work()
        await until(lambda: store.unconfirmed == 0)
        assert await stored(store) == rows(3)


async def test_an_ending_carries_what_no_worker_brought_yet() -> None:
    """Cases G1, G11: the turn is whole in the database with its ending, and the worker's copies change nothing."""
    async with bed() as it:
        store = it.store()
        assert await store.admit(admission())
        await store.append(rows(4))
        assert await store.end(ending([row(5)]))
        assert await stored(it.database) == rows(5)
        assert store.unconfirmed == 0
        it.work()
        await until(lambda: it.worker is not None and it.worker.counts.written == 4)
        assert await stored(it.database) == rows(5)
        assert await it.database.quarantined(PROJECT, 10) == []


async def test_what_is_not_a_plain_record_of_a_turn_goes_straight_with_all_before_it() -> None:
    """No gap: a question's record is never there before the records that came before it."""
    async with bed() as it:
        store = it.store()
        assert await store.admit(admission())
        await store.append(rows(2))
        done = await store.append([row(3)], [question()])
        assert (done.accepted, done.quarantined) == (1, 0)
        assert await stored(it.database) == rows(3)
        await store.append([row(4)])
        await store.append([row(5, turn=None)])
        assert await stored(it.database) == [*rows(4), row(5, turn=None)]
        assert store.unconfirmed == 0


async def test_a_stream_that_is_away_slows_one_write_and_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Case G1: the sender hears of it, writes to the store, and asks the stream again only in the background."""
    async with bed() as it:
        store = it.store()
        assert await store.admit(admission())
        await store.append([row(1)])
        it.stream.held.clear()
        began = it.clock.monotonic()
        await store.append([row(2)])
        assert it.clock.monotonic() - began <= 0.5
        began = it.clock.monotonic()
        for n in range(3, 8):
            await store.append([row(n)])
        assert it.clock.monotonic() == began
        assert await stored(it.database) == rows(7), "what was published before went along"
        it.stream.held.set()
        await until(lambda: any("is back" in one.getMessage() for one in caplog.records))
        await store.append([row(8)])
        assert store.unconfirmed == 1
        it.work()
        await until(lambda: store.unconfirmed == 0)
        assert await stored(it.database) == rows(8)


async def test_what_was_published_reaches_the_store_when_the_stream_goes_away() -> None:
    async with bed() as it:
        store = it.store()
        assert await store.admit(admission())
        await store.append(rows(3))
        it.stream.unavailable = True
        await until(lambda: store.unconfirmed == 0)
        assert await stored(it.database) == rows(3)


async def test_a_stream_that_began_anew_gets_everything_again() -> None:
    """Case G5: flushed between publish and read; the same ids, so nothing doubles."""
    async with bed() as it:
        store = it.store()
        assert await store.admit(admission())
        await store.append(rows(3))
        it.stream.flush()
        await store.append([row(4)])
        await until(lambda: any(one for one in store._kept.all()) and not store._kept.unpublished())
        assert await it.length() == 4
        it.work()
        await until(lambda: store.unconfirmed == 0)
        assert await stored(it.database) == rows(4)


async def test_a_flush_is_noticed_without_another_record() -> None:
    async with bed() as it:
        store = it.store()
        assert await store.admit(admission())
        await store.append(rows(3))
        it.stream.flush()
        it.work()
        await until(lambda: store.unconfirmed == 0)
        assert await stored(it.database) == rows(3)


async def test_a_full_stream_is_back_pressure() -> None:
    """Beyond the bound records go to the store, and to the stream again once a worker made room."""
    async with bed(max_entries=5) as it:
        store = it.store()
        assert await store.admit(admission())
        await store.append(rows(5))
        await store.append([row(6)])
        assert await it.length() == 5
        assert await stored(it.database) == rows(6)
        it.work()
        await until(lambda: it.worker is not None and it.worker.counts.read == 5)
        await store.append([row(7)])
        await until(lambda: store.unconfirmed == 0)
        assert await stored(it.database) == rows(7)


async def test_memory_for_what_is_on_its_way_is_bounded() -> None:
    async with bed() as it:
        store = it.store(held_bytes=2_000)
        assert await store.admit(admission())
        for n in range(1, 101):
            await store.append([row(n)])
            assert store._kept.bytes <= 2_000
        assert await stored(store) == rows(100)


async def test_a_large_record_goes_to_the_store() -> None:
    async with bed() as it:
        store = it.store()
        assert await store.admit(admission())
        await store.append([row(1, text="x" * 200_000)])
        assert len(await stored(it.database)) == 1
        assert await it.length() == 0


async def test_neither_stream_nor_store_is_an_error_to_the_sender() -> None:
    """Case G1: never acknowledged without a place; the same ids are taken later."""
    async with bed() as it:
        store = it.store()
        assert await store.admit(admission())
        it.stream.unavailable = it.database.unavailable = True
        with pytest.raises(RunnerError) as refused:
            await store.append(rows(2))
        assert refused.value.code == "store_unavailable"
        assert store.unconfirmed == 0
        it.stream.unavailable = it.database.unavailable = False
        await asyncio.sleep(10)
        await store.append(rows(2))
        it.work()
        await until(lambda: store.unconfirmed == 0)
        assert await stored(it.database) == rows(2)


async def test_while_the_database_is_away_records_wait_in_the_stream() -> None:
    async with bed() as it:
        store = it.store()
        assert await store.admit(admission())
        it.work()
        it.database.unavailable = True
        assert (await store.append(rows(3))).accepted == 3
        await asyncio.sleep(20)
        assert store.unconfirmed == 3
        it.database.unavailable = False
        await until(lambda: store.unconfirmed == 0)
        assert await stored(it.database) == rows(3)


async def test_another_replica_catches_up_before_it_closes_a_dead_ones_turn() -> None:
    """Case M3: what the dead replica published is in the store before its turn ends as lost, without any worker."""
    async with bed() as it:
        dead, heir = it.store(), it.store()
        assert await dead.admit(admission())
        await dead.append(rows(3))
        await dead.append([row(9)])
        await heir.caught_up(PROJECT, SESSION)
        assert await stored(it.database) == [*rows(3), row(9)]
        assert await heir.end(ending([row(10)]))
        it.work()
        await until(lambda: it.worker is not None and it.worker.counts.written == 4)
        assert await stored(it.database) == [*rows(3), row(9), row(10)]
        assert await it.database.quarantined(PROJECT, 10) == []


async def test_an_ending_of_a_turn_that_was_begun_elsewhere_reads_the_stream_first() -> None:
    async with bed() as it:
        dead, heir = it.store(), it.store()
        assert await dead.admit(admission())
        await dead.append(rows(3))
        assert await heir.end(ending([row(4)]))
        assert await stored(it.database) == rows(4)


async def test_catching_up_needs_the_stream_only_while_a_turn_goes_on() -> None:
    async with bed() as it:
        one, two = it.store(), it.store()
        assert await one.admit(admission())
        await one.append(rows(2))
        it.stream.unavailable = True
        with pytest.raises(RunnerError) as refused:
            await two.caught_up(PROJECT, SESSION)
        assert refused.value.code == "store_unavailable"
        assert await one.end(ending())
        await two.caught_up(PROJECT, SESSION)
        assert await stored(two) == rows(2)


async def test_a_poisoned_record_keeps_no_turn_from_ending() -> None:
    """Case G8: what the store refuses stays the worker's, which sets it aside."""

    class Refusing(MemoryStore):
        async def write_batch(self, records):
            if any(b"poison" in one.data for one in records):
                raise RunnerError("internal", "The store refused a row.")
            return await super().write_batch(records)

        async def end(self, ending):
            if any(b"poison" in one.data for one in ending.records):
                raise RunnerError("internal", "The store refused a row.")
            return await super().end(ending)

    async with bed() as it:
        it.database = Refusing(clock=it.clock)
        store = it.store()
        assert await store.admit(admission())
        await store.append([row(1), row(2, text="poison"), row(3)])
        assert await store.end(ending([row(4)]))
        assert await stored(it.database) == [row(1), row(3), row(4)]
        await store.caught_up(PROJECT, SESSION)


async def test_deleting_a_session_forgets_what_is_on_its_way() -> None:
    async with bed() as it:
        store = it.store()
        assert await store.admit(admission())
        await store.append(rows(3))
        await store.delete_session_content(PROJECT, SESSION)
        assert store.unconfirmed == 0


async def test_close_leaves_nothing_in_memory_alone() -> None:
    async with bed() as it:
        store = it.store()
        assert await store.admit(admission())
        await store.append(rows(3))
        it.stream.flush()
        await store.append([row(4)])
        remote = it.database
        closed = remote.close

        async def keep_open() -> None:
            return None

        remote.close = keep_open  # type: ignore[method-assign]
        await store.close()
        assert {one.n for one in await stored(remote)} >= {1, 2, 3}
        remote.close = closed  # type: ignore[method-assign]
        it.stores.clear()


async def test_a_cancelled_append_may_be_given_again() -> None:
    async with bed() as it:
        store = it.store()
        assert await store.admit(admission())
        it.stream.held.clear()
        writing = asyncio.create_task(store.append(rows(2)))
        await asyncio.sleep(0.1)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        it.stream.held.set()
        await store.append(rows(3))
        it.work()
        await until(lambda: store.unconfirmed == 0)
        assert await stored(it.database) == rows(3)


async def test_which_way_records_took_is_counted() -> None:
    async with bed() as it:
        store, metrics = it.store(), Metrics()
        read_stream(metrics, store)
        assert await store.admit(admission())
        await store.append(rows(3))
        assert store.sent == Sent(published=3)
        it.stream.flush()
        await until(lambda: store.sent.republished == 3)
        it.stream.unavailable = True
        await store.append([row(4)])
        assert (store.sent, store.away) == (Sent(3, 3, 1), True)
        assert metrics.numbers()[STREAM_CIRCUIT_OPEN] == {(): 1}
        it.stream.unavailable = False
        await until(lambda: not store.away)
        numbers = metrics.numbers()
        assert numbers[STREAM_CIRCUIT_OPEN] == numbers[STREAM_FULL] == numbers[STREAM_UNCONFIRMED] == {(): 0}
        assert numbers[STREAM_REPUBLISHED] == {(): 3}
