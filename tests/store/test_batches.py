"""Writes that span sessions, and sessions that come with a history, from every store (DESIGN 3.9)."""

from __future__ import annotations

import asyncio

import pytest

from runner.errors import RunnerError
from runner.store.port import Admission, Appended, Store
from tests.store.rows import PROJECT, admission, ending, prompt, question, record, session, turn


async def many_sessions(store: Store) -> None:
    for project, name in ((PROJECT, "a"), (PROJECT, "b"), ("p2", "a")):
        of = turn(f"t-{name}", 1, name, project=project)
        assert await store.admit(Admission(session(name, project=project), of))


def of(project: str, name: str, n: int, **more):
    return record(n, 1, name, turn_id=f"t-{name}", project=project, **more)


async def test_a_batch_spans_sessions_and_projects(store: Store):
    await many_sessions(store)
    batch = [of(PROJECT, "a", 1), of("p2", "a", 1), of(PROJECT, "b", 1), of(PROJECT, "a", 2)]
    assert await store.write_batch(batch) == Appended(4)
    assert await store.write_batch([*batch, of("p2", "a", 2)]) == Appended(5), "what is known is a no-op"
    assert await store.records(PROJECT, "a", None, 9) == [batch[0], batch[3]]
    assert await store.records(PROJECT, "b", None, 9) == [batch[2]]
    assert await store.records("p2", "a", None, 9) == [batch[1], of("p2", "a", 2)]
    assert await store.write_batch([]) == Appended(0)


async def test_a_large_batch_of_which_some_are_known_case_g10(store: Store):
    """Case G10: every other one is there already, some come twice; the rest arrives, also behind a refusal."""
    await many_sessions(store)
    batch = [of(project, name, n) for n in range(1, 201) for project, name in ((PROJECT, "a"), ("p2", "a"))]
    assert await store.append(batch[:200:4]) == Appended(50)
    assert await store.append([*batch[::2], *batch[::2]]) == Appended(400)
    clash = of(PROJECT, "b", 1, record_id="rec_clash")
    other = [of(PROJECT, "b", n) for n in range(1, 151)]
    with pytest.raises(RunnerError, match="refused"):
        await store.append([clash, *other])
    assert await store.records(PROJECT, "b", None, 999) == []
    assert await store.write_batch([*batch, *other]) == Appended(550)
    assert await store.records(PROJECT, "a", None, 999) == batch[::2]
    assert await store.records("p2", "a", None, 999) == batch[1::2]
    assert await store.records(PROJECT, "b", None, 999) == other


@pytest.mark.parametrize("turned", [False, True])
async def test_of_one_record_twice_in_a_batch_the_newest_counts_case_g2(store: Store, turned: bool):
    """Case G2: the same key twice, in both orders."""
    await many_sessions(store)
    partial, whole = of(PROJECT, "a", 3, record_id="rec_x"), of(PROJECT, "a", 4, record_id="rec_x", data=b'"whole"')
    pair = [whole, partial] if turned else [partial, whole]
    other = of(PROJECT, "a", 5)
    assert await store.write_batch([*pair, other]) == Appended(2)
    assert await store.records(PROJECT, "a", None, 9) == [whole, other]


async def test_of_equal_cursors_the_last_one_counts_case_g2(store: Store):
    """Case G2."""
    await many_sessions(store)
    assert await store.write_batch([of(PROJECT, "a", 1, data=b"1"), of(PROJECT, "a", 1, data=b"2")]) == Appended(1)
    assert [row.data for row in await store.records(PROJECT, "a", None, 9)] == [b"2"]


async def test_late_ones_of_a_batch_are_set_aside_and_spare_their_neighbours(store: Store):
    await many_sessions(store)
    await store.end(ending(turn("t-b", 1, "b"), "lost"))
    unknown = record(7, 1, "a", turn_id="t-none", record_id="rec_unknown")
    stale = of(PROJECT, "a", 8)._replace(epoch=0)
    late = of(PROJECT, "b", 2)
    good = [of(PROJECT, "a", 1), of("p2", "a", 1)]
    assert await store.write_batch([late, good[0], unknown, good[1], stale]) == Appended(2, 3)
    assert {(row.record, row.reason) for _, row in await store.quarantined(PROJECT, 9)} == {
        (late, "turn_ended"),
        (unknown, "turn_unknown"),
        (stale, "stale_epoch"),
    }
    assert await store.records(PROJECT, "b", None, 9) == []


async def test_a_batch_with_a_row_that_is_refused_writes_nothing_of_its_project(store: Store):
    await many_sessions(store)
    await store.append([of(PROJECT, "a", 1)])
    with pytest.raises(RunnerError) as caught:
        await store.write_batch([of(PROJECT, "a", 2), of(PROJECT, "a", 1, record_id="rec_bad"), of(PROJECT, "b", 1)])
    assert caught.value.code == "internal"
    assert await store.records(PROJECT, "a", None, 9) == [of(PROJECT, "a", 1)]
    assert await store.records(PROJECT, "b", None, 9) == []
    assert await store.quarantined(PROJECT, 9) == []


