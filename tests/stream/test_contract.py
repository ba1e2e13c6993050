"""What every record stream does, in memory and in Redis."""

from __future__ import annotations

import asyncio

import pytest

from runner.rules.delivery import START
from runner.store.stream.port import Entry, GroupGone, RecordStream
from tests.stream.conftest import MOST, Streams


def payloads(count: int, first: int = 1) -> list[bytes]:
    return [b"[%d]\n\x00\xff body" % n for n in range(first, first + count)]


async def read(stream: RecordStream, consumer: str = "w1", limit: int = 100) -> list[Entry]:
    return await stream.read(consumer, limit, 0.01)


async def test_what_is_published_is_read_once_in_order_byte_for_byte(streams: Streams) -> None:
    first = await streams.one.publish(payloads(3))
    second = await streams.two.publish(payloads(2, 4))
    assert first.generation == second.generation
    assert [*first.entry_ids, *second.entry_ids] == sorted({*first.entry_ids, *second.entry_ids})
    got = await read(streams.two)
    assert [entry.payload for entry in got] == payloads(5)
    assert [entry.entry_id for entry in got] == [*first.entry_ids, *second.entry_ids]
    assert {(entry.version, entry.deliveries) for entry in got} == {("1", 1)}
    assert await read(streams.one, "w2") == []


async def test_a_read_waits_for_what_is_published(streams: Streams) -> None:
    assert await streams.one.look()
    reading = asyncio.create_task(streams.two.read("w1", 10, 5.0))
    await asyncio.sleep(0.05)
    await streams.one.publish(payloads(1))
    assert [entry.payload for entry in await reading] == payloads(1)


async def test_the_floor_is_what_every_worker_acknowledged(streams: Streams) -> None:
    done = await streams.one.publish(payloads(4))
    a, b, c, d = done.entry_ids
    assert (await streams.one.look()).floor == START
    assert [entry.entry_id for entry in await read(streams.one, "w1", 2)] == [a, b]
    assert [entry.entry_id for entry in await read(streams.two, "w2", 2)] == [c, d]
    assert await streams.two.acknowledge([c, d]) < a
    assert a <= await streams.one.acknowledge([a]) < b
    assert await streams.one.acknowledge([b]) == d
    seen = await streams.two.look()
    assert (seen.floor, seen.length, seen.pending) == (d, 0, 0)


async def test_the_stream_is_trimmed_to_the_floor_and_never_below(streams: Streams) -> None:
    a, b, c = (await streams.one.publish(payloads(3))).entry_ids
    assert len(await read(streams.one)) == 3
    await streams.one.acknowledge([a, c])
    assert [entry.entry_id for entry in await streams.two.scan(START, 10)] == [b, c]
    assert [entry.entry_id for entry in await streams.two.scan(b, 10)] == [c]
    assert [entry.payload for entry in await streams.one.scan(START, 1)] == [payloads(3)[1]]


async def test_a_full_stream_refuses_and_takes_again_what_was_made_room_for(streams: Streams) -> None:
    await streams.one.publish(payloads(MOST))
    full = await streams.one.publish(payloads(1))
    assert full.entry_ids == ()
    got = await read(streams.one)
    assert len(got) == MOST, "back-pressure loses nothing"
    await streams.one.acknowledge([entry.entry_id for entry in got[:5]])
    assert (await streams.two.publish(payloads(6))).entry_ids == ()
    assert len((await streams.two.publish(payloads(5))).entry_ids) == 5


async def test_what_was_not_acknowledged_comes_again_and_is_counted(streams: Streams) -> None:
    a, b, c = (await streams.one.publish(payloads(3))).entry_ids
    await read(streams.one)
    assert await streams.one.again("w2", START, 10) == []
    assert [(entry.entry_id, entry.deliveries) for entry in await streams.one.again("w1", START, 2)] == [(a, 2), (b, 2)]
    assert [entry.entry_id for entry in await streams.two.again("w1", b, 10)] == [c]
    await streams.one.acknowledge([a])
    assert [(entry.entry_id, entry.deliveries) for entry in await streams.one.again("w1", START, 9)] == [(b, 3), (c, 3)]


async def test_a_reclaim_takes_what_is_held_too_long(streams: Streams) -> None:
    a, b, _ = (await streams.one.publish(payloads(3))).entry_ids
    await read(streams.one, "w1", 2)
    assert (await streams.two.reclaim("w2", 3600, 10)).entries == ()
    found = (await streams.two.reclaim("w2", 0, 10)).entries
    assert [(entry.entry_id, entry.payload, entry.deliveries) for entry in found] == [
        (a, payloads(1)[0], 2),
        (b, payloads(2)[1], 2),
    ]
    assert await streams.one.again("w1", START, 10) == []


