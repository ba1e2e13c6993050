"""Streams: whoever reads, early, late, slowly or again, sees the same conversation (DESIGN 3.9)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from runner.errors import RunnerError
from runner.session.port import Reader, ReaderCut
from tests.session.bed import CALLER, Bed, types
from tests.session.fake_agent import text_frame, update_frame
from tests.session.gates import Gate
from tests.session.reading import (
    Event,
    assert_contiguous,
    conversation,
    cursor,
    ended,
    presence,
    rest_of,
    take,
)

pytestmark = pytest.mark.virtual_time


SMALL = {"server": {"ring_bytes": 2048, "reader_buffer_bytes": 4096}}


@pytest.fixture
async def small() -> AsyncIterator[Bed]:
    """A bed that keeps next to nothing in memory."""
    made = await Bed.make(settings=SMALL)
    yield made
    await made.close()


async def rich_turn(bed: Bed, nth: int = 1) -> None:
    """A turn with every kind of item, in bursts and one by one."""
    await bed.dispatch(prompt=f"prompt {nth}", prompt_id=f"p{nth}", keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt(nth)
    agent.send(*(text_frame(f"word{n} ") for n in range(12)))
    await asyncio.sleep(0.1)
    agent.update(sessionUpdate="agent_thought_chunk", content={"type": "text", "text": "hm "})
    agent.update(sessionUpdate="agent_thought_chunk", content={"type": "text", "text": "hm"})
    agent.update(sessionUpdate="tool_call", toolCallId=f"t{nth}", title="ls", kind="execute", status="pending")
    await asyncio.sleep(1)
    agent.update(sessionUpdate="tool_call_update", toolCallId=f"t{nth}", status="in_progress", rawInput={"a": 1})
    agent.update(sessionUpdate="plan", entries=[{"content": "do", "status": "pending", "priority": "low"}])
    agent.say("in between ")
    agent.update(sessionUpdate="tool_call_update", toolCallId=f"t{nth}", status="completed")
    agent.send(*(text_frame(f"end{n} ") for n in range(5)))
    agent.answer(frame)
    async for _ in ended(bed, f"p{nth}"):
        pass


# Cases H6, H9: who comes late.


async def test_the_view_of_a_running_turn_case_h9(bed: Bed) -> None:
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    agent.say("so far")
    agent.update(sessionUpdate="tool_call", toolCallId="other", title="build", status="in_progress")
    agent.ask(1, "t1")
    await asyncio.sleep(1)
    view = await bed.sessions.view(CALLER, "s")
    assert (view["state"], view["running_turn"], view["stopping"]) == ("running", handle.turn_id, False)
    listed = (await bed.sessions.interactions(CALLER, "s", "pending"))["items"]
    assert view["open_interactions"] == [listed[0]["interaction_id"]]
    assert (listed[0]["turn_id"], listed[0]["tool_call"]["title"]) == (handle.turn_id, "run it")
    records = (await bed.sessions.records(CALLER, "s", None, 100))["items"]
    assert [r["type"] for r in records][-2:] == ["message", "interaction_requested"]
    assert [r["data"]["text"] for r in records if r["type"] == "message"] == ["so far"]
    assert (await bed.sessions.sessions(CALLER, 10, None))["items"] == [view]
    await bed.answer(view["open_interactions"][0], decision="allow")
    agent.answer(frame)
    await handle.result()
    view = await bed.sessions.view(CALLER, "s")
    assert (view["state"], view["running_turn"], view["open_interactions"]) == ("idle", None, [])


async def test_a_reader_that_attaches_late_sees_the_turn_from_its_beginning_case_h6(bed: Bed) -> None:
    first = await bed.dispatch(prompt_id="x", keep_on_disconnect=True)
    early = first.reader()
    agent = await bed.agent()
    frame = await agent.prompt()
    agent.say("one ")
    await asyncio.sleep(2)
    late = (await bed.dispatch(prompt_id="x")).reader()
    follower = await bed.sessions.follow(CALLER, "s", None, True)
    agent.say("two")
    agent.answer(frame)
    await first.result()
    events = await rest_of(early)
    assert events[0]["type"] == "turn_admitted"
    assert await rest_of(late) == events
    seen = await take(follower, len(events) + 2)
    assert [event for event in seen if event["prompt_id"] == "x"] == events
    assert types(seen)[0] == "session_busy"
    for reader in (early, late, follower):
        reader.close()


async def test_following_on_from_any_cursor_is_the_same_conversation(bed: Bed) -> None:
    """In the middle of frames, of a burst, between turns: what was seen and what follows is the whole."""
    for nth in (1, 2):
        await rich_turn(bed, nth)
    everything = await bed.history()
    assert_contiguous(everything)
    for index, event in enumerate(everything):
        seen = everything[: index + 1] + await bed.history(after=event["cursor"])
        assert list(map(cursor, seen)) == list(map(cursor, everything))
        assert conversation(seen) == conversation(everything)


async def test_following_on_when_memory_kept_nothing_is_the_same_conversation(small: Bed) -> None:
    await check_after_loss(small, small)


async def test_following_on_behind_a_restart_is_the_same_conversation(bed: Bed) -> None:
    await check_after_loss(bed, None)


async def check_after_loss(bed: Bed, again: Bed | None) -> None:
    """A reader that saw everything up to any cursor, and reads on where only records are left."""
    live: list[Event] = []

    async def watch() -> None:
        reader = await bed.sessions.follow(CALLER, "s", None, True)
        while True:
            live.extend(await take(reader, 1))

    handle = await bed.dispatch(prompt_id="p0", keep_on_disconnect=True)
    watcher = asyncio.create_task(watch())
    await (await bed.agent()).finish()
    await handle.result()
    for nth in (2, 3):
        await rich_turn(bed, nth)
    await asyncio.sleep(0.1)
    watcher.cancel()
    assert_contiguous(live)
    whole = conversation(live)
    if again is None:
        await bed.replica.coordinator.drain(0)
        again = await Bed.make(store=bed.store, replica_id="rep_2")
    for index, event in enumerate(live):
        behind = await again.history(after=event["cursor"])
        assert all(cursor(later) > cursor(event) for later in behind)
        assert conversation(live[: index + 1] + behind) == whole, event
    from_start = await again.history()
    assert conversation(from_start) == whole
    if again is not bed:
        await again.close()


async def test_a_cursor_above_the_head_is_a_resync(bed: Bed) -> None:
    await bed.turn()
    everything = await bed.history()
    head = everything[-1]["cursor"]
    assert await bed.history(after=head) == []
    for above in (f"1.{cursor(everything[-1])[1] + 1}", "2.1", "99.1"):
        first, *events = await bed.history(after=above)
        assert (first["type"], first["data"], "cursor" in first) == ("resync", {"from": "0.0"}, False)
        assert events == everything
    follower = await bed.sessions.follow(CALLER, "s", "7.7", True)
    assert types(await take(follower, 1 + len(everything)))[0] == "resync"
    handle = await bed.dispatch(keep_on_disconnect=True)
    assert types(await take(follower, 2))[:2] == ["session_busy", "turn_admitted"]
    await (await bed.agent()).finish(2)
    await handle.result()
    follower.close()


@pytest.mark.parametrize("wrong", ["", "1", "1.", ".1", "1.x", "-1.0", "01.1", "1.1.1", "١.١", "9" * 17 + ".1"])
async def test_what_is_no_cursor_is_refused(bed: Bed, wrong: str) -> None:
    await bed.turn()
    for call in (bed.sessions.follow(CALLER, "s", wrong, True), bed.sessions.records(CALLER, "s", wrong, 10)):
        with pytest.raises(RunnerError) as caught:
            await call
        assert (caught.value.code, caught.value.extra["field"]) == ("invalid_request", "after")
    assert presence(bed) == 0


async def test_a_retry_behind_a_long_answer_gets_all_of_it(small: Bed) -> None:
    """What memory no longer holds of a running prompt comes from its records."""
    handle = await small.dispatch(prompt_id="x", keep_on_disconnect=True)
    early: list[Event] = []

    async def read() -> None:
        early.extend(await rest_of(handle.reader()))

    reading = asyncio.create_task(read())
    agent = await small.agent()
    frame = await agent.prompt()
    for n in range(20):
        agent.say(f"part {n} " + "x" * 200)
        agent.update(sessionUpdate="tool_call", toolCallId=f"t{n}", title="ls", status="completed")
        await asyncio.sleep(1)
    late = (await small.dispatch(prompt_id="x")).reader()
    agent.say("the end")
    agent.answer(frame)
    result = await handle.result()
    await reading
    events = await rest_of(late)
    assert events[0]["type"] == "turn_admitted"
    assert conversation(events) == conversation(early)
    assert result["text"] == "".join(text for kind, text in conversation(events)["blocks"])


async def test_a_past_that_is_being_written_is_not_missing(small: Bed) -> None:
    """While an ending is on its way to the store, a late reader waits for the records that go with it."""
    handle = await small.dispatch(prompt_id="x", keep_on_disconnect=True)
    agent = await small.agent()
    frame = await agent.prompt()
    await asyncio.sleep(1)
    gate = small.store.gates["end"] = Gate()
    texts = [f"m{n} " + "x" * 500 for n in range(10)]
    for text in texts:
        agent.say(text)
        agent.update(sessionUpdate="plan", entries=[])
    agent.answer(frame)
    await gate.reached.wait()
    reading = asyncio.create_task(rest_of(await small.sessions.follow(CALLER, "s", None, False)))
    await asyncio.sleep(1)
    gate.open()
    await handle.result()
    events = await reading + await small.history(after=(await reading)[-1]["cursor"])
    assert [text for _, text in conversation(events)["blocks"]] == texts


# Readers of every pace.


async def cut(reader: Reader) -> None:
    """Read until the server gives the reader up."""
    try:
        while True:
            await reader.next(1)
    except ReaderCut:
        reader.close()


async def test_a_slow_reader_is_cut_and_nobody_else_notices(small: Bed) -> None:
    handle = await small.dispatch(prompt_id="x", keep_on_disconnect=True)
    slow = await small.sessions.follow(CALLER, "s", None, True)
    slow_prompt = handle.reader()
    await slow.next(1)
    live: list[Event] = []

    async def watch() -> None:
        live.extend(await rest_of(handle.reader()))

    watcher = asyncio.create_task(watch())
    agent = await small.agent()
    frame = await agent.prompt()
    for n in range(100):
        agent.say(f"{n} " + "x" * 100)
        await asyncio.sleep(0.01)
    agent.answer(frame)
    result = await handle.result()
    await watcher
    text = "".join(f"{n} " + "x" * 100 for n in range(100))
    assert result["text"] == text
    assert conversation(live)["blocks"] == [("message", text)]
    records = (await small.sessions.records(CALLER, "s", None, 100))["items"]
    assert [r["data"]["text"] for r in records if r["type"] == "message"] == [text]
    for reader in (slow, slow_prompt):
        await cut(reader)
    assert presence(small) == 0
    assert conversation(await small.history())["blocks"] == [("message", text)]


async def test_a_reader_that_was_cut_counts_as_one(small: Bed) -> None:
    """The server cut it, it did not leave: the seat is kept (DESIGN 3.4)."""
    handle = await small.dispatch(prompt_id="x")
    reader = handle.reader()
    agent = await small.agent()
    frame = await agent.prompt()
    for _ in range(200):
        agent.say("x" * 100)
        await asyncio.sleep(0.01)
    await cut(reader)
    await asyncio.sleep(60)
    agent.answer(frame)
    async for _ in ended(small, "x"):
        pass
    assert small.provider.alive
    assert (await small.turn(nth=2))["start"] == "hit"
    await asyncio.sleep(15)
    await small.dispatch(prompt_id="y")
    frame = await agent.prompt(3)
    await asyncio.sleep(15)
    agent.say("ok")
    agent.answer(frame)
    async for _ in ended(small, "y"):
        pass
    await asyncio.sleep(1)
    assert small.provider.alive == set(), "it counted for its own turn only"


async def test_a_reader_that_the_server_gave_up_counts_as_one(bed: Bed) -> None:
    await bed.dispatch(prompt_id="x")
    for how in ({"cut": True}, {}):
        (await bed.sessions.follow(CALLER, "s", None, True)).close(**how)
    frame = await (await bed.agent()).prompt()
    await asyncio.sleep(60)
    (await bed.agent()).say("ok")
    (await bed.agent()).answer(frame)
    async for _ in ended(bed, "x"):
        pass
    await asyncio.sleep(1)
    assert bed.provider.alive


async def test_a_follower_sees_turn_after_turn_without_a_gap(bed: Bed) -> None:
    await bed.turn()
    follower = await bed.sessions.follow(CALLER, "s", None, True)
    seen: list[Event] = []
    for nth in (2, 3, 4):
        await bed.turn(nth=nth)
        seen += await take(follower, 1)
    while types(seen).count("session_idle") < 4:
        seen += await take(follower, 1)
    assert_contiguous(seen)
    assert types(seen).count("turn_admitted") == types(seen).count("done") == 4
    assert [event["type"] for event in seen if event["turn_id"] is None] == ["session_busy", "session_idle"] * 4
    assert seen == await bed.history()
    follower.close()


@pytest.mark.parametrize("running", [True, False])
async def test_a_follower_ends_when_the_session_is_deleted(bed: Bed, running: bool) -> None:
    await bed.turn()
    if running:
        await bed.dispatch(prompt="two", keep_on_disconnect=True)
        await (await bed.agent()).prompt(2)
    follower = await bed.sessions.follow(CALLER, "s", None, True)
    reading = asyncio.create_task(rest_of(follower))
    await asyncio.sleep(1)
    assert not reading.done()
    began = asyncio.get_running_loop().time()
    await bed.sessions.delete(CALLER, "s")
    events = await reading
    assert asyncio.get_running_loop().time() == began
    assert types(events).count("done") == 1 + running
    follower.close()


async def test_a_dispatch_stream_has_only_its_own_prompt(bed: Bed) -> None:
    one = await bed.dispatch(prompt="one", prompt_id="one", keep_on_disconnect=True)
    agent = await bed.agent()
    await agent.prompt()
    agent.ask(1)
    await one.result()
    two = await bed.dispatch(prompt="two", prompt_id="two", keep_on_disconnect=True)
    await agent.heard("session/cancel")
    agent.say("words of the first prompt")
    agent.answer(agent.all("session/prompt")[0], "cancelled")
    frame = await agent.prompt(2)
    agent.say("words of the second")
    agent.answer(frame)
    assert (await two.result())["text"] == "words of the second"
    first, second = await bed.events(one), await bed.events(two)
    assert {event["prompt_id"] for event in first} == {"one"}
    assert {event["prompt_id"] for event in second} == {"two"}
    assert conversation(second)["blocks"] == [("message", "words of the second")]
    assert types(second)[0] == "turn_admitted"
    everything = await bed.history()
    assert_contiguous(everything)
    assert conversation([e for e in everything if e["prompt_id"] == "one"])["blocks"] == [
        ("message", "words of the first prompt")
    ]


# What is said comes through exactly.


async def test_twenty_thousand_updates_none_lost(bed: Bed) -> None:
    handle = await bed.dispatch(prompt_id="x", keep_on_disconnect=True)
    reading = asyncio.create_task(rest_of(handle.reader()))
    agent = await bed.agent()
    frame = await agent.prompt()
    texts = [f"{n} " for n in range(20_000)]
    for start in range(0, len(texts), 500):
        agent.send(*map(text_frame, texts[start : start + 500]))
        await asyncio.sleep(0)
    agent.answer(frame)
    result = await handle.result()
    assert result["text"] == "".join(texts)
    events = await reading
    assert_contiguous(events[1:])
    assert [event["data"]["text"] for event in events if event["type"] == "message_delta"] == texts
    assert conversation(events)["blocks"] == [("message", "".join(texts))]
    stored = await bed.dispatch(prompt_id="x")
    assert conversation(await rest_of(stored.reader()))["blocks"] == [("message", "".join(texts))]


ODD = [
    "plain",
    'quotes " and \\" and \\\\ and \',\'","',
    "line\nbreak\r\nand\ttab",
    "\u2028\u2029\u0085 separators",
    "emoji 👩‍👩‍👧 and 𝔘𝔫𝔦",
    "controls \x01\x1f\x7f",
    "</script><!--",
    "",
    " ",
]


async def test_odd_text_comes_through_exactly(bed: Bed) -> None:
    handle = await bed.dispatch(prompt="".join(ODD), prompt_id="x", keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    assert frame["params"]["prompt"] == [{"type": "text", "text": "".join(ODD)}]
    agent.send(*map(text_frame, ODD))
    agent.update(sessionUpdate="tool_call", toolCallId='t"\\', title="".join(ODD), status="completed")
    agent.answer(frame)
    assert (await handle.result())["text"] == "".join(ODD)
    for events in (
        await bed.events(handle),
        await bed.history(),
        await bed.events(await bed.dispatch(prompt="".join(ODD), prompt_id="x")),
    ):
        shown = conversation(events)
        assert shown["blocks"] == [("message", "".join(ODD))]
        assert shown["tools"]['t"\\']["title"] == "".join(ODD)
        assert [data["content"][0]["text"] for kind, data in shown["rest"] if kind == "user_message"] == ["".join(ODD)]


async def test_what_no_store_can_hold_is_replaced_and_stays_equal_everywhere(bed: Bed) -> None:
    """NUL and lone surrogates become U+FFFD once, before anybody sees them; a character torn in two is whole again."""
    handle = await bed.dispatch(prompt_id="x", keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    for escaped in (
        "a\\u0000b",
        "\\udc00",
        "\\ud800",
        "x",
        "\\ud83d",
        "\\ude00c\\\\u0000d",
        "\\ud83d\\ude00",
        "\\ud83d",
    ):
        line = json.dumps({"jsonrpc": "2.0", **text_frame("@@")}).replace("@@", escaped)
        agent.transport.agent.send_bytes(line.encode() + b"\n")
    agent.answer(frame)
    expected = "a\ufffdb" + "\ufffd" + "\ufffdx" + "😀c\\u0000d" + "😀" + "\ufffd"
    assert (await handle.result())["text"] == expected
    live, stored = await bed.events(handle), await bed.history()
    assert conversation(live)["blocks"] == conversation(stored)["blocks"] == [("message", expected)]


async def test_unknown_updates_do_not_break_a_stream(bed: Bed) -> None:
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    agent.send(
        update_frame(sessionUpdate="agent_message_chunk", content={"type": "image", "data": "x" * 9000}),
        update_frame(sessionUpdate=7),
        update_frame(),
        text_frame("ok", messageId={"a": 1}),
    )
    agent.answer(frame)
    assert (await handle.result())["text"] == "ok"
    events = await bed.events(handle)
    assert types(events).count("notice") == 3
    assert next(event for event in events if event["type"] == "notice")["data"]["truncated"] is True
