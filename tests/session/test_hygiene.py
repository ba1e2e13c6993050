"""What is shown and what is stored are the same, on every store, whatever an agent says (cases G3, G11, H4)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from runner.rules.bounds import TITLE_CHARS, VALUE_BYTES
from runner.store.port import Store
from runner.store.postgres.store import PostgresStore
from runner.store.sqlite import SqliteStore
from tests.normal_form import normal_form
from tests.postgres_server import PostgresServer
from tests.session.bed import CALLER, Bed, types
from tests.session.fake_agent import FakeAgent, text_frame
from tests.session.gates import Gate, SlowStore
from tests.session.reading import assert_ordered

NUL = "\ufffd"
JSON_COLUMNS = {
    "sessions": ("config", "agent_state", "usage"),
    "turns": ("result",),
    "prompts": ("content", "result", "options"),
    "interactions": ("request", "answer"),
    "records": ("convert_from(data, 'UTF8')",),
}


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def bed(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bed]:
    """A replica over each store."""
    store: Store
    if request.param == "memory":
        store = SlowStore()
    elif request.param == "sqlite":
        store = await SqliteStore.open(tmp_path / "db")
    else:
        store = await PostgresStore.open(request.getfixturevalue("postgres_url"))
    # These stores answer in real time: an answer that is a while on its way must find the question live.
    made = await Bed.make(settings={"turn": {"pause_quiet_ms": 60_000}}, store=store)
    yield made
    await made.close()


async def begun(bed: Bed, prompt: Any = "hello", **fields: Any) -> tuple[Any, FakeAgent, dict[str, Any]]:
    handle = await bed.dispatch(prompt=prompt, keep_on_disconnect=True, **fields)
    agent = await bed.agent()
    return handle, agent, await agent.prompt()


async def rows(bed: Bed) -> list[dict[str, Any]]:
    """The records that are stored, as events."""
    return [
        {
            "cursor": f"{row.epoch}.{row.n}",
            "turn_id": row.turn_id,
            "prompt_id": row.prompt_id,
            "type": row.type,
            "data": json.loads(row.data),
        }
        for row in await bed.store.records("p", "s", None, 1000)
    ]


async def same(bed: Bed, handle: Any) -> list[dict[str, Any]]:
    """What was seen live, what a late reader sees and what is stored are one; the stored events, in order."""
    live, later, stored = await bed.events(handle), await bed.history(), await rows(bed)
    seen = [
        normal_form([event for event in events if event["prompt_id"] == handle.prompt_id])
        for events in (live, later, stored)
    ]
    assert seen[0] == seen[2]
    assert seen[1] == seen[2]
    assert_ordered(stored)
    return stored


def say_raw(agent: FakeAgent, escaped: str) -> None:
    """A chunk whose text is these JSON escapes."""
    line = json.dumps({"jsonrpc": "2.0", **text_frame("@@")}).replace("@@", escaped)
    agent.transport.agent.send_bytes(line.encode() + b"\n")


async def test_what_no_database_can_hold_has_a_marker_live_and_stored(bed: Bed):
    handle, agent, frame = await begun(bed, prompt=[{"type": "text", "text": "a\0b", "_meta": {"k\0": "\0"}}])
    assert frame["params"]["prompt"] == [{"type": "text", "text": f"a{NUL}b", "_meta": {f"k{NUL}": NUL}}]
    for escaped in ("x\\u0000y", "\\ud83d", "\\ude00", "\\ud83d", "z"):
        say_raw(agent, escaped)
    agent.update(
        sessionUpdate="tool_call",
        toolCallId="t\0",
        title="\0title",
        kind="exe\0cute",
        status="completed",
        rawInput={"k\0": ["\0"]},
        rawOutput={"out": "\0"},
    )
    agent.update(sessionUpdate="plan", entries=[{"content": "\0"}])
    agent.update(sessionUpdate="session_info_update", title="\0")
    agent.ask("q", "t1", title="\0", rawInput={"command": "rm \0"})
    [asked] = await _asked(bed)
    await bed.answer(asked["interaction_id"], decision="allow")
    agent.update(sessionUpdate="tool_call_update", toolCallId="t1", status="completed")
    agent.result(frame["id"], {"stopReason": "end\0turn"})
    result = await handle.result()
    assert (result["outcome"], result["stop_reason"]) == ("completed", f"end{NUL}turn")
    assert result["text"] == f"x{NUL}y😀{NUL}z"
    stored = await same(bed, handle)
    assert b"\\u0000" not in json.dumps([event["data"] for event in stored]).encode()
    tools = {event["data"]["tool_call_id"]: event["data"] for event in stored if event["type"] == "tool_call"}
    assert tools[f"t{NUL}"]["raw_input"] == {f"k{NUL}": [NUL]}
    assert asked["tool_call"]["raw_input"] == {"command": f"rm {NUL}"}


async def _asked(bed: Bed) -> list[dict[str, Any]]:
    async with asyncio.timeout(20):
        while not (found := [row for row in await bed.store.interactions("p", "s") if row.status == "pending"]):
            await asyncio.sleep(0.01)
    return [{"interaction_id": row.interaction_id, **row.request} for row in found]


async def test_an_operator_may_cast_whatever_is_stored_to_jsonb(postgres_url: str, postgres_server: PostgresServer):
    """Neither a NUL nor half a surrogate pair is in it."""
    bed = await Bed.make(store=await PostgresStore.open(postgres_url))
    await test_what_no_database_can_hold_has_a_marker_live_and_stored(bed)
    bed.provider.manners = {}
    await bed.close()
    database = postgres_url.rpartition("/")[2]
    for table, columns in JSON_COLUMNS.items():
        for column in columns:
            count = postgres_server.sql(f"SELECT count({column}::jsonb) FROM {table}", database)
            assert int(count) > 0, (table, column)


async def test_a_tool_call_of_many_updates_is_one_record_case_g3(bed: Bed):
    """Its final arguments and result; what came before is frames."""
    handle, agent, frame = await begun(bed)
    agent.update(sessionUpdate="tool_call", toolCallId="t", title="Write", kind="edit", status="pending")
    for n in range(40):
        agent.update(sessionUpdate="tool_call_update", toolCallId="t", rawInput={"text": "x" * n})
    agent.update(sessionUpdate="tool_call_update", toolCallId="t", status="in_progress")
    agent.update(sessionUpdate="tool_call_update", toolCallId="t", status="completed", rawOutput={"ok": True})
    agent.answer(frame)
    await handle.result()
    live = await bed.events(handle)
    assert types(live).count("tool_call") + types(live).count("tool_call_update") == 43
    [row] = [event["data"] for event in await rows(bed) if event["type"].startswith("tool_call")]
    assert row == {
        "tool_call_id": "t",
        "title": "Write",
        "kind": "edit",
        "status": "completed",
        "raw_input": {"text": "x" * 39},
        "raw_output": {"ok": True},
    }
    await same(bed, handle)


async def test_an_ended_tool_call_that_is_told_of_again_is_no_second_record_case_g3(bed: Bed):
    """One that says something new is: nothing that was told is lost."""
    handle, agent, frame = await begun(bed)
    agent.update(sessionUpdate="tool_call", toolCallId="t", title="x", status="completed", rawOutput=[1])
    agent.update(sessionUpdate="tool_call_update", toolCallId="t", _meta={"response": {"of": "the adapter"}})
    agent.update(sessionUpdate="tool_call_update", toolCallId="t", status="completed", rawOutput=[1])
    agent.update(sessionUpdate="tool_call_update", toolCallId="t", rawOutput=[1, 2])
    agent.answer(frame)
    await handle.result()
    told = [event["data"] for event in await same(bed, handle) if event["type"].startswith("tool_call")]
    assert [data["raw_output"] for data in told] == [[1], [1, 2]]


async def test_one_record_for_each_message_and_thought_and_nothing_is_merged_away(bed: Bed):
    """Case G3: chunks that are equal, or begin alike, are all of the text."""
    handle, agent, frame = await begun(bed)
    said = ["a", "a", "ab", "ab", "abc", "", " ", " ", "\n", "a"]
    thought = [text_frame(text) for text in said]
    for each in thought:
        each["params"]["update"]["sessionUpdate"] = "agent_thought_chunk"
    agent.send(*thought, *map(text_frame, said))
    agent.answer(frame)
    result = await handle.result()
    assert result["text"] == "".join(said)
    assert [
        (event["type"], event["data"]["text"]) for event in await rows(bed) if event["type"] in ("message", "thought")
    ] == [
        ("thought", "".join(said)),
        ("message", "".join(said)),
    ]
    await same(bed, handle)


@pytest.mark.parametrize("how", ["error", "exit", "start"])
async def test_a_failed_turn_has_its_error_before_its_ending_case_g3(bed: Bed, how: str):
    if how == "start":
        bed.provider.manners = {"initialize": False}
        handle = await bed.dispatch(keep_on_disconnect=True)
        agent = await bed.agent()
        await agent.heard("initialize")
        agent.exit(3)
    else:
        handle, agent, frame = await begun(bed)
        agent.update(sessionUpdate="tool_call", toolCallId="t", title="x", status="in_progress")
        agent.say("half")
        if how == "error":
            agent.error(frame["id"], -32603, "the provider failed")
        else:
            agent.exit(3)
    assert (await handle.result())["outcome"] == "failed"
    stored = await same(bed, handle)
    kinds = types(stored)
    assert kinds.count("error") == kinds.count("done") == 1
    assert kinds.index("error") < kinds.index("done")
    if how != "start":
        [tool] = [event["data"]["status"] for event in stored if event["type"] == "tool_call"]
        assert tool == "failed"
        assert [event["data"]["text"] for event in stored if event["type"] == "message"] == ["half"]


async def test_what_is_too_large_is_cut_and_says_so(bed: Bed):
    """A title of 1 MB, arguments and results of many; its neighbours are whole."""
    handle, agent, frame = await begun(bed)
    agent.update(
        sessionUpdate="tool_call",
        toolCallId="i" * 100_000,
        title="T" * 1_000_000,
        rawInput={"path": "f", "text": "x" * 3_000_000},
    )
    agent.update(
        sessionUpdate="tool_call_update",
        toolCallId="i" * 100_000,
        status="completed",
        rawOutput="y" * 20_000_000,
        content=[{"type": "content", "content": {"type": "text", "text": "z" * 5_000_000}}],
    )
    agent.say("and a message")
    agent.answer(frame)
    assert (await handle.result())["text"] == "and a message"
    stored = await same(bed, handle)
    [tool] = [event["data"] for event in stored if event["type"] == "tool_call"]
    assert len(tool["tool_call_id"]) == 200
    assert tool["title"] == "T" * TITLE_CHARS + "…[truncated: 1000000 characters]"
    assert (tool["raw_input"]["path"], tool["raw_input"]["truncated"]) == ("f", True)
    assert "…[truncated: 20000002 bytes, sha256 " in tool["raw_output"]
    assert tool["content"][0]["content"]["text"].endswith("…[truncated: 5000000 characters]")
    assert tool["content"][-1]["truncated"] is True
    for part in ("raw_input", "raw_output", "content"):
        assert len(json.dumps(tool[part])) < VALUE_BYTES * 5 // 4


async def test_a_text_of_a_hundred_megabytes_is_cut_nowhere(bed: Bed):
    """Frames and blocks are bounded, the text is not; the result's own is, and the turn says so."""
    handle, agent, frame = await begun(bed)
    pieces = [str(n % 10) * 20_000_000 for n in range(2)]
    for piece in pieces:
        agent.say(piece)
    agent.answer(frame)
    result = await handle.result()
    stored = await rows(bed)
    blocks = [event["data"]["text"] for event in stored if event["type"] == "message"]
    assert "".join(blocks) == "".join(pieces)
    assert max(map(len, blocks)) < 5_000_000
    assert len(result["text"]) == 16 * 1024 * 1024
    assert [event["data"]["kind"] for event in stored if event["type"] == "notice"] == ["result_text_cut"]


