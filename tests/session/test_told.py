"""What a new agent without memory is told of its session (DESIGN 3.5, ``context_lost``)."""

from __future__ import annotations

import asyncio

import pytest

from runner.rules.transcript import LEFT_OUT, MISSING
from runner.store.port import RecordKey
from runner.store.rows import REFUSED
from tests.session.bed import Bed
from tests.session.resuming import first_turn, lose_seat, next_turn, prompt_texts

pytestmark = pytest.mark.virtual_time


async def test_the_record_that_is_told_masks_what_was_masked(bed: Bed) -> None:
    handle = await bed.dispatch(prompt="use hunter2-secret", keep_on_disconnect=True, secrets={"KEY": "hunter2-secret"})
    agent = await bed.agent()
    frame = await agent.prompt()
    agent.update(sessionUpdate="tool_call", toolCallId="t", title="ls", kind="execute", status="in_progress")
    agent.say("I used hunter2-secret")
    await bed.cancel()
    agent.answer(frame, "cancelled")
    assert (await handle.result())["outcome"] == "cancelled"
    await asyncio.sleep(601)
    _, agent = await next_turn(bed)
    told = prompt_texts(agent)[0]
    assert "hunter2" not in told
    assert "No result: the call was interrupted." in told
    assert "The user stopped this turn." in told


async def test_a_long_session_is_told_from_its_end(bed: Bed) -> None:
    for n in range(1, 31):
        handle = await bed.dispatch(prompt=f"question {n}.", keep_on_disconnect=True)
        await (await bed.agent()).finish(n, f"answer {n}. " + "x" * 5000)
        await handle.result()
    await lose_seat(bed)
    _, agent = await next_turn(bed)
    told = prompt_texts(agent)[0]
    assert len(told.encode()) <= 64 * 1024
    assert "question 30." in told
    assert "question 1." not in told
    assert "The oldest part of the conversation is left out." in told


async def test_records_that_cannot_be_read_are_told_to_be_missing(bed: Bed) -> None:
    await first_turn(bed)
    await lose_seat(bed)
    handle = await bed.dispatch(prompt="next", keep_on_disconnect=True)
    bed.store.unavailable = True
    agent = await bed.agent(2)
    frame = await agent.prompt()
    told = prompt_texts(agent)[0]
    assert "could not be read and is missing" in told
    bed.store.unavailable = False
    agent.say("ok")
    agent.answer(frame)
    assert (await handle.result())["ok"]


async def test_what_retention_deleted_is_told_to_be_left_out(bed: Bed) -> None:
    await first_turn(bed)
    handle = await bed.dispatch(prompt="second question", keep_on_disconnect=True)
    await (await bed.agent()).finish(2, "second answer")
    await handle.result()
    await lose_seat(bed)
    rows = await bed.store.records("p", "s", None, 1000)
    await bed.store.delete_records([RecordKey(row.project, row.record_id) for row in rows if row.epoch == 1])
    _, agent = await next_turn(bed)
    told = prompt_texts(agent)[0]
    assert LEFT_OUT in told
    assert MISSING not in told
    assert "second question" in told
    assert "the first question" not in told


@pytest.mark.parametrize("gone", ["turn_admitted", "done"])
async def test_records_that_are_gone_from_the_middle_are_told_to_be_missing(bed: Bed, gone: str) -> None:
    await first_turn(bed)
    await lose_seat(bed)
    name = next(name for name, row in bed.store._records.items() if gone in row)
    del bed.store._records[name]
    _, agent = await next_turn(bed)
    told = prompt_texts(agent)[0]
    assert MISSING in told
    assert "the first answer" in told


async def test_what_another_replica_handed_over_is_waited_for(bed: Bed) -> None:
    await first_turn(bed)
    await lose_seat(bed)
    before = bed.store.called["caught_up"]
    _, agent = await next_turn(bed)
    assert bed.store.called["caught_up"] > before
    assert MISSING not in prompt_texts(agent)[0]


async def test_a_record_that_no_store_could_hold_is_told_to_be_missing(bed: Bed) -> None:
    await first_turn(bed)
    await lose_seat(bed)
    row = (await bed.store.records("p", "s", None, 10))[0]
    await bed.store.quarantine([row._replace(record_id="rec_lost", n=5)], REFUSED, 1)
    _, agent = await next_turn(bed)
    assert MISSING in prompt_texts(agent)[0]


async def test_of_more_than_is_ever_told_the_end_is_kept(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.session.transcript.KEPT_BYTES", 300)
    for n in range(1, 4):
        handle = await bed.dispatch(prompt=f"question {n}.", keep_on_disconnect=True)
        await (await bed.agent()).finish(n, f"answer {n}. " + "x" * 100)
        await handle.result()
    await lose_seat(bed)
    _, agent = await next_turn(bed)
    told = prompt_texts(agent)[0]
    assert LEFT_OUT in told
    assert "answer 3." in told
    assert "question 1." not in told


async def test_what_the_store_has_is_told_although_more_is_on_its_way(bed: Bed) -> None:
    await first_turn(bed)
    await lose_seat(bed)
    bed.store.failing["caught_up"] = 1
    _, agent = await next_turn(bed)
    told = prompt_texts(agent)[0]
    assert MISSING in told
    assert "the first answer" in told
