"""The project feed behind the port: in the order of visibility, complete, and gone only where it says so."""

from __future__ import annotations

from runner.clock import SystemClock
from runner.rules.feed import Span
from runner.rules.retention import DAY_MS
from runner.store.port import Store
from runner.store.retention import run_once
from tests.store.rows import PROJECT, admission, ending, record, session, turn

START = (0, 0)


def busy(n: int, **more):
    return record(n, type="session_busy", data=b"{}", **more)


def idle(n: int, **more):
    return record(n, type="session_idle", data=b"{}", **more)


async def told(store: Store, after=START, project: str = PROJECT) -> list[tuple[str, str, str]]:
    rows = await store.feed(project, after, 100)
    return [(row.session_id, row.type, f"{row.epoch}.{row.n}") for row in rows]


async def test_what_the_feed_tells_is_written_with_its_record(store: Store) -> None:
    assert await store.admit(admission(records=[busy(1), record(2)]))
    asked = record(3, type="interaction_requested", data='{"text":"Größe"}'.encode())
    await store.append([asked, record(4), asked._replace(n=5, record_id="closed", type="interaction_closed")])
    assert await store.end(ending(turn(), records=[idle(6)]))
    assert await told(store) == [
        ("s", "session_busy", "1.1"),
        ("s", "interaction_requested", "1.3"),
        ("s", "interaction_closed", "1.5"),
        ("s", "session_idle", "1.6"),
    ]
    row = (await store.feed(PROJECT, START, 100))[1]
    assert (row.project, row.turn_id, row.data, row.at) == (PROJECT, "t1", '{"text":"Größe"}', 1003)


async def test_a_record_that_is_known_is_told_once(store: Store) -> None:
    assert await store.admit(admission(records=[busy(1)]))
    await store.append([busy(1), idle(2)])
    await store.append([busy(1), idle(2)])
    assert [kind for _, kind, _ in await told(store)] == ["session_busy", "session_idle"]


async def test_what_is_set_aside_is_not_told(store: Store) -> None:
    await store.append([busy(1, epoch=9)])
    assert (await store.quarantined(PROJECT, 10))[0][1].record.type == "session_busy"
    assert await told(store) == []


async def test_pages_go_on_behind_a_position(store: Store) -> None:
    assert await store.admit(admission())
    await store.append([busy(n) for n in range(1, 8)])
    position, seen = START, list[int]()
    while page := await store.feed(PROJECT, position, 3):
        assert len(page) <= 3
        assert all(row.position > position for row in page)
        position, seen = page[-1].position, [*seen, *(row.n for row in page)]
    assert seen == list(range(1, 8))
    assert await store.feed(PROJECT, START, 0) == []


async def test_the_end_of_a_session_is_told_once_and_outlives_its_content(store: Store) -> None:
    assert await store.admit(admission(records=[busy(1)]))
    assert await store.end(ending(turn(), records=[idle(2)]))
    last = session("s", 3000, ended_at=3000, head_epoch=1, head_n=2)
    await store.save_session(last)
    await store.save_session(last)
    assert (await told(store))[-1] == ("s", "session_ended", "1.2")
    assert len(await told(store)) == 3
    before = await store.feed_span(PROJECT)
    await store.delete_session_content(PROJECT, "s")
    assert await told(store) == [("s", "session_ended", "1.2")]
    assert (await store.feed_span(PROJECT)).end >= before.end, "no cursor is beyond the end for that"


async def test_a_session_that_is_stored_ended_is_told(store: Store) -> None:
    await store.save_session(session("gone", 3000, ended_at=3000))
    assert await told(store) == [("gone", "session_ended", "0.0")]


async def test_a_project_sees_its_own_feed_only(store: Store) -> None:
    assert await store.admit(admission(records=[busy(1)]))
    assert await told(store, project="p2") == []


async def test_the_span_ends_where_the_newest_is(store: Store) -> None:
    floor, end = await store.feed_span(PROJECT)
    assert floor <= end
    assert await store.admit(admission(records=[busy(1)]))
    (row,) = await store.feed(PROJECT, end, 100)
    span = await store.feed_span(PROJECT)
    assert span.floor == floor
    assert span.end >= row.position
    assert await store.feed(PROJECT, span.end, 100) == []
    await store.append([idle(2)])
    assert [row.type for row in await store.feed(PROJECT, span.end, 100)] == ["session_idle"]


async def test_trimming_raises_the_floor(store: Store) -> None:
    assert await store.admit(admission())
    await store.append([busy(n) for n in range(1, 7)])
    rows = await store.feed(PROJECT, START, 100)
    assert await store.trim_feed(PROJECT, 1005, 3) == 3
    assert await store.trim_feed(PROJECT, 1005, 3) == 1
    assert await store.trim_feed(PROJECT, 1005, 3) == 0
    assert await store.trim_feed("p2", 9999, 3) == 0
    assert await store.feed(PROJECT, START, 100) == rows[4:]
    span = await store.feed_span(PROJECT)
    assert isinstance(span, Span)
    assert span.floor == rows[3].position
    assert (await store.feed_span("p2")).floor == START


async def test_a_history_that_a_session_begins_with_is_no_news(store: Store) -> None:
    assert await store.create_session(
        session("copy", head_epoch=1, head_n=2), [busy(1, in_session="copy"), idle(2, in_session="copy")]
    )
    assert await told(store) == []


async def test_retention_trims_feeds(store: Store) -> None:
    old, new = 100 * DAY_MS - 31 * DAY_MS, 100 * DAY_MS
    assert await store.admit(admission(records=[busy(1, at=old), idle(2, at=new)]))

    class Today(SystemClock):
        def now_ms(self) -> int:
            return new

    assert (await run_once(store, Today(), 30, dry_run=True)).complete
    assert len(await told(store)) == 2
    assert (await run_once(store, Today(), 30)).complete
    assert [kind for _, kind, _ in await told(store)] == ["session_idle"]


async def test_what_a_worker_writes_is_told_too(store: Store) -> None:
    assert await store.admit(admission(records=[busy(1)]))
    batch = [record(2), busy(1), idle(3), idle(3)]
    await store.write_batch(batch)
    await store.write_batch(batch)
    assert [kind for _, kind, _ in await told(store)] == ["session_busy", "session_idle"]


async def test_the_sweeps_ending_is_no_item(store: Store) -> None:
    assert await store.admit(admission(records=[busy(1)]))
    assert await store.end(ending(turn(), session=session(head_epoch=1, head_n=1)))
    assert await store.add_ending(record(2, type="done"))
    assert [kind for _, kind, _ in await told(store)] == ["session_busy"]
