"""Readers who come, go and come back: each sees one conversation, whole and in order (DESIGN 3.9)."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.rules.late import Late
from runner.session.port import Reader, ReaderCut, ReaderEnded
from runner.session.session import Session
from runner.store.port import RecordKey, SessionRow
from tests.normal_form import normal_form
from tests.session.bed import CALLER, Bed, types
from tests.session.fake_agent import text_frame
from tests.session.gates import Gate
from tests.session.reading import Event, assert_ordered, cursor, ended
from tests.session.several import Several
from tests.store.rows import record

pytestmark = pytest.mark.virtual_time
SMALL = {"server": {"ring_bytes": 2048, "reader_buffer_bytes": 4096}}


async def said(bed: Bed, nth: int, count: int, *, pause: float = 0.05) -> None:
    """A turn in which the agent thinks, uses a tool and says ``count`` words."""
    await bed.dispatch(prompt=f"prompt {nth}", prompt_id=f"p{nth}", keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt(nth)
    agent.update(sessionUpdate="agent_thought_chunk", content={"type": "text", "text": f"hm {nth} "})
    agent.update(sessionUpdate="tool_call", toolCallId=f"t{nth}", title="ls", kind="execute", status="in_progress")
    for n in range(count):
        agent.send(text_frame(f"word{n} "))
        await asyncio.sleep(pause)
    agent.update(sessionUpdate="tool_call_update", toolCallId=f"t{nth}", status="completed")
    agent.say("end")
    agent.answer(frame)
    async for _ in ended(bed, f"p{nth}"):
        pass


async def heard(reader: Reader, seconds: float, into: list[Event]) -> bool:
    """Take what comes for so long; False once the reader was cut or ended."""
    deadline = asyncio.get_running_loop().time() + seconds
    try:
        while (left := deadline - asyncio.get_running_loop().time()) > 0:
            lines = await reader.next(left)
            into += [json.loads(line) for line in (lines or b"").splitlines()]
    except (ReaderCut, ReaderEnded):
        return False
    finally:
        reader.close()
    return True


def last(events: list[Event]) -> str | None:
    return next((event["cursor"] for event in reversed(events) if "cursor" in event), None)


def known(bed: Bed) -> Session:
    session = bed.sessions._registry.known(("p", "s"))
    assert session is not None
    return session


async def stored(bed: Bed) -> list[Any]:
    return normal_form(await bed.history())


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("settings", [{}, SMALL], ids=["a large ring", "a small ring"])
async def test_whoever_reconnects_whenever_sees_the_same(seed: int, settings: dict[str, Any]) -> None:
    """One reads on, one comes back ten times at any moment, one is slow and is cut: one conversation."""
    chance = random.Random(seed)
    bed = await Bed.make(settings=settings)
    steady: list[Event] = []
    restless: list[Event] = []
    slow: list[Event] = []

    async def come_back(into: list[Event], times: int, nap: float, stay: float) -> None:
        for _ in range(times):
            await heard(await bed.sessions.follow(CALLER, "s", last(into), True), chance.uniform(0, stay), into)
            await asyncio.sleep(chance.uniform(0, nap))

    async def talk() -> None:
        for nth in (1, 2, 3):
            await said(bed, nth, 40, pause=chance.choice((0.0, 0.01, 0.1)))
            await asyncio.sleep(chance.uniform(0, 2))

    talking = asyncio.ensure_future(talk())
    while bed.sessions._registry.known(("p", "s")) is None:
        await asyncio.sleep(0)
    first = asyncio.ensure_future(_whole(bed, steady))
    others = [
        asyncio.ensure_future(come_back(restless, 10, 0.4, 0.8)),
        asyncio.ensure_future(come_back(slow, 4, 5.0, 0.1)),
    ]
    await talking
    await asyncio.gather(*others)
    for into in (restless, slow):
        await heard(await bed.sessions.follow(CALLER, "s", last(into), True), 3, into)
    await asyncio.sleep(3)
    first.cancel()
    expected = await stored(bed)
    for events in (steady, restless, slow):
        assert_ordered([event for event in events if event["type"] != "resync"])
        assert normal_form(events) == expected
    await bed.close()


async def _whole(bed: Bed, into: list[Event]) -> None:
    while True:
        await heard(await bed.sessions.follow(CALLER, "s", last(into), True), 3600, into)


async def test_a_late_insert_shifts_no_cursor_case_h3(bed: Bed) -> None:
    """Read to a cursor, a late record of the older turn arrives, resume: nothing twice, nothing skipped."""
    await bed.turn()
    await asyncio.sleep(1)
    seen = await bed.history()
    after = seen[-1]["cursor"]
    await bed.turn(nth=2)
    turn_id = seen[1]["turn_id"] or seen[2]["turn_id"]
    late = record(3, project="p", turn_id=turn_id, record_id="late", type="message")
    assert (await bed.store.append([late])).quarantined == 1
    assert (await bed.store.quarantined("p", 10))[0][1].reason == Late.TURN_ENDED
    rest = await bed.history(after=after)
    assert all(cursor(event) > cursor(seen[-1]) for event in rest)
    assert [event["cursor"] for event in seen + rest] == [event["cursor"] for event in await bed.history()]
    assert "late" not in json.dumps((await bed.sessions.records(CALLER, "s", None, 100))["items"])


async def test_a_write_that_fails_in_mid_stream_changes_nothing_that_is_read_case_h4(bed: Bed) -> None:
    """Frames are shown before they are durable; the store fails meanwhile; who reconnects reads the same."""
    live: list[Event] = []
    handle = await bed.dispatch(prompt_id="p1", keep_on_disconnect=True)
    reader = await bed.sessions.follow(CALLER, "s", None, True)
    agent = await bed.agent()
    frame = await agent.prompt()
    agent.say("one ")
    agent.update(sessionUpdate="tool_call", toolCallId="t", title="ls", kind="execute", status="completed")
    bed.store.failing["append"] = 4
    await asyncio.sleep(0.4)
    agent.say("two ")
    agent.update(sessionUpdate="plan", entries=[])
    await asyncio.sleep(2)
    again = await bed.sessions.follow(CALLER, "s", None, True)
    in_between: list[Event] = []
    await heard(again, 1, in_between)
    agent.say("three")
    bed.store.failing["end"] = 1
    agent.answer(frame)
    assert (await handle.result())["outcome"] == "completed"
    await asyncio.sleep(3)
    await heard(reader, 1, live)
    assert normal_form(live) == await stored(bed)
    last_seen = in_between[-1]["cursor"]
    await heard(await bed.sessions.follow(CALLER, "s", last_seen, True), 1, in_between)
    assert normal_form(in_between) == await stored(bed)
    texts = [event["data"]["text"] for event in await bed.history() if event["type"] == "message"]
    assert "".join(texts) == "one two three"


@pytest.mark.parametrize("when", ["before the prompt", "two seconds later", "behind the end"])
async def test_whoever_connects_late_sees_the_turn_from_its_begin_case_h6(bed: Bed, when: str) -> None:
    """The session is there; its viewer went between create and send, and comes back later."""
    await bed.dispatch(prompt="for later", prompt_id="c", context_only=True)
    viewer = await bed.sessions.follow(CALLER, "s", None, True)
    viewer.close()
    seen: list[Event] = []
    early = await bed.sessions.follow(CALLER, "s", None, True) if when == "before the prompt" else None
    talking = asyncio.ensure_future(said(bed, 1, 60))
    if when == "two seconds later":
        await asyncio.sleep(2)
    elif when == "behind the end":
        await talking
    reader = early if early is not None else await bed.sessions.follow(CALLER, "s", None, True)
    await heard(reader, 10, seen)
    await talking
    assert types(seen)[0] == "session_busy"
    assert {"turn_admitted", "user_message", "done", "session_idle"} <= set(types(seen))
    assert normal_form(seen) == await stored(bed)


async def test_a_cursor_older_than_what_retention_kept_is_a_resync(bed: Bed) -> None:
    await bed.turn()
    await asyncio.sleep(1)
    first = await bed.history()
    await bed.turn(nth=2)
    await asyncio.sleep(1)
    everything = (await bed.sessions.records(CALLER, "s", None, 100))["items"]
    old = [item for item in everything if cursor(item)[0] == 1]
    known(bed).log.shrink()
    assert await bed.store.delete_records([RecordKey("p", item["record_id"]) for item in old]) == len(old)
    kept = [item["cursor"] for item in everything[len(old) :]]
    stale = await bed.history(after=first[2]["cursor"])
    assert types(stale)[0] == "resync"
    assert stale[0]["data"] == {"from": old[-1]["cursor"]}
    assert [event["cursor"] for event in stale[1:]] == kept
    assert [event["cursor"] for event in await bed.history()] == kept, "who comes anew misses nothing"
    assert [event["cursor"] for event in await bed.history(after=old[-1]["cursor"])] == kept


@pytest.mark.parametrize("shrunk", [False, True], ids=["in the ring", "in the store"])
async def test_who_saw_what_came_too_late_forgets_it(bed: Bed, *, shrunk: bool) -> None:
    """An owner that was overtaken had shown more of epoch 1 than counts; its readers are told, others are not (H4)."""
    await bed.turn()
    await asyncio.sleep(1)
    first = await bed.history()
    await bed.turn(nth=2)
    await asyncio.sleep(1)
    if shrunk:
        known(bed).log.shrink()
    late = {**first[-1], "cursor": f"1.{cursor(first[-1])[1] + 1}"}
    told = [*first, late, *await bed.history(after=late["cursor"])]
    again = told[len(first) + 1 :]
    assert (again[0]["type"], again[0]["data"]) == ("resync", {"from": "1.0"})
    assert_ordered(again[1:])
    assert normal_form(told) == await stored(bed)
    for event in first:
        assert "resync" not in types(await bed.history(after=event["cursor"]))
    if not shrunk:
        bed.store.failing["records"] = 1
        assert cursor((await bed.history(after=late["cursor"]))[0])[0] == 2, "what is at hand waits for no store"


async def test_a_resync_comes_with_what_follows_or_not_at_all(bed: Bed) -> None:
    """Who is cut between the two would come back by a cursor of what it was told to forget."""
    await bed.turn()
    await asyncio.sleep(1)
    known(bed).log.shrink()
    bed.store.failing["records"] = 1
    reader = await bed.sessions.follow(CALLER, "s", "9.9", False)
    with pytest.raises(ReaderCut):
        await reader.next(1)
    reader.close()
    reader = await bed.sessions.follow(CALLER, "s", "9.9", False)
    first = [json.loads(line) for line in (await reader.next(1) or b"").splitlines()]
    reader.close()
    assert types(first)[:2] == ["resync", "session_busy"]


async def test_what_the_owner_before_wrote_late_falls_between_nothing(bed: Bed) -> None:
    """A reader has read the past here; then the other owner's last event is stored, and a turn begins here (H4)."""
    await bed.turn()
    await asyncio.sleep(1)
    session = known(bed)
    session.log.restart()
    session.log_since, session.busy = session.head.cursor, True
    reader, seen = await bed.sessions.follow(CALLER, "s", None, True), []
    seen += [json.loads(line) for line in (await reader.next(1) or b"").splitlines()]
    assert await reader.next(0.1) is None
    idle = record(session.head.n + 1, epoch=1, project="p", turn_id=None, record_id="late", type="session_idle")
    await bed.store.append([idle._replace(data=b"{}")])
    await bed.turn(nth=2)
    await heard(reader, 2, seen)
    assert_ordered(seen)
    assert normal_form(seen) == await stored(bed)
    at = [event["cursor"] for event in seen].index(f"1.{idle.n}")
    assert seen[at + 1]["cursor"] == "2.1"