@pytest.mark.parametrize("secrets", [{}, {"KEY": "sk-live-12345"}])
async def test_what_is_nested_too_deep_fails_no_turn(secrets: dict[str, str]):
    bed = await Bed.make()
    handle, agent, frame = await begun(bed, secrets=secrets)
    call = {"sessionUpdate": "tool_call", "toolCallId": "t", "title": "x", "status": "completed", "rawInput": "@@"}
    params = {"sessionId": "agent-session", "update": call}
    line = json.dumps({"jsonrpc": "2.0", "method": "session/update", "params": params})
    agent.transport.agent.send_bytes(line.replace('"@@"', "[" * 1000 + "1" + "]" * 1000).encode() + b"\n")
    agent.answer(frame)
    assert (await handle.result())["outcome"] == "completed"
    [tool] = [event["data"] for event in await same(bed, handle) if event["type"] == "tool_call"]
    assert "…" in json.dumps(tool, ensure_ascii=False)
    await bed.close()


async def test_an_approval_covers_arguments_that_are_not_shown():
    """Two commands that begin alike are two questions, however long they are."""
    bindings = []
    for end in "ab":
        bed = await Bed.make()
        handle, agent, _ = await begun(bed)
        agent.ask("q", "t1", rawInput={"command": "x" * 3_000_000 + end})
        bindings.append((await _asked(bed))[0]["binding"])
        await bed.cancel()
        agent.answer(await agent.prompt(), "cancelled")
        await handle.result()
        await bed.close()
    assert bindings[0] != bindings[1]


