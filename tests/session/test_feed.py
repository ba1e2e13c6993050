"""The project feed: every replica tells it, nothing is missed, whoever comes when (DESIGN 4)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.session.feed import Feeds
from runner.session.port import Caller, Reader, ReaderCut, ReaderEnded
from runner.store.memory import MemoryStore
from runner.tasks import Tasks
from tests.session.bed import CALLER, Bed
from tests.session.gates import Gate
from tests.session.several import Several
from tests.store.rows import admission, record, session
from tests.virtual_time import LoopClock

pytestmark = pytest.mark.virtual_time

Line = dict[str, Any]


@pytest.fixture
async def several() -> AsyncIterator[Several]:
    made = Several()
    yield made
    await made.close()


async def lines(reader: Reader, seconds: float = 2.0) -> list[Line]:
    """What comes until nothing came for that long, or the reader ended."""
    found: list[Line] = []
    try:
        while (chunk := await reader.next(seconds)) is not None:
            found += [json.loads(line) for line in chunk.splitlines()]
    except ReaderEnded:
        reader.close()
    return found


def told(found: list[Line]) -> list[tuple[str, str]]:
    return [(line["session_id"], line["type"]) for line in found if line["kind"] == "event"]


async def turn(bed: Bed, session_id: str = "s", **more: Any) -> None:
    """A turn, and what is told behind it."""
    await bed.turn(session_id, **more)
    await asyncio.sleep(1)


async def kept(bed: Bed, after: str | None = None) -> list[Line]:
    return await lines(await bed.sessions.feed(CALLER, after, False))


ONE_TURN = [("s", "session_busy"), ("s", "session_idle")]


async def test_a_follower_hears_what_becomes_of_sessions(bed: Bed) -> None:
    reader = await bed.sessions.feed(CALLER, None, True)
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    agent.update(sessionUpdate="tool_call", toolCallId="t1", title="run it", status="in_progress")
    agent.ask(1, "t1")
    await asyncio.sleep(0.02)
    asked = (await bed.sessions.interactions(CALLER, "s", "pending"))["items"][0]
    await bed.answer(asked["interaction_id"], decision="allow")
    agent.answer(frame)
    await handle.result()
    found = await lines(reader)
    await bed.sessions.delete(CALLER, "s")
    found += await lines(reader)
    reader.close()
    assert told(found) == [
        ("s", "session_busy"),
        ("s", "interaction_requested"),
        ("s", "interaction_closed"),
        ("s", "session_idle"),
        ("s", "session_ended"),
    ]
    assert found[2]["data"]["interaction_id"] == asked["interaction_id"]
    assert found[1].keys() == {"kind", "cursor", "session_id", "session_cursor", "turn_id", "at", "type", "data"}
    assert told(await kept(bed)) == [("s", "session_ended")]


async def test_own_events_are_told_at_once_and_a_quiet_store_is_asked_once_a_second(bed: Bed) -> None:
    readers = [await bed.sessions.feed(CALLER, None, True) for _ in range(20)]
    before = bed.store.called["feed"]
    await asyncio.sleep(10)
    assert 9 <= bed.store.called["feed"] - before <= 11
    begun = asyncio.get_running_loop().time()
    handle = await bed.dispatch(keep_on_disconnect=True)
    for reader in readers:
        while told(await lines(reader, 0.01)) == []:
            pass
    assert asyncio.get_running_loop().time() - begun < 0.5
    (await (await bed.agent()).prompt())
    await bed.cancel()
    await handle.result()
    for reader in readers:
        reader.close()
    before = bed.store.called["feed"]
    await asyncio.sleep(10)
    assert bed.store.called["feed"] == before


async def test_another_replica_tells_the_same(several: Several) -> None:
    here, there = await several.replica("r1"), await several.replica("r2")
    readers = [await bed.sessions.feed(CALLER, None, True) for bed in (here, there)]
    await turn(here)
    await turn(there, "x")
    seen = [told(await lines(reader)) for reader in readers]
    assert (
        seen[0]
        == seen[1]
        == [("s", "session_busy"), ("s", "session_idle"), ("x", "session_busy"), ("x", "session_idle")]
    )
    for reader in readers:
        reader.close()


async def test_a_cursor_goes_on_where_it_was(bed: Bed) -> None:
    reader = await bed.sessions.feed(CALLER, None, True)
    (hello,) = await lines(reader)
    assert hello["kind"] == "ping"
    reader.close()
    await turn(bed)
    found = await kept(bed, hello["cursor"])
    assert told(found) == ONE_TURN
    again = await bed.sessions.feed(CALLER, found[1]["cursor"], True)
    assert told(await lines(again)) == ONE_TURN[1:]
    await turn(bed, nth=2)
    assert told(await lines(again)) == ONE_TURN
    again.close()


async def test_a_project_hears_nothing_of_another(bed: Bed) -> None:
    await turn(bed)
    other = Caller("q", CALLER.scopes)
    assert told(await lines(await bed.sessions.feed(other, None, False))) == []


@pytest.mark.parametrize("after", ["3.17", "x", "-1-0", "1-99999999999999999999"])
async def test_what_is_no_cursor_is_refused(bed: Bed, after: str) -> None:
    with pytest.raises(RunnerError, match="must be a cursor of the feed"):
        await bed.sessions.feed(CALLER, after, True)


async def test_a_cursor_older_than_what_is_kept_or_beyond_it_is_a_resync(bed: Bed) -> None:
    await turn(bed)
    first = (await kept(bed))[1]["cursor"]
    now = LoopClock().now_ms()
    assert await bed.store.trim_feed("p", now + 1, 2) == 2
    await turn(bed, nth=2)
    for stale in (first, "7-7"):
        found = await kept(bed, stale)
        assert [line["type"] for line in found] == ["resync", "session_busy", "session_idle"]
        assert found[0]["cursor"] == found[0]["data"]["from"]
        assert told(await kept(bed, found[0]["cursor"])) == ONE_TURN


async def test_a_store_that_is_away_delays_the_feed_and_loses_nothing(bed: Bed) -> None:
    reader = await bed.sessions.feed(CALLER, None, True)
    bed.store.failing["feed"] = 5
    await turn(bed)
    assert told(await lines(reader, 8)) == ONE_TURN
    reader.close()
    bed.store.failing["feed_span"] = 1
    with pytest.raises(RunnerError, match="cannot be used"):
        await bed.sessions.feed(CALLER, None, True)
    again = await bed.sessions.feed(CALLER, "0-0", True)
    assert told(await lines(again)) == ONE_TURN
    again.close()


class Filled:
    """Feeds over a store that a test fills."""

    def __init__(self, ring_bytes: int = 4096, buffer_bytes: int = 8192) -> None:
        self.store = MemoryStore(clock=LoopClock())
        self.tasks = Tasks("feeds")
        self.feeds = Feeds(self.store, LoopClock(), self.tasks, ring_bytes, buffer_bytes)
        self.count = 0

    async def begin(self) -> None:
        assert await self.store.admit(admission())

    async def add(self, count: int) -> None:
        first, self.count = self.count + 1, self.count + count
        await self.store.append([record(n, type="session_busy", data=b"{}") for n in range(first, self.count + 1)])
        self.feeds.stir("p")

    async def close(self) -> None:
        await self.tasks.close()


@pytest.fixture
async def filled() -> AsyncIterator[Filled]:
    made = Filled()
    await made.begin()
    yield made
    await made.close()


async def numbers(reader: Reader) -> list[int]:
    return [int(line["session_cursor"].split(".")[1]) for line in await lines(reader) if line["kind"] == "event"]


async def test_nothing_falls_between_what_is_kept_and_what_comes(filled: Filled) -> None:
    """Subscribing is stopped at each of its steps while more is written."""
    await filled.add(1200)
    for step in ("begun", "span", "past"):
        gate = Gate()
        before = filled.count
        original = filled.store.feed_span if step != "past" else filled.store.feed

        async def held(*args: Any, gate: Gate = gate, original: Any = original) -> Any:
            answer = await original(*args)
            await gate.passes()
            return answer

        others = await filled.feeds.reader("p", "0-0", True) if step == "span" else None
        setattr(filled.store, original.__name__, held)
        opening = asyncio.ensure_future(filled.feeds.reader("p", "0-0", True))
        reading = asyncio.ensure_future(_all(opening, before + 30))
        await asyncio.sleep(3)
        await filled.add(10)
        await asyncio.sleep(3)
        await filled.add(10)
        gate.open()
        await asyncio.sleep(3)
        setattr(filled.store, original.__name__, original)
        await filled.add(10)
        assert await reading == list(range(1, before + 31))
        if others is not None:
            others.close()


async def _all(opening: asyncio.Future[Reader], count: int) -> list[int]:
    reader = await opening
    found: list[int] = []
    while len(found) < count:
        found += await numbers(reader)
    reader.close()
    return found


async def test_a_slow_follower_is_cut_and_comes_back_without_loss(filled: Filled) -> None:
    reader = await filled.feeds.reader("p", None, True)
    seen = await lines(reader)
    await filled.add(1000)
    await asyncio.sleep(3)
    with pytest.raises(ReaderCut, match="read on from your last cursor"):
        await lines(reader)
    reader.close()
    again = await filled.feeds.reader("p", seen[-1]["cursor"], True)
    assert await numbers(again) == list(range(1, 1001))
    again.close()


async def test_an_unreadable_past_cuts_its_reader_with_a_reason(filled: Filled) -> None:
    await filled.add(3)
    reader = await filled.feeds.reader("p", "0-0", False)
    filled.store.unavailable = True
    with pytest.raises(ReaderCut, match="cannot be read now"):
        await lines(reader)
    filled.store.unavailable = False


async def test_the_end_of_a_session_that_nobody_had_begun_is_told(filled: Filled) -> None:
    await filled.store.save_session(session("other", 3000, ended_at=3000))
    found = await lines(await filled.feeds.reader("p", None, False))
    assert told(found) == [("other", "session_ended")]