async def test_what_arrives_for_a_deleted_session_is_dropped_and_counted(store: Store):
    await many_sessions(store)
    await store.end(ending(turn("t-b", 1, "b")))
    await store.save_session(session("b", ended_at=3000, head_epoch=1))
    await store.delete_session_content(PROJECT, "b")
    outside = record(9, 1, "b", turn_id=None, record_id="rec_outside")
    assert await store.write_batch([of(PROJECT, "b", 1), outside, of(PROJECT, "a", 1)]) == Appended(1, 0, 2)
    assert await store.append([outside], [question(turn_id="t-b", in_session="b")]) == Appended(0, 1, 1)
    assert await store.records(PROJECT, "b", None, 9) == []
    assert await store.quarantined(PROJECT, 9) == []
    assert await store.interactions(PROJECT) == []


async def test_nothing_else_comes_back_to_a_deleted_session_either(store: Store):
    """A replica that stood still while another one deleted it goes on."""
    await store.admit(admission(prompt=prompt()))
    await store.end(ending(turn()))
    over = session(ended_at=3000, head_epoch=1)
    await store.save_session(over)
    await store.delete_session_content(PROJECT, "s")
    await store.save_session(session(at=4000, head_epoch=2, config={"env": {"A": "b"}}, agent_state={"id": 1}))
    assert await store.session(PROJECT, "s") == over
    queued = prompt("p2", "queued", turn_id=None)
    assert await store.append([], [], [queued]) == Appended(0, 0, 1)
    assert await store.append([], [question(status="cancelled")], [prompt(state="failed")]) == Appended(0, 0, 2)
    assert await store.append([], [question()]) == Appended(0, 1, 1)
    assert await store.waiting_prompts() == []
    assert await store.prompt(PROJECT, "s", "p1") is None
    assert await store.interactions(PROJECT) == []


async def test_a_session_that_ended_and_still_has_its_turns_is_not_deleted_yet(store: Store):
    await store.admit(admission())
    await store.save_session(session(ended_at=3000, head_epoch=1))
    assert await store.append([record(1), record(2, turn_id=None, record_id="rec_idle")]) == Appended(2)
    assert await store.append([record(3, turn_id="t-none", record_id="rec_other")]) == Appended(0, 1)


async def test_nobody_asks_for_a_turn_that_is_not_known(store: Store):
    """Nobody would close that question: its turn was refused, or deleted with its session."""
    assert await store.append([], [question()]) == Appended(0, 1)
    assert await store.interactions(PROJECT) == []
    closed = question(status="cancelled")
    assert await store.append([], [closed]) == Appended(0)
    assert await store.interactions(PROJECT) == [closed]


async def test_a_session_is_made_with_its_history(store: Store):
    row = session("fork", head_epoch=2, head_n=3, config={"harness": "demo"}, agent_state={"has_context": True})
    history = [record(n, 1, "fork", record_id=f"rec_f{n}") for n in (1, 2)] + [record(3, 2, "fork", turn_id=None)]
    assert await store.create_session(row, history) is True
    assert await store.session(PROJECT, "fork") == row
    assert await store.records(PROJECT, "fork", None, 9) == history
    assert await store.admit(Admission(session("fork", head_epoch=3), turn("t-f", 3, "fork")))


async def test_a_session_that_exists_is_not_made_again(store: Store):
    await store.save_session(session("s"))
    await store.save_session(session("over", ended_at=2000))
    for name in ("s", "over"):
        assert await store.create_session(session(name, head_n=9), [record(1, in_session=name)]) is False
        assert await store.records(PROJECT, name, None, 9) == []
    assert await store.session(PROJECT, "s") == session("s")
    made = await asyncio.gather(*(store.create_session(session("new", at=n), []) for n in range(5)))
    assert made.count(True) == 1


async def test_a_history_with_a_record_that_is_refused_makes_no_session(store: Store):
    with pytest.raises(RunnerError) as caught:
        await store.create_session(session("fork"), [record(1, 1, "fork"), record(1, 1, "fork", record_id="rec_bad")])
    assert caught.value.code == "internal"
    assert await store.session(PROJECT, "fork") is None
    assert await store.create_session(session("fork"), []) is True


async def test_a_store_that_answers_has_what_it_was_given(store: Store):
    await store.admit(admission())
    await store.append([record(1)])
    await store.caught_up(PROJECT, "s")
    await store.caught_up(PROJECT, "unknown")
    assert await store.records(PROJECT, "s", None, 9) == [record(1)]