async def test_what_retention_deletes_while_it_is_read_is_told(bed: Bed) -> None:
    assert await bed.turn()
    await asyncio.sleep(1)
    rows = [record(n, epoch=1, project="p", turn_id=None, record_id=f"r{n}") for n in range(1000, 2600)]
    await bed.store.append(rows)
    known(bed).head.n = 2600
    known(bed).log.shrink()
    reader = await bed.sessions.follow(CALLER, "s", None, False)
    seen = [json.loads(line) for line in (await reader.next(1) or b"").splitlines()]
    await bed.store.delete_records([RecordKey("p", f"r{n}") for n in range(1000, 2001)])
    assert not await heard(reader, 5, seen)
    at = types(seen).index("resync")
    assert seen[at]["data"] == {"from": "1.2000"}
    assert [cursor(event)[1] for event in seen[at + 1 :]] == list(range(2001, 2600))


async def test_a_past_that_cannot_be_read_cuts_its_reader_with_a_reason(bed: Bed) -> None:
    await bed.turn()
    await asyncio.sleep(1)
    known(bed).log.shrink()
    reader = await bed.sessions.follow(CALLER, "s", None, True)
    bed.store.failing["records"] = 1
    with pytest.raises(ReaderCut, match="the past cannot be read now"):
        await reader.next(1)
    reader.close()
    assert types(await bed.history())[0] == "session_busy"


