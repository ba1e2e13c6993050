"""What every store promises (DESIGN 3.9), for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.store.port import Admission, Appended, Store
from tests.store.rows import PROJECT, admission, command, ended, ending, prompt, question, record, session, turn


async def test_an_empty_store_answers_with_nothing(store: Store):
    assert await store.session(PROJECT, "s") is None
    assert await store.sessions(PROJECT, 10) == []
    assert await store.prompt(PROJECT, "s", "p1") is None
    assert await store.turn(PROJECT, "s", "t1") is None
    assert await store.last_turn(PROJECT, "s") is None
    assert await store.open_turns() == []
    assert await store.records(PROJECT, "s", None, 10) == []
    assert await store.interactions(PROJECT) == []
    assert await store.interaction(PROJECT, "i1") is None
    assert await store.ready()
    assert store.store_id.startswith("store_")


async def test_admit_writes_everything_together(store: Store):
    row = Admission(
        session(config={"harness": "demo", "env": {"ä": "\x01"}}, agent_state={"id": "a"}, usage={"in": 1}, head_n=2),
        turn(resumes="t0"),
        prompt(content=[{"type": "text", "text": "höllo"}]),
        [question(request={"options": [1]})],
        [record(1), record(2, data=b'{"x":"\xc3\xa4"}')],
    )
    assert await store.admit(row)
    assert await store.session(PROJECT, "s") == row.session
    assert await store.turn(PROJECT, "s", "t1") == row.turn
    assert await store.last_turn(PROJECT, "s") == row.turn
    assert await store.open_turns() == [row.turn]
    assert await store.prompt(PROJECT, "s", "p1") == row.prompt
    assert await store.interactions(PROJECT) == list(row.interactions)
    assert await store.records(PROJECT, "s", None, 10) == list(row.records)


async def test_what_postgresql_has_no_place_for_comes_back_with_a_marker_from_every_store(store: Store):
    """NUL is no character of its text, and none of ``jsonb``; a backslash before ``u0000`` is one."""
    odd, kept = {"a\0": ["\0", "\\u0000", "😀"]}, {"a\ufffd": ["\ufffd", "\\u0000", "😀"]}
    row = Admission(
        session(config=odd, agent_state=odd),
        turn(),
        prompt(content=[odd], options=odd),
        [question(request=odd)],
    )
    assert await store.admit(row)
    stored = await store.session(PROJECT, "s")
    assert stored is not None
    assert stored.config == stored.agent_state == kept
    known = await store.prompt(PROJECT, "s", "p1")
    assert known is not None
    assert (known.content, known.options) == ([kept], kept)
    [asked] = await store.interactions(PROJECT, "s")
    assert asked.request == kept
    await store.submit_command(command(arguments=odd))
    [issued] = await store.open_commands((PROJECT, "s"))
    assert issued.arguments == kept


@pytest.mark.parametrize("second", [turn("t2", 1), turn("t1", 2), turn("t1", 1), turn("t1", 2, in_session="other")])
async def test_a_turn_id_and_an_epoch_are_taken_once_and_the_loser_leaves_no_trace(store: Store, second):
    assert await store.admit(admission(records=[record(1)]))
    loser = Admission(session(at=5000, head_n=9), second, prompt("p2"), [question()], [record(2)])
    assert not await store.admit(loser)
    assert await store.session(PROJECT, "s") == session()
    assert await store.prompt(PROJECT, "s", "p2") is None
    assert await store.interactions(PROJECT) == []
    assert await store.records(PROJECT, "s", None, 10) == [record(1)]


async def test_the_ending_is_written_once_case_a15(store: Store):
    """Case A15: the first ending wins; of the second nothing is written."""
    await store.admit(admission(prompt=prompt(content=[{"text": "kept"}])))
    first = ending(turn(), prompt=prompt(state="done", result={"ok": True}), records=[record(1)])
    assert await store.end(first)
    late = ending(
        turn(),
        "cancelled",
        session=session(at=7000, head_n=8),
        prompt=prompt(state="aborted"),
        others=[prompt("p0", "cancelled")],
        interactions=[question()],
        records=[record(2)],
    )
    assert not await store.end(late)
    assert await store.turn(PROJECT, "s", "t1") == ended(turn())
    assert await store.session(PROJECT, "s") == first.session
    stored = await store.prompt(PROJECT, "s", "p1")
    assert stored is not None
    assert (stored.state, stored.result, stored.content) == ("done", {"ok": True}, [{"text": "kept"}])
    assert await store.prompt(PROJECT, "s", "p0") is None
    assert await store.interactions(PROJECT) == []
    assert await store.records(PROJECT, "s", None, 10) == [record(1)]
    assert await store.open_turns() == []


async def test_of_many_endings_at_once_exactly_one_is_written(store: Store):
    await store.admit(admission())
    outcomes = ["completed", "cancelled", "failed", "lost"] * 5
    won = await asyncio.gather(*(store.end(ending(turn(), outcome)) for outcome in outcomes))
    assert won.count(True) == 1
    stored = await store.turn(PROJECT, "s", "t1")
    assert stored is not None
    assert stored.outcome == outcomes[won.index(True)]


async def test_of_many_admissions_of_one_epoch_exactly_one_is_written(store: Store):
    won = await asyncio.gather(*(store.admit(admission(f"t{n}")) for n in range(20)))
    assert won.count(True) == 1
    assert [row.turn_id for row in await store.open_turns()] == [f"t{won.index(True)}"]


async def test_an_ending_needs_its_turn(store: Store):
    assert not await store.end(ending(turn()))
    assert await store.session(PROJECT, "s") is None
    await store.admit(admission())
    assert not await store.end(ending(turn(epoch=2)))
    assert not await store.end(ending(turn(in_session="other")))
    with pytest.raises(ValueError, match="outcome"):
        await store.end(replace(ending(turn()), turn=turn()))
    assert await store.open_turns() == [turn()]


async def test_an_ending_closes_other_prompts_too(store: Store):
    await store.admit(admission(prompt=prompt("p0")))
    await store.admit(admission("t2", 2, prompt=prompt("p1")))
    await store.end(ending(turn("t2", 2), prompt=prompt("p1", "done"), others=[prompt("p0", "cancelled")]))
    states = [await store.prompt(PROJECT, "s", name) for name in ("p0", "p1")]
    assert [row.state for row in states if row] == ["cancelled", "done"]


async def test_a_known_record_is_a_no_op_case_g10(store: Store):
    """Cases G2 and G10: a repeated record changes nothing, alone or inside its batch, also behind its turn's ending."""
    await store.admit(admission())
    assert await store.append([record(1), record(2)]) == Appended(2)
    again = [record(2, data=b'"other"'), record(3), record(3, data=b'"again"')]
    assert await store.append(again) == Appended(3)
    assert await store.records(PROJECT, "s", None, 10) == [record(1), record(2), record(3)]
    assert await store.append([record(9, record_id=record(1).record_id)]) == Appended(1)
    assert len(await store.records(PROJECT, "s", None, 10)) == 3
    await store.end(ending(turn()))
    closed = question(status="consumed")
    assert await store.append([record(1), record(2)], [closed]) == Appended(2)
    assert await store.quarantined(PROJECT, 10) == []
    assert await store.interactions(PROJECT) == [closed]