async def test_an_entry_without_a_body_is_told_by_its_owner_and_by_a_reclaim(streams: Streams) -> None:
    """Case G7: a nil body on the own list, a deleted id on a reclaim; neither ends the pass."""
    a, b, c = (await streams.one.publish(payloads(3))).entry_ids
    await read(streams.one)
    streams.delete_bodies([a, b])
    mine = await streams.one.again("w1", START, 10)
    assert [(entry.entry_id, entry.payload) for entry in mine] == [(a, None), (b, None), (c, payloads(3)[2])]
    await streams.one.acknowledge([a])
    found = await streams.two.reclaim("w2", 0, 10)
    assert found.gone == (b,)
    assert [entry.entry_id for entry in found.entries] == [c]
    assert (await streams.one.look()).pending == 1


async def test_a_group_that_is_gone_begins_at_zero(streams: Streams) -> None:
    """Case G5: XGROUP DESTROY; what is in the stream comes again."""
    ids = (await streams.one.publish(payloads(3))).entry_ids
    generation = (await streams.one.look()).generation
    await read(streams.one)
    await streams.one.acknowledge(ids[:1])
    streams.drop_group()
    with pytest.raises(GroupGone):
        await read(streams.one)
    assert [entry.entry_id for entry in await read(streams.one)] == list(ids[1:])
    assert (await streams.two.look()).generation == generation


@pytest.mark.parametrize("how", ["flush", "delete_stream"])
async def test_a_stream_that_is_gone_is_another_generation(streams: Streams, how: str) -> None:
    """Case G5: FLUSHALL, DEL; the sender learns of it with the next answer."""
    before = await streams.one.publish(payloads(2))
    await read(streams.one)
    getattr(streams, how)()
    with pytest.raises(GroupGone):
        await read(streams.two)
    seen = await streams.one.look()
    assert seen.generation != before.generation
    assert (seen.floor, seen.length, seen.pending) == (START, 0, 0)
    after = await streams.one.publish(payloads(1))
    assert after.generation == seen.generation
    assert [entry.payload for entry in await read(streams.two)] == payloads(1)


@pytest.mark.parametrize("how", ["trim", "delete"])
async def test_a_stream_that_somebody_took_entries_from_is_another_generation(streams: Streams, how: str) -> None:
    """No worker ever saw those, and the floor passes them: their sender may not believe it."""
    before = await streams.one.publish(payloads(2))
    assert len(await read(streams.two)) == 2
    await streams.two.acknowledge(before.entry_ids)
    second = await streams.one.publish(payloads(3))
    assert second.generation == before.generation, "what was acknowledged may go"
    if how == "trim":
        await streams.trim()
    else:
        streams.delete_bodies(second.entry_ids[1:2])
    got = await read(streams.two)
    assert len(got) == (0 if how == "trim" else 2)
    await streams.two.acknowledge([entry.entry_id for entry in got])
    seen = await streams.one.look()
    assert seen.generation != before.generation
    again = await streams.one.publish(payloads(3))
    assert again.generation == seen.generation
    assert [entry.payload for entry in await read(streams.two)] == payloads(3)
    await streams.two.acknowledge(again.entry_ids)
    assert (await streams.one.look()).generation == seen.generation


async def test_a_sender_makes_the_group_so_that_nothing_is_skipped(streams: Streams) -> None:
    """Case G5: published before any worker was there, and right after a flush."""
    await streams.one.publish(payloads(1))
    streams.flush()
    await streams.one.publish(payloads(2))
    assert [entry.payload for entry in await read(streams.two)] == payloads(2)


async def test_a_worker_that_blocks_meets_the_flush_of_its_stream(streams: Streams) -> None:
    """Case G5: the stream goes away while a worker waits in a read."""
    await streams.one.look()
    reading = asyncio.create_task(streams.two.read("w1", 10, 1.0))
    await asyncio.sleep(0.05)
    streams.flush()
    with pytest.raises(GroupGone):
        await reading
    await streams.one.publish(payloads(1))
    assert [entry.payload for entry in await read(streams.two)] == payloads(1)


async def test_a_consumer_that_holds_something_is_never_deleted(streams: Streams) -> None:
    """Case G9: w1 dies holding five, w2 claims one, the clean-up runs."""
    *ids, last = (await streams.one.publish(payloads(6))).entry_ids
    await read(streams.one, "w1", 5)
    await read(streams.one, "w3")
    await streams.one.acknowledge([last])
    assert len((await streams.two.reclaim("w2", 0, 1)).entries) == 1
    assert await streams.two.forget_consumers("w2", 3600) == []
    assert await streams.two.forget_consumers("w2", 0) == ["w3"]
    assert [entry.entry_id for entry in await streams.one.again("w1", START, 10)] == list(ids[1:])
    await streams.one.acknowledge(ids)
    assert await streams.two.forget_consumers("w2", 0) == ["w1"]
    assert await streams.two.forget_consumers("w2", 0) == []


async def test_acknowledging_twice_or_the_unknown_changes_nothing(streams: Streams) -> None:
    a, b = (await streams.one.publish(payloads(2))).entry_ids
    await read(streams.one)
    await streams.one.acknowledge([a, a, (5, 5)])
    await streams.two.acknowledge([a])
    assert (await streams.one.look()).pending == 1
    assert [entry.entry_id for entry in await streams.one.again("w1", START, 10)] == [b]