async def test_a_reader_of_a_session_that_has_ended_ends_case_h10(bed: Bed) -> None:
    await bed.turn()
    reader = await bed.sessions.follow(CALLER, "s", None, True)
    await bed.sessions.delete(CALLER, "s")
    seen: list[Event] = []
    assert not await heard(reader, 5, seen)
    with pytest.raises(RunnerError) as caught:
        await bed.sessions.follow(CALLER, "s", None, True)
    assert (caught.value.code, caught.value.status) == ("session_ended", 410)


async def test_who_asks_later_is_not_told_what_was_before_case_h6(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another replica began the session while a look for it was on its way: it is there for whoever asks now."""
    several = Several()
    a, b = await several.replica("a"), await several.replica("b")
    read, gate = several.store.session, Gate()

    async def slow(project: str, session_id: str) -> SessionRow | None:
        monkeypatch.undo()
        found = await read(project, session_id)
        await gate.passes()
        return found

    monkeypatch.setattr(several.store, "session", slow)
    early = asyncio.create_task(b.sessions.view(CALLER, "s"))
    await gate.reached.wait()
    assert (await a.turn())["ok"]
    late = asyncio.create_task(b.sessions.view(CALLER, "s"))
    await asyncio.sleep(0.01)
    gate.open()
    await asyncio.wait({early, late})
    assert late.result()["last_turn"]["outcome"] == "completed"
    await several.close()


async def test_a_turn_on_its_way_makes_nobody_forget_what_another_replica_has_told_case_h9() -> None:
    several = Several()
    a, b = await several.replica("a"), await several.replica("b")
    several.sides["b"].open.clear()
    sending = asyncio.create_task(b.dispatch(prompt="late"))
    await asyncio.sleep(0.1)
    assert (await a.turn())["ok"]
    await asyncio.sleep(1)
    last = (await a.history())[-1]["cursor"]
    with pytest.raises(RunnerError) as caught:
        await b.sessions.follow(CALLER, "s", last, True)
    assert (caught.value.code, caught.value.retryable) == ("owned_elsewhere", True)
    several.sides["b"].open.set()
    await asyncio.wait({sending})
    assert await b.history(after=last) == []
    await several.close()
