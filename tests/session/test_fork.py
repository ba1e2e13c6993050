"""Fork: a new session that knows what was said up to a cursor, can be used at once, and leaves its source alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.ids import Key
from runner.rules.fork import INTERRUPTED
from runner.rules.transcript import LEFT_OUT
from runner.rules.unfinished import unfinished
from runner.session.port import Reply
from runner.store.port import RecordKey
from runner.store.rows import REFUSED
from runner.wire.models import ForkRequest
from tests.session.bed import CALLER, Bed, types
from tests.session.gates import Gate
from tests.session.reading import assert_ordered
from tests.session.resuming import prompt_texts
from tests.session.test_export import exported

pytestmark = pytest.mark.virtual_time
Record = dict[str, Any]


async def fork(bed: Bed, after: str, source: str = "s", **fields: Any) -> Reply:
    return await bed.sessions.fork(CALLER, source, ForkRequest(after=after, **fields))


async def records(bed: Bed, session_id: str = "s") -> list[Record]:
    found: list[Record] = (await bed.sessions.records(CALLER, session_id, None, 1000))["items"]
    return found


async def said(bed: Bed, session_id: str, agents: int) -> str:
    """A turn of the fork: what its agent was told of the past."""
    handle = await bed.dispatch(session_id, "and now?", keep_on_disconnect=True)
    agent = await bed.agent(agents)
    await agent.finish()
    result = await handle.result()
    assert (result["ok"], result["start"], result["context_lost"]) == (True, "cold", True)
    told, prompt = prompt_texts(agent)
    assert prompt == "and now?"
    return told


async def test_a_fork_has_the_history_up_to_a_cursor_and_goes_on_from_there(bed: Bed) -> None:
    handle = await bed.dispatch(prompt="first question", keep_on_disconnect=True, env={"A": "1"})
    await (await bed.agent()).finish(text="first answer")
    await handle.result()
    head = (await records(bed))[-1]["cursor"]
    await bed.turn(prompt="second question", nth=2)
    source = await exported(bed)
    reply = await fork(bed, head)
    assert reply.status == 201
    made = reply.body
    assert (made["forked_from"], made["after"], made["complete"], made["workspace"]) == ("s", head, True, "copied")
    name = made["session_id"]
    assert bed.provider.copied == [("s", name)]
    view = await bed.sessions.view(CALLER, name)
    assert (view["state"], view["last_turn"], view["open_interactions"], view["usage"]) == ("idle", None, [], {})
    assert view["forked_from"] == {"session_id": "s", "after": head}
    assert name in [item["session_id"] for item in (await bed.sessions.sessions(CALLER, 10, None))["items"]]
    *copied, notice = await records(bed, name)
    unlike = ("record_id", "session_id")
    for mine, theirs in zip(copied, await records(bed), strict=False):
        assert {k: v for k, v in mine.items() if k not in unlike} == {
            k: v for k, v in theirs.items() if k not in unlike
        }
        assert mine["record_id"] != theirs["record_id"]
    assert copied[-1]["cursor"] == head
    assert (notice["type"], notice["data"]["kind"], notice["data"]["session_id"]) == ("notice", "forked", "s")
    told = await said(bed, name, 2)
    assert "first answer" in told
    assert "second question" not in told
    assert LEFT_OUT not in told
    assert bed.sandbox(2).spec.env["A"] == "1"
    assert_ordered(await bed.history(name))
    lines = await exported(bed)
    assert lines[1:-1] == source[1:-1], "the source is as it was"
    assert (await exported(bed, name))[-1]["complete"]


async def test_a_fork_inside_a_running_turn_is_closed_there(bed: Bed) -> None:
    handle = await bed.dispatch(prompt="long work", keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    agent.update(sessionUpdate="tool_call", toolCallId="t", title="ls", status="completed")
    agent.say("half an answer")
    await asyncio.sleep(0.01)
    cursor = (await bed.history())[-1]["cursor"]
    name = (await fork(bed, cursor)).body["session_id"]
    found = await records(bed, name)
    assert [item["type"] for item in found][-5:] == ["tool_call", "prompt_ended", "done", "session_idle", "notice"]
    assert found[-3]["data"]["outcome"] == "cancelled"
    assert (await bed.sessions.view(CALLER, name))["state"] == "idle"
    told = await said(bed, name, 2)
    assert "long work" in told
    assert "cut off" in told
    assert "half an answer" not in told
    agent.say(", whole")
    agent.answer(frame)
    assert (await handle.result())["text"] == "half an answer, whole"


async def test_a_fork_of_a_paused_session_waits_for_nobody(bed: Bed) -> None:
    await bed.dispatch(prompt="may I?", keep_on_disconnect=True, prompt_id="p1")
    agent = await bed.agent()
    await agent.prompt()
    agent.ask(1)
    while await bed.state() != "awaiting_approval":
        await asyncio.sleep(0.01)
    head = (await records(bed))[-1]["cursor"]
    name = (await fork(bed, head)).body["session_id"]
    found = await records(bed, name)
    left = unfinished((item["type"], item["data"]) for item in found)
    assert (left.prompts, left.tools, left.busy) == ({}, {}, False)
    asked = [item["data"] for item in found if item["type"] == "interaction_requested"]
    assert [item["session_id"] for item in asked] == [name]
    assert (await bed.sessions.interactions(CALLER, name, None))["items"] == []
    assert INTERRUPTED in [
        part["content"]["text"]
        for item in found
        if item["type"] == "tool_call"
        for part in item["data"].get("content", [])
    ]
    assert await bed.state(name) == "idle"
    assert await bed.state() == "awaiting_approval", "the source waits on"
    turn = await bed.sessions.resume(CALLER, name)
    assert turn is not None, "its last prompt has no completed answer"
    await (await bed.agent(2)).finish()


async def test_a_prompt_id_of_the_source_is_a_new_prompt_in_the_fork(bed: Bed) -> None:
    handle = await bed.dispatch(prompt="one", prompt_id="p1", keep_on_disconnect=True)
    await (await bed.agent()).finish()
    await handle.result()
    name = (await fork(bed, (await records(bed))[-1]["cursor"])).body["session_id"]
    handle = await bed.dispatch(name, "another", prompt_id="p1", keep_on_disconnect=True)
    await (await bed.agent(2)).finish()
    assert (await handle.result())["ok"]
    again = await bed.dispatch(name, "another", prompt_id="p1", keep_on_disconnect=True)
    events = await bed.events(again)
    assert [item["data"]["content"][0]["text"] for item in events if item["type"] == "user_message"] == ["another"]
    assert types(events).count("done") == 1


async def test_a_fork_of_a_fork(bed: Bed) -> None:
    await bed.turn(prompt="root")
    first = (await fork(bed, (await records(bed))[-1]["cursor"], session_id="one")).body
    await bed.turn("one", "branch", agents=2)
    second = (await fork(bed, (await records(bed, "one"))[-1]["cursor"], "one", session_id="two")).body
    assert (first["session_id"], second["forked_from"], second["complete"]) == ("one", "one", True)
    told = await said(bed, "two", 3)
    assert "root" in told
    assert "branch" in told


async def test_the_same_fork_again_is_the_same_session(bed: Bed) -> None:
    await bed.turn()
    head = (await records(bed))[-1]["cursor"]
    first = await fork(bed, head, session_id="copy")
    again = await fork(bed, head, session_id="copy")
    assert (first.status, again.status, again.body) == (201, 200, first.body)
    both = await asyncio.gather(*(fork(bed, head, session_id="twice") for _ in range(2)))
    assert sorted(reply.status for reply in both) == [200, 201]
    for source, name, after in (("s", "copy", "1.1"), ("s", "s", head), ("copy", "twice", head)):
        with pytest.raises(RunnerError, match="there is another session") as refused:
            await fork(bed, after, source, session_id=name)
        assert refused.value.code == "invalid_request"


@pytest.mark.parametrize("after", ["1.99", "2.0", "9.1"])
async def test_a_cursor_above_the_head_is_refused(bed: Bed, after: str) -> None:
    await bed.turn()
    with pytest.raises(RunnerError, match="newest cursor") as refused:
        await fork(bed, after)
    assert refused.value.code == "invalid_request"


async def test_what_cannot_be_forked(bed: Bed) -> None:
    with pytest.raises(RunnerError, match="no session"):
        await fork(bed, "1.1", "unknown")
    await bed.turn()
    with pytest.raises(RunnerError, match="nothing up to"):
        await fork(bed, "0.0")
    bed.store.unavailable = True
    with pytest.raises(RunnerError, match="cannot be used"):
        await fork(bed, "1.1")
    bed.store.unavailable = False
    await bed.sessions.delete(CALLER, "s")
    with pytest.raises(RunnerError, match="has ended"):
        await fork(bed, "1.1")


async def test_an_incomplete_history_is_forked_only_when_that_is_asked_for(bed: Bed) -> None:
    await bed.turn(prompt="old words")
    await bed.turn(prompt="new words", nth=2)
    gone = [row for row in await bed.store.records("p", "s", None, 1000) if row.epoch == 1]
    await bed.store.delete_records([RecordKey(row.project, row.record_id) for row in gone])
    head = (await records(bed))[-1]["cursor"]
    with pytest.raises(RunnerError, match="is not whole: its begin was deleted") as refused:
        await fork(bed, head)
    assert refused.value.code == "invalid_request"
    made = (await fork(bed, head, allow_incomplete=True)).body
    assert made["complete"] is False
    told = await said(bed, made["session_id"], 2)
    assert LEFT_OUT in told
    assert "new words" in told
    with pytest.raises(RunnerError, match="is not whole"):
        await fork(bed, head, made["session_id"])


async def test_secrets_do_not_go_over(bed: Bed) -> None:
    handle = await bed.dispatch(secrets={"KEY": "hunter2-secret"}, keep_on_disconnect=True)
    await (await bed.agent()).finish()
    await handle.result()
    name = (await fork(bed, (await records(bed))[-1]["cursor"])).body["session_id"]
    handle = await bed.dispatch(name, "go on", keep_on_disconnect=True)
    assert (await handle.result())["error"]["code"] == "credentials_missing"
    handle = await bed.dispatch(name, "go on", secrets={"KEY": "hunter2-secret"}, keep_on_disconnect=True)
    await (await bed.agent(2)).finish()
    assert (await handle.result())["ok"]


async def test_a_source_that_is_deleted_meanwhile_is_not_forked(bed: Bed) -> None:
    await bed.turn()
    head = (await records(bed))[-1]["cursor"]
    gate = bed.store.gates["pruned_to"] = Gate()
    forking = asyncio.create_task(fork(bed, head))
    await gate.reached.wait()
    await bed.sessions.delete(CALLER, "s")
    gate.open()
    with pytest.raises(RunnerError, match="has ended") as refused:
        await forking
    assert refused.value.code == "session_ended"


async def test_a_record_that_no_store_could_hold_is_missing_in_a_fork_behind_it(bed: Bed) -> None:
    await bed.turn()
    rows = await bed.store.records("p", "s", None, 10)
    await bed.store.quarantine([rows[-1]._replace(record_id="rec_lost")], REFUSED, 1)
    with pytest.raises(RunnerError, match="records in between are missing"):
        await fork(bed, f"{rows[-1].epoch}.{rows[-1].n}")
    assert (await fork(bed, f"{rows[-2].epoch}.{rows[-2].n}")).body["complete"]
    assert (await exported(bed))[-1]["missing"] == ["records"]


@pytest.mark.parametrize("found", ["none", "too_large"])
async def test_a_workspace_that_is_not_copied_is_told(bed: Bed, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def copy_workspace(source: Key, to: Key) -> str:
        return found

    monkeypatch.setattr(bed.provider, "copy_workspace", copy_workspace)
    await bed.turn()
    made = (await fork(bed, (await records(bed))[-1]["cursor"])).body
    assert (made["workspace"], made["reason"]) == ("empty", found)
    notice = (await records(bed, made["session_id"]))[-1]["data"]
    assert (notice["workspace"], notice["reason"]) == ("empty", found)


async def test_a_fork_that_was_deleted_is_not_made_again(bed: Bed) -> None:
    await bed.turn()
    head = (await records(bed))[-1]["cursor"]
    await fork(bed, head, session_id="copy")
    assert (await bed.sessions.delete(CALLER, "copy")).body["state"] == "ended"
    with pytest.raises(RunnerError, match="has ended") as refused:
        await fork(bed, head, session_id="copy")
    assert refused.value.code == "session_ended"
    assert (await exported(bed))[-1]["complete"]