async def test_a_client_that_leaves_at_the_finish_frame_takes_nothing_with_it_case_g11():
    """The store is slow, the client closes right behind the ending's frame: the last items are durable all the same."""
    store = SlowStore()
    bed = await Bed.make(store=store)
    handle, agent, frame = await begun(bed)
    reader = handle.reader()
    store.gates["end"] = gate = Gate()
    agent.say("the last words")
    agent.answer(frame)
    await gate.reached.wait()
    reader.close()
    gate.open()
    assert (await handle.result())["text"] == "the last words"
    stored = await same(bed, handle)
    assert {"prompt_ended", "done"} <= set(types(stored))
    assert [event["data"]["text"] for event in stored if event["type"] == "message"] == ["the last words"]
    assert (await bed.sessions.view(CALLER, "s"))["last_turn"]["outcome"] == "completed"
    await bed.close()


async def test_a_write_that_fails_in_the_middle_changes_no_history_case_h4():
    """What was shown stays provisional until it is durable, and becomes so: a reader from the start sees the same."""
    store = SlowStore()
    bed = await Bed.make(store=store)
    handle, agent, frame = await begun(bed)
    agent.say("one")
    store.failing["append"] = 3
    agent.update(sessionUpdate="tool_call", toolCallId="t", title="x", status="completed")
    async with asyncio.timeout(20):
        while store.failing["append"]:
            await asyncio.sleep(0.05)
    agent.say("two")
    agent.answer(frame)
    assert (await handle.result())["text"] == "onetwo"
    await same(bed, handle)
    kinds = [event["type"] for event in await rows(bed)]
    assert [kind for kind in kinds if kind in ("message", "tool_call")] == ["message", "tool_call", "message"]
    await bed.close()
