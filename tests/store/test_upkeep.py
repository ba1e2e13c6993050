"""Retention, and endings that nothing tells of, from every store (DESIGN 3.9)."""

from __future__ import annotations

import pytest

from runner.errors import RunnerError
from runner.store.port import Admission, Appended, EndedTurn, Expired, RecordKey, RecordRow, Store
from tests.store.rows import PROJECT, admission, ended, ending, prompt, record, session, turn

FIRST = (0, "", "")


def keys(*rows: RecordRow) -> list[RecordKey]:
    return [RecordKey(row.project, row.record_id) for row in rows]


async def a_turn(store: Store, name: str, epoch: int, *, at: int, ended_at: int | None, state: str = "done", **more):
    """A turn with two records and, once it is over, its last one; and a record outside of it."""
    session_id, project = more.get("in_session", "s"), more.get("project", PROJECT)
    place = {"in_session": session_id, "project": project}
    own = {"prompt_id": f"p-{name}", **place}
    of = turn(name, epoch, session_id, prompt_id=f"p-{name}", started_at=at, project=project)
    row = session(session_id, at, project=project, head_epoch=epoch, head_n=9)
    rows = [record(n, epoch, turn_id=name, at=at + n, record_id=f"rec_{name}_{n}", **own) for n in (1, 2)]
    asked = prompt(f"p-{name}", "active", session_id, turn_id=name, project=project)
    assert await store.admit(Admission(row, of, asked, records=rows))
    if ended_at is not None:
        last = record(3, epoch, turn_id=name, type="done", at=ended_at, record_id=f"rec_{name}_3", **own)
        over = prompt(f"p-{name}", state, session_id, turn_id=name, project=project)
        outcome = "completed" if state == "done" else "paused"
        over_at = ended(of, outcome, ended_at=ended_at)
        done = ending(of, turn=over_at, session=row, prompt=over, records=[last])
        assert await store.end(done)
        await store.save_session(row)
        rows.append(last)
    return rows


async def test_what_is_over_for_long_enough_expires_oldest_first(store: Store):
    old = await a_turn(store, "t1", 1, at=100, ended_at=200)
    older = await a_turn(store, "t0", 1, at=50, ended_at=60, in_session="other")
    await a_turn(store, "t2", 2, at=300, ended_at=1000)
    await a_turn(store, "t3", 1, at=100, ended_at=None, in_session="runs")
    await a_turn(store, "t4", 1, at=100, ended_at=200, in_session="waits", state="active")
    outside = record(5, 2, turn_id=None, prompt_id=None, type="session_idle", at=150, record_id="rec_idle")
    assert await store.append([outside]) == Appended(1)
    every = [*older, *old[:2], outside, old[2]]
    assert await store.expired_records(None, 900, 100) == keys(*every)
    assert await store.expired_records(PROJECT, 900, 2) == keys(*every[:2])
    assert await store.expired_records(None, 200, 100) == keys(*older, outside), "the turn ended at that instant"
    assert await store.expired_records(None, 10, 100) == []
    assert await store.expired_records(None, 900, 0) == []
    assert await store.count_expired(None, 900) == Expired({PROJECT: len(every)}, {})


@pytest.mark.parametrize("waits", ["open", "active", "queued"])
async def test_what_tells_that_a_session_is_busy_stays_until_it_is_not(store: Store, waits: str):
    busy = record(1, 0, turn_id=None, prompt_id=None, type="session_busy", at=10, record_id="rec_busy")
    queued = record(2, 0, turn_id=None, prompt_id="p-q", type="turn_queued", at=11, record_id="rec_queued")
    await store.append([busy, queued], [], [prompt("p-q", "done", turn_id=None)])
    rows = await a_turn(store, "t1", 1, at=20, ended_at=None if waits == "open" else 30, state=waits)
    assert await store.expired_records(None, 900, 9) == keys(queued)
    if waits == "open":
        await store.end(ending(turn("t1", 1), turn=ended(turn("t1", 1), ended_at=30)))
    await store.append([], [], [prompt("p-t1", "done")])
    assert await store.expired_records(None, 900, 9) == keys(busy, queued, *rows)


