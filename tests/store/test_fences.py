"""What a stale writer cannot do, in every store (DESIGN 3.9)."""

from __future__ import annotations

import pytest

from runner.store.port import Admission, Appended, Store
from tests.store.rows import AT, PROJECT, admission, ended, ending, prompt, question, record, session, turn


async def aside(store: Store, project: str = PROJECT) -> list[tuple[str, str]]:
    return [(row.record.record_id, row.reason) for _, row in await store.quarantined(project, 100)]


async def test_a_record_behind_its_turns_ending_is_set_aside(store: Store):
    """DESIGN 3.9: what a replica writes that was frozen while its turn was ended by another one counts for nothing."""
    await store.admit(admission(records=[record(1)], prompt=prompt(), interactions=[question()]))
    await store.end(ending(turn(), "lost", records=[record(1, 2, turn_id="t1", record_id="rec_closing")]))
    late = [record(2), record(3)]
    answer = await store.append(
        late, [question("i2", "cancelled"), question(status="answered")], [prompt(state="done")]
    )
    assert answer == Appended(0, 2)
    assert [row.record_id for row in await store.records(PROJECT, "s", None, 10)] == [
        record(1).record_id,
        "rec_closing",
    ]
    assert await store.interactions(PROJECT) == [question()], "a stale writer's questions are left alone"
    stored = await store.prompt(PROJECT, "s", "p1")
    assert stored is not None
    assert stored.state == "active"
    found = await store.quarantined(PROJECT, 10)
    assert [(row.record, row.reason, row.at) for _, row in found] == [(row, "turn_ended", AT) for row in late]


async def test_an_ended_turn_asks_nothing_new(store: Store):
    """No card is left that nobody would close, whoever wakes up late."""
    await store.admit(admission(interactions=[question("known")]))
    await store.end(ending(turn(), "lost"))
    assert await store.append([], [question("new")], [prompt()]) == Appended(0, 1)
    assert await store.interaction(PROJECT, "new") is None
    assert await store.prompt(PROJECT, "s", "p1") is None, "a stale writer's prompts are left alone"
    assert await store.append([], [question("closed", status="cancelled")]) == Appended(0)
    assert await store.append([], [question("known", status="answered")]) == Appended(0)


async def test_a_paused_turn_asks_until_another_one_began(store: Store):
    await store.admit(admission())
    await store.end(ending(turn(), "paused"))
    assert await store.append([], [question("i1")]) == Appended(0)
    await store.admit(admission("t2", 2))
    assert await store.append([], [question("i2")]) == Appended(0, 1)
    assert await store.append([], [question("i2", turn_id="t2"), question("i1")]) == Appended(0)
    assert [row.interaction_id for row in await store.interactions(PROJECT)] == ["i1", "i2"]


async def test_records_of_an_unknown_turn_are_set_aside(store: Store):
    assert await store.append([record(1)]) == Appended(0, 1)
    await store.admit(Admission(session("other"), turn(in_session="other")))
    assert await store.append([record(2)]) == Appended(0, 1), "the turn of another session is unknown too"
    assert await aside(store) == [(record(n).record_id, "turn_unknown") for n in (1, 2)]


async def test_records_of_an_older_epoch_are_set_aside(store: Store):
    await store.admit(admission("t1", 1))
    await store.admit(admission("t2", 2))
    outside = record(5, 1, turn_id=None, record_id="rec_outside")
    wrong = record(1, 3, turn_id="t2")
    questions = [question(turn_id="t2")]
    assert await store.append([record(1), outside, wrong, record(1, 2)], questions) == Appended(1, 3)
    assert await store.records(PROJECT, "s", None, 10) == [record(1, 2)]
    assert await store.interactions(PROJECT) == []
    assert {why for _, why in await aside(store)} == {"stale_epoch"}
    assert len(await aside(store)) == 3


async def test_an_event_outside_a_turn_takes_the_newest_epoch(store: Store):
    outside = [record(1, 0, turn_id=None), record(2, 1, turn_id=None), record(1, 2, turn_id=None)]
    assert await store.append(outside[:1]) == Appended(1), "before the first turn"
    await store.admit(admission())
    await store.end(ending(turn(), session=session(head_epoch=1, head_n=1)))
    assert await store.append(outside[1:]) == Appended(2)
    await store.save_session(session(head_epoch=2, head_n=1))
    assert await store.append([record(3, 1, turn_id=None)]) == Appended(0, 1), "the head has moved on"
    assert await store.records(PROJECT, "s", None, 10) == outside


async def test_setting_aside_is_done_once_and_never_hides_what_is_stored(store: Store):
    await store.admit(admission(records=[record(1)]))
    await store.quarantine([record(1), record(2), record(2, data=b'"other"')], "unstorable", 3000)
    await store.quarantine([record(2)], "again", 4000)
    ((number, row),) = await store.quarantined(PROJECT, 10)
    assert (row.record, row.reason, row.at) == (record(2), "unstorable", 3000)
    assert await store.quarantined(PROJECT, 10, number) == []
    await store.quarantine([], "nothing", 5000)
    assert await store.records(PROJECT, "s", None, 10) == [record(1)]


async def test_the_quarantine_is_read_in_pages_by_its_own_project(store: Store):
    rows = [record(n) for n in range(5)]
    for row in rows:
        await store.quarantine([row], "why", 1)
    await store.quarantine([rows[3]._replace(project="p2")], "why", 1)
    seen, after = [], 0
    while page := await store.quarantined(PROJECT, 2, after):
        assert len(page) <= 2
        seen += [row.record for _, row in page]
        after = page[-1][0]
    assert seen == rows
    assert len(await store.quarantined("p2", 10)) == 1
    assert await store.quarantined(PROJECT, -1) == []


