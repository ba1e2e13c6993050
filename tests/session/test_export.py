"""Export: everything that was shown, page by page, with an end that says whether it is all."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.session import export as module
from runner.session.port import ReaderEnded
from tests.session.bed import CALLER, Bed
from tests.session.gates import Gate

pytestmark = pytest.mark.virtual_time
Line = dict[str, Any]


async def exported(bed: Bed, session_id: str = "s") -> list[Line]:
    reader = await bed.sessions.export(CALLER, session_id)
    lines: list[Line] = []
    try:
        while True:
            chunk = await reader.next(3600)
            assert chunk is not None
            lines += [json.loads(line) for line in chunk.splitlines()]
    except ReaderEnded:
        return lines
    finally:
        reader.close()


async def test_an_export_is_the_session_its_records_and_an_end(bed: Bed) -> None:
    await bed.turn()
    await bed.turn(prompt="again", nth=2)
    first, *records, end = await exported(bed)
    assert (first["kind"], first["session"]["session_id"], first["session"]["state"]) == ("session", "s", "idle")
    page = await bed.sessions.records(CALLER, "s", None, 1000)
    assert [{**item, "kind": "record"} for item in page["items"]] == records
    head = records[-1]["cursor"]
    assert end == {"kind": "end", "records": len(records), "head": head, "running_turn": None, "complete": True}


async def test_an_export_of_many_pages_holds_no_more_than_one(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE", 3)
    await bed.turn()
    await bed.turn(prompt="again", nth=2)
    reader = await bed.sessions.export(CALLER, "s")
    sizes = []
    while not reader.ended:
        sizes.append(len((await reader.next(1) or b"").splitlines()))
    reader.close()
    assert max(sizes) <= 4
    assert len(sizes) > 4
    page = await bed.sessions.records(CALLER, "s", None, 1000)
    assert sum(sizes) == len(page["items"]) + 2


async def test_what_was_shown_of_a_running_turn_is_in_it(bed: Bed) -> None:
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    agent.update(sessionUpdate="tool_call", toolCallId="t", title="ls", status="completed")
    agent.say("half")
    await asyncio.sleep(0.01)
    *_, last, end = await exported(bed)
    assert (last["type"], end["complete"], end["running_turn"]) == ("tool_call", True, handle.turn_id)
    agent.answer(frame)
    await handle.result()


async def test_a_slow_store_is_silence_and_a_failing_one_breaks_it(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE", 2)
    await bed.turn()
    reader = await bed.sessions.export(CALLER, "s")
    assert await reader.next(1)
    gate = bed.store.gates["records"] = Gate()
    assert await reader.next(1) is None
    assert await reader.next(1) is None
    gate.open()
    assert await reader.next(1)
    bed.store.unavailable = True
    with pytest.raises(RunnerError, match="cannot be used"):
        await reader.next(1)
    assert not reader.ended
    reader.close()
    with pytest.raises(RunnerError, match="cannot be used"):
        await bed.sessions.export(CALLER, "s")
    bed.store.unavailable = False


async def test_a_session_that_is_deleted_meanwhile_has_no_end(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE", 2)
    await bed.turn()
    reader = await bed.sessions.export(CALLER, "s")
    assert await reader.next(1)
    await bed.sessions.delete(CALLER, "s")
    with pytest.raises(RunnerError, match="has ended"):
        await reader.next(1)
    reader.close()
    with pytest.raises(RunnerError, match="has ended"):
        await bed.sessions.export(CALLER, "s")


async def test_an_incomplete_history_says_so(bed: Bed) -> None:
    await bed.turn()
    await bed.turn(prompt="again", nth=2)
    gone = [row for row in await bed.store.records("p", "s", None, 1000) if row.epoch == 1]
    await bed.store.delete_records([(row.project, row.record_id) for row in gone[:4]])
    *_, end = await exported(bed)
    assert (end["complete"], end["missing"]) == (False, ["begin"])