async def test_a_cursor_is_never_given_to_two_records(store: Store):
    await store.admit(admission(records=[record(1)]))
    with pytest.raises(RunnerError) as caught:
        await store.append([record(2), record(1, record_id="rec_other")], [question()], [prompt()])
    assert caught.value.code == "internal"
    assert await store.records(PROJECT, "s", None, 10) == [record(1)]
    assert await store.interactions(PROJECT) == []
    assert await store.prompt(PROJECT, "s", "p1") is None
    assert await store.quarantined(PROJECT, 10) == []
    with pytest.raises(RunnerError):
        await store.admit(admission("t2", 2, records=[record(1, record_id="rec_other")]))
    assert await store.open_turns() == [turn()]


async def test_a_refused_transaction_spares_its_neighbours_case_g8(store: Store):
    """Cases G2 and G8: what is committed in one group with a bad row lands."""
    await store.admit(admission("t1", records=[record(1)]))
    calls: list[Coroutine[Any, Any, Any]] = [store.append([record(n)]) for n in range(2, 20)]
    calls[7:7] = [store.append([record(50), record(1, record_id="rec_bad")])]
    calls[12:12] = [store.admit(other_session("o1")), store.admit(other_session("o2"))]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [index for index, result in enumerate(results) if isinstance(result, RunnerError)] == [7]
    assert results[12] is True
    assert results[13] is False
    assert [row.n for row in await store.records(PROJECT, "s", None, 100)] == list(range(1, 20))


def other_session(name: str) -> Admission:
    return Admission(session("other"), turn(name, in_session="other"))