async def test_deleting_a_session_deletes_what_was_set_aside(store: Store):
    await store.quarantine([record(1), record(2, in_session="s2")], "why", 1)
    await store.save_session(session(ended_at=2000))
    await store.delete_session_content(PROJECT, "s")
    left = await store.quarantined(PROJECT, 10)
    assert [row.record.session_id for _, row in left] == ["s2"]
    await store.quarantine([record(3), record(4, in_session="s3")], "why", 1)
    ((_, row),) = await store.quarantined(PROJECT, 10, left[-1][0])
    assert row.record.session_id == "s3", "no number is given again, and nothing of a deleted session comes back"


@pytest.mark.parametrize("head", [(3, 4), (2, 9)])
async def test_a_session_row_with_an_older_head_changes_nothing(store: Store, head: tuple[int, int]):
    """An owner that comes back late leaves the new owner's configuration alone."""
    newest = session(at=5000, head_epoch=3, head_n=5, config={"model": "new"})
    await store.save_session(newest)
    stale = session(at=9000, head_epoch=head[0], head_n=head[1], config={"model": "old"}, ended_at=9000)
    await store.save_session(stale)
    assert await store.session(PROJECT, "s") == newest
    await store.admit(Admission(newest, turn("t9", 9)))
    assert await store.end(ending(turn("t9", 9), session=stale)), "the ending itself is decided by its turn"
    assert await store.session(PROJECT, "s") == newest


async def test_the_same_head_may_say_more(store: Store):
    await store.save_session(session(head_epoch=3, head_n=5))
    newer = session(at=2000, head_epoch=3, head_n=5, config={"a": 1})
    await store.save_session(newer)
    assert await store.session(PROJECT, "s") == newer


async def test_a_turn_of_an_epoch_that_is_over_is_not_admitted(store: Store):
    await store.admit(admission("t5", 5))
    assert not await store.admit(admission("t4", 4))
    await store.save_session(session(head_epoch=7, head_n=1))
    assert not await store.admit(admission("t6", 6)), "its cursors are given out already"
    assert await store.open_turns() == [turn("t5", 5)]
    assert await store.admit(Admission(session(head_epoch=8), turn("t8", 8)))


async def test_a_turn_goes_on_in_the_epoch_in_which_its_replica_ended_an_earlier_one(store: Store):
    await store.admit(admission("t5", 5))
    closing = record(1, 6, turn_id="t5", record_id="rec_closing")
    assert await store.end(ending(turn("t5", 5), "lost", session=session(head_epoch=6, head_n=1), records=[closing]))
    first = record(2, 6)
    assert await store.admit(Admission(session(head_epoch=6, head_n=2), turn("t6", 6), prompt(), records=[first]))
    assert await store.records(PROJECT, "s", None, 9) == [closing, first]


async def test_paused_turns_are_the_newest_of_their_sessions(store: Store):
    for number, name in enumerate(("waits", "goes-on", "over", "done", "open")):
        row = turn(f"t-{name}", 1, name, started_at=9 - number)
        await store.admit(Admission(session(name), row))
        if name != "open":
            await store.end(ending(row, "completed" if name == "done" else "paused"))
    await store.admit(Admission(session("goes-on"), turn("t-next", 2, "goes-on")))
    await store.save_session(session("over", ended_at=2000))
    other = turn("t-p2", 1, "waits", project="p2", started_at=1)
    await store.admit(Admission(session("waits", project="p2"), other))
    await store.end(ending(other, "paused", session=session("waits", project="p2")))
    waits = turn("t-waits", 1, "waits", started_at=9)
    assert await store.paused_turns() == [ended(other, "paused"), ended(waits, "paused")]


async def test_a_record_that_is_refused_keeps_no_turn_from_ending_case_g8(store: Store):
    """Case G8: the bad row is set aside, its siblings and the ending are written."""
    await store.admit(admission(records=[record(1)]))
    bad = record(1, record_id="rec_other")
    assert await store.end(ending(turn(), records=[record(2), bad, record(3)], prompt=prompt(state="done")))
    assert await store.turn(PROJECT, "s", "t1") == ended(turn())
    assert await store.records(PROJECT, "s", None, 10) == [record(1), record(2), record(3)]
    assert [(row.record, row.reason) for _, row in await store.quarantined(PROJECT, 10)] == [(bad, "refused")]


async def test_a_record_that_an_ending_stores_after_all_is_not_set_aside(store: Store):
    """A record is in the history or in quarantine, never in both."""
    await store.admit(admission(records=[record(1)]))
    twice = [record(1, record_id="rec_twice"), record(2, record_id="rec_twice")]
    assert await store.end(ending(turn(), records=twice))
    assert await store.records(PROJECT, "s", None, 10) == [record(1), twice[1]]
    assert await store.quarantined(PROJECT, 10) == []


async def test_a_session_that_has_ended_admits_nothing(store: Store):
    """DESIGN 3.7: whoever did not hear of the end, for the lease plane was away."""
    await store.admit(admission())
    await store.end(ending(turn()))
    await store.save_session(session(ended_at=3000))
    assert await store.admit(admission("t2", 2, records=[record(1, 2)])) is False
    assert await store.turn(PROJECT, "s", "t2") is None
    assert await store.records(PROJECT, "s", None, 10) == []
    await store.delete_session_content(PROJECT, "s")
    assert await store.admit(admission("t2", 2)) is False
    assert await store.admit(Admission(session("other"), turn("t2", in_session="other"))) is True