async def test_projects_are_told_apart(store: Store):
    here = await a_turn(store, "t1", 1, at=100, ended_at=200)
    there = await a_turn(store, "t1", 1, at=100, ended_at=200, project="p2")
    assert await store.expired_records("p2", 900, 9) == keys(*there)
    assert sorted(await store.expired_records(None, 900, 9)) == sorted(keys(*here, *there))
    assert await store.count_expired("p2", 900) == Expired({"p2": 3}, {})
    assert await store.count_expired(None, 900) == Expired({PROJECT: 3, "p2": 3}, {})
    assert await store.delete_records(keys(*there)) == 3
    assert await store.records(PROJECT, "s", None, 9) == here
    assert await store.records("p2", "s", None, 9) == []
    assert await store.pruned_to(PROJECT, "s") is None
    assert await store.pruned_to("p2", "s") == (1, 3)


async def test_what_is_deleted_leaves_a_mark_and_its_session(store: Store):
    old = await a_turn(store, "t1", 1, at=100, ended_at=200)
    new = await a_turn(store, "t2", 2, at=900, ended_at=1000)
    assert await store.pruned_to(PROJECT, "s") is None
    assert await store.delete_records(keys(old[0])) == 1
    assert await store.pruned_to(PROJECT, "s") == (1, 1)
    assert await store.delete_records(keys(*old, *old)) == 2, "what is gone, or named twice, is counted once"
    assert await store.pruned_to(PROJECT, "s") == (1, 3)
    assert await store.records(PROJECT, "s", None, 9) == new
    assert await store.turn(PROJECT, "s", "t1") is not None, "the ending in the store is the tombstone"
    assert await store.session(PROJECT, "s") == session(at=900, head_epoch=2, head_n=9)
    assert await store.delete_records([]) == 0
    assert await store.delete_records([RecordKey("p2", "rec_none")]) == 0
    assert await store.pruned_to(PROJECT, "unknown") is None


async def test_no_cursor_that_was_deleted_is_given_out_again(store: Store):
    """Case H3: an event outside of a turn may be newer than what its session's row says."""
    rows = await a_turn(store, "t1", 1, at=100, ended_at=200)
    idle = record(12, 1, turn_id=None, prompt_id=None, type="session_idle", at=210, record_id="rec_idle")
    await store.append([idle])
    await store.delete_records(keys(*rows, idle))
    assert await store.session(PROJECT, "s") == session(at=100, head_epoch=1, head_n=12)
    await store.save_session(session(at=5000, head_epoch=1, head_n=9))
    assert await store.session(PROJECT, "s") == session(at=100, head_epoch=1, head_n=12)


async def test_a_record_that_retention_deleted_does_not_come_back(store: Store):
    rows = await a_turn(store, "t1", 1, at=100, ended_at=200)
    await store.delete_records(keys(*rows))
    assert await store.append([rows[0]]) == Appended(0, 1), "a stream may bring it once more"
    assert await store.records(PROJECT, "s", None, 9) == []


async def test_what_was_set_aside_expires_by_its_own_instant(store: Store):
    rows = [record(n, at=n) for n in range(1, 4)]
    for at, row in zip((30, 10, 20), rows, strict=True):
        await store.quarantine([row], "why", at)
    await store.quarantine([rows[0]._replace(project="p2")], "why", 5)
    assert await store.expired_quarantine(PROJECT, 30, 9) == keys(rows[1], rows[2])
    assert await store.expired_quarantine(PROJECT, 31, 2) == keys(rows[1], rows[2])
    assert len(await store.expired_quarantine(None, 31, 9)) == 4
    assert await store.count_expired(None, 25) == Expired({}, {PROJECT: 2, "p2": 1})
    assert await store.delete_quarantined([*keys(rows[1], rows[2]), RecordKey(PROJECT, "rec_none")]) == 2
    assert [row.record for _, row in await store.quarantined(PROJECT, 9)] == [rows[0]]
    assert len(await store.quarantined("p2", 9)) == 1
    assert await store.delete_quarantined([]) == 0


async def test_deleting_a_session_deletes_its_mark(store: Store):
    rows = await a_turn(store, "t1", 1, at=100, ended_at=200)
    await store.delete_records(keys(*rows))
    await store.save_session(session(at=2000, head_epoch=1, head_n=9, ended_at=2000))
    await store.delete_session_content(PROJECT, "s")
    assert await store.pruned_to(PROJECT, "s") is None