async def test_records_come_in_cursor_order_behind_the_cursor(store: Store):
    """Case H3: nothing arrives behind a cursor that somebody has read past."""
    rows = [record(n, epoch) for epoch in (1, 2, 10) for n in (1, 2, 10)]
    for epoch in (1, 2, 10):
        await store.admit(admission(f"t{epoch}", epoch, records=[record(n, epoch) for n in (10, 1, 2)]))
    assert await store.records(PROJECT, "s", None, 100) == rows
    assert await store.records(PROJECT, "s", (2, 2), 100) == rows[5:]
    assert await store.records(PROJECT, "s", (2, 2), 2) == rows[5:7]
    assert await store.records(PROJECT, "s", (10, 10), 100) == []
    assert await store.records(PROJECT, "s", None, 0) == []
    assert await store.records(PROJECT, "s", None, -1) == []
    assert await store.append([record(3, 1)]) == Appended(0, 1)
    assert await store.records(PROJECT, "s", None, 100) == rows


async def test_sessions_are_listed_newest_first_case_g14(store: Store):
    """Case G14: shuffled ids, a small limit, the most recent ones; ties by id; pages meet without gap."""
    names = [f"s{n * 7 % 10}" for n in range(10)]
    for at, name in enumerate(names):
        await store.save_session(session(name, at=at // 2))
    await store.save_session(session("foreign", project="p2"))
    expected = [row.session_id for row in sorted((session(n, at=i // 2) for i, n in enumerate(names)), key=_newest)]
    assert [row.session_id for row in await store.sessions(PROJECT, 3)] == expected[:3]
    seen: list[str] = []
    before = None
    while page := await store.sessions(PROJECT, 3, before):
        seen += [row.session_id for row in page]
        before = (page[-1].updated_at, page[-1].session_id)
    assert seen == expected
    await store.save_session(session("s3", at=99))
    assert (await store.sessions(PROJECT, 1))[0].session_id == "s3"
    assert await store.sessions(PROJECT, -5) == []


def _newest(row) -> tuple[int, list[int]]:
    return -row.updated_at, [-ord(letter) for letter in row.session_id]


async def test_an_ended_session_stays_as_it_was(store: Store):
    await store.save_session(session())
    await store.save_session(session(at=2000, created_at=1500, ended_at=2000))
    await store.save_session(session(at=3000, created_at=2500, usage={"in": 3}))
    assert await store.session(PROJECT, "s") == session(at=2000, ended_at=2000)


async def test_last_turn_is_the_highest_epoch_and_open_turns_are_all(store: Store):
    await store.admit(admission("t2", 2))
    await store.admit(admission("t9", 9))
    await store.admit(admission("t10", 10))
    await store.admit(Admission(session(project="p2"), turn("t1", project="p2", started_at=1)))
    await store.end(ending(turn("t9", 9)))
    last = await store.last_turn(PROJECT, "s")
    assert last is not None
    assert last.turn_id == "t10"
    assert [row.turn_id for row in await store.open_turns()] == ["t1", "t2", "t10"]
    assert [row.turn_id for row in await store.open_turns((PROJECT, "s"))] == ["t2", "t10"]
    assert await store.open_turns(("p2", "other")) == []


async def test_an_answer_is_claimed_by_compare_and_set_case_f12(store: Store):
    """Case F12: of two verdicts one is written; only status and answer change."""
    await store.admit(admission(interactions=[question(request={"kind": "x"})]))
    verdicts = [question(status="answered", answer={"decision": word}, turn_id="t9") for word in ("allow", "deny")]
    won = await asyncio.gather(*(store.answer_interaction(row, "pending") for row in verdicts))
    assert won == [True, False]
    expected = question(status="answered", answer={"decision": "allow"}, request={"kind": "x"})
    assert await store.interaction(PROJECT, "i1") == expected
    assert not await store.answer_interaction(verdicts[1], "pending")
    assert not await store.answer_interaction(question("unknown", "answered"), "pending")
    assert await store.answer_interaction(question(status="pending"), "answered")
    assert await store.interaction(PROJECT, "i1") == question(request={"kind": "x"})


@pytest.mark.parametrize("status", ["consumed", "cancelled", "expired"])
async def test_a_closed_interaction_never_reopens(store: Store, status: str):
    await store.admit(admission(interactions=[question()]))
    await store.append([], [question(status=status)])
    await store.append([], [question(status="pending"), question("i2")])
    await store.admit(admission("t2", 2, interactions=[question(status="cancelled", answer={})]))
    assert await store.interactions(PROJECT) == [question(status=status), question("i2")]


async def test_interactions_in_order_of_creation_and_by_filter(store: Store):
    await store.admit(admission())
    await store.append([], [question("b", created_at=5), question("a", created_at=5), question("c", created_at=1)])
    second = question("d", in_session="s2", status="answered", turn_id="t2")
    await store.admit(Admission(session("s2"), turn("t2", in_session="s2"), interactions=[second]))
    foreign = question("e", project="p2")
    await store.admit(Admission(session(project="p2"), turn(project="p2"), interactions=[foreign]))
    assert [row.interaction_id for row in await store.interactions(PROJECT)] == ["c", "b", "a", "d"]
    assert [row.interaction_id for row in await store.interactions(PROJECT, "s")] == ["c", "b", "a"]
    assert [row.interaction_id for row in await store.interactions(PROJECT, status="answered")] == ["d"]
    assert await store.interactions(PROJECT, "s", "answered") == []
    await store.append([], [question("c", status="cancelled", created_at=1)])
    assert [row.interaction_id for row in await store.interactions(PROJECT, "s", "pending")] == ["b", "a"]


async def test_open_interactions_are_those_of_every_project(store: Store):
    rows = [question("b", created_at=5), question("a", created_at=5, project="p2"), question("c", created_at=1)]
    await store.admit(admission())
    await store.admit(Admission(session(project="p2"), turn(project="p2")))
    for row in (*rows, question("d", status="consumed")):
        await store.append([], [row])
    assert await store.open_interactions("pending") == [rows[2], rows[0], rows[1]]
    assert await store.open_interactions("answered") == []


async def test_a_project_sees_nothing_of_another_case_j5(store: Store):
    """Cases J5 and J6: same ids, another tenant."""
    await store.admit(admission(prompt=prompt(), interactions=[question()], records=[record(1)]))
    assert await store.session("p2", "s") is None
    assert await store.sessions("p2", 10) == []
    assert await store.prompt("p2", "s", "p1") is None
    assert await store.turn("p2", "s", "t1") is None
    assert await store.last_turn("p2", "s") is None
    assert await store.records("p2", "s", None, 10) == []
    assert await store.interactions("p2") == []
    assert await store.interaction("p2", "i1") is None
    assert not await store.answer_interaction(question(status="answered", project="p2"), "pending")
    assert not await store.end(ending(turn(project="p2"), session=session(at=2000, project="p2")))
    twin = Admission(
        session(project="p2"), turn(project="p2"), prompt(project="p2"), (), [record(1, project="p2", data=b"2")]
    )
    assert await store.admit(twin)
    await store.save_session(session(project="p2", ended_at=1))
    await store.delete_session_content("p2", "s")
    assert await store.records("p2", "s", None, 10) == []
    assert await store.records(PROJECT, "s", None, 10) == [record(1)]
    assert await store.interactions(PROJECT) == [question()]


async def test_a_turn_is_found_only_in_its_session(store: Store):
    await store.admit(admission())
    assert await store.turn(PROJECT, "other", "t1") is None


async def test_deleting_leaves_only_the_ended_row(store: Store):
    await store.admit(admission(prompt=prompt(), interactions=[question()], records=[record(1)]))
    await store.save_session(session(config={"env": {"A": "b"}}, agent_state={"id": 1}, usage={"in": 1}))
    await store.admit(Admission(session("s2"), turn("t2", in_session="s2"), records=[record(1, in_session="s2")]))
    await store.delete_session_content(PROJECT, "s")
    assert await store.records(PROJECT, "s", None, 10) == [record(1)], "a session that goes on is left alone"
    await store.save_session(session(at=3000, ended_at=3000, config={"env": {"A": "b"}}, usage={"in": 1}))
    await store.delete_session_content(PROJECT, "s")
    await store.delete_session_content(PROJECT, "unknown")
    assert await store.session(PROJECT, "s") == session(at=3000, ended_at=3000, usage={"in": 1})
    assert await store.prompt(PROJECT, "s", "p1") is None
    assert await store.turn(PROJECT, "s", "t1") is None
    assert await store.last_turn(PROJECT, "s") is None
    assert await store.interactions(PROJECT) == []
    assert await store.records(PROJECT, "s", None, 10) == []
    assert not await store.end(ending(turn(), records=[record(2)])), "a late ending brings nothing back"
    assert await store.records(PROJECT, "s", None, 10) == []
    assert [row.turn_id for row in await store.open_turns()] == ["t2"]
    assert len(await store.records(PROJECT, "s2", None, 10)) == 1


async def test_rows_are_copied_not_kept(store: Store):
    config = {"list": [1]}
    await store.save_session(session(config=config))
    config["list"].append(2)
    read = await store.session(PROJECT, "s")
    assert read is not None
    assert read.config == {"list": [1]}
    read.config["list"].append(3)
    assert await store.session(PROJECT, "s") == session(config={"list": [1]})


async def test_a_closed_store_is_unavailable(store: Store):
    await store.close()
    await store.close()
    assert not await store.ready()
    for call in (store.session(PROJECT, "s"), store.save_session(session()), store.admit(admission())):
        with pytest.raises(RunnerError) as caught:
            await call
        assert caught.value.code == "store_unavailable"
