"""What a sender does about a stream that others handle, and about what may not wait, on the virtual clock."""

from __future__ import annotations

import pytest

from runner.errors import RunnerError
from tests.stream.bed import PROJECT, SESSION, admission, ending, row, rows, stored, until
from tests.stream.test_pipelined import bed

pytestmark = pytest.mark.virtual_time


async def test_entries_that_somebody_trimmed_are_given_to_the_stream_again() -> None:
    """Nobody read them, and the floor passes them with the next entry (case G1)."""
    async with bed() as it:
        store = it.store()
        assert await store.admit(admission())
        await store.append(rows(3))
        it.stream.delete_bodies([entry.entry_id for entry in await it.stream.scan((0, 0), 10)])
        it.work()
        await store.append([row(4)])
        await until(lambda: store.unconfirmed == 0)
        assert await stored(it.database) == rows(4)


async def test_what_the_feed_tells_waits_for_no_worker() -> None:
    """Somebody has to answer it."""
    async with bed() as it:
        store = it.store()
        assert await store.admit(admission())
        await store.append(rows(2))
        asked = row(3)._replace(type="interaction_requested")
        await store.append([asked])
        assert await stored(it.database) == [*rows(2), asked]
        assert [item.type for item in await store.feed(PROJECT, (0, 0), 10)] == ["interaction_requested"]


async def test_a_stream_of_large_records_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nobody could end the turns of a runner that died before a worker came."""
    async with bed() as it:
        assert await it.database.admit(admission())
        await it.store().append(rows(40))
        scan = it.stream.scan

        async def slow(after, limit):
            if limit > 20:
                raise RunnerError("store_unavailable", "The record stream gave no answer.")
            return await scan(after, limit)

        monkeypatch.setattr(it.stream, "scan", slow)
        other = it.store()
        await other.caught_up(PROJECT, SESSION)
        assert await stored(it.database) == rows(40)
        it.stream.unavailable = True
        with pytest.raises(RunnerError):
            await other.caught_up(PROJECT, SESSION)


async def test_records_of_a_turn_that_ended_otherwise_are_read_nowhere() -> None:
    """Their sender learns of it with its own ending, and waits for no worker to set them aside."""
    async with bed() as it:
        store = it.store()
        assert await store.admit(admission())
        await store.append(rows(3))
        assert await it.database.end(ending([]))
        assert not await store.end(ending([row(4)]))
        assert await stored(store) == []
        assert store.unconfirmed == 0
        assert [one.record for _, one in await it.database.quarantined(PROJECT, 10)] == rows(3)