async def test_ended_turns_come_in_the_order_of_their_endings_and_say_what_is_told(store: Store):
    await a_turn(store, "t2", 1, at=100, ended_at=500, in_session="b")
    await a_turn(store, "t3", 1, at=100, ended_at=300, in_session="c", state="active")
    await a_turn(store, "t4", 1, at=100, ended_at=None, in_session="d")
    for name, ended_at in (("t1", 400), ("t0", 400)):
        of = turn(name, 1, name, prompt_id=None)
        await store.admit(Admission(session(name), of))
        await store.end(ending(of, turn=ended(of, "lost", ended_at=ended_at)))
    first, second = EndedTurn(300, PROJECT, "t3", "c", True), EndedTurn(400, PROJECT, "t0", "t0", False)
    third, last = EndedTurn(400, PROJECT, "t1", "t1", False), EndedTurn(500, PROJECT, "t2", "b", True)
    assert await store.ended_turns(None, FIRST, 9) == [first, second, third, last]
    assert await store.ended_turns(PROJECT, first[:3], 1) == [second]
    assert await store.ended_turns(None, second[:3], 9) == [third, last]
    assert await store.ended_turns(None, last[:3], 9) == []
    assert await store.ended_turns("p2", FIRST, 9) == []
    rows = await store.records(PROJECT, "b", None, 9)
    await store.delete_records(keys(*rows))
    assert await store.ended_turns(None, third[:3], 9) == [last], "what retention deleted was told"


async def test_a_missing_ending_is_written_once_even_when_the_session_has_moved_on(store: Store):
    await store.admit(admission())
    missing = record(1, 5, turn_id="t1", type="done", record_id="rec_done")
    assert await store.add_ending(missing) is False, "the turn goes on"
    await store.end(ending(turn()))
    await store.admit(admission("t2", 2))
    assert await store.add_ending(missing._replace(epoch=1)) is False, "a newer turn has given out cursors"
    assert await store.add_ending(missing._replace(turn_id="t9")) is False, "no such turn"
    assert await store.add_ending(missing._replace(session_id="other")) is False
    assert await store.add_ending(missing) is True
    assert await store.add_ending(missing) is False
    assert await store.add_ending(missing._replace(n=2, record_id="rec_again")) is False
    assert await store.records(PROJECT, "s", None, 9) == [missing]
    found = await store.session(PROJECT, "s")
    assert found is not None
    assert (found.head_epoch, found.head_n) == (5, 1)


async def test_an_ending_that_was_refused_is_found_and_told_case_g8(store: Store):
    """Case G8: its record is in quarantine, its turn is marked as lacking it, and gets another one."""
    await store.admit(admission(records=[record(1)]))
    refused = record(1, type="done", record_id="rec_refused")
    assert await store.end(ending(turn(), records=[record(2), refused]))
    assert [(row.record, row.reason) for _, row in await store.quarantined(PROJECT, 9)] == [(refused, "refused")]
    (lacking,) = await store.ended_turns(None, FIRST, 9)
    assert (lacking.turn_id, lacking.told) == ("t1", False)
    assert await store.add_ending(record(3, type="done", record_id="rec_told"))
    assert [row.told for row in await store.ended_turns(None, FIRST, 9)] == [True]
    assert [row.type for row in await store.records(PROJECT, "s", None, 9)] == ["message", "message", "done"]


async def test_a_missing_ending_takes_nobody_s_cursor(store: Store):
    await store.admit(admission(records=[record(1)]))
    await store.end(ending(turn()))
    with pytest.raises(RunnerError) as caught:
        await store.add_ending(record(1, type="done", record_id="rec_done"))
    assert caught.value.code == "internal"
    assert await store.add_ending(record(2, type="done", record_id="rec_done")) is True


async def test_records_that_no_table_could_take_are_told_by_their_cursors(store: Store):
    rows = [record(n, 1, record_id=f"rec_{n}") for n in range(1, 5)]
    for row, why in zip(rows, ("undeliverable", "turn_ended", "refused", "stale_epoch"), strict=True):
        await store.quarantine([row], why, 5)
    await store.quarantine([record(9, 1, "elsewhere", record_id="rec_9")], "refused", 5)
    await store.quarantine([record(9, 1, project="p2", record_id="rec_8")], "refused", 5)
    assert await store.unstorable(PROJECT, "s") == [(1, 1), (1, 3)]
    assert await store.unstorable(PROJECT, "unknown") == []
