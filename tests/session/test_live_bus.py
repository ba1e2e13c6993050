"""Live events at another replica over the bus: the same conversation as at the owner, wherever a follower comes in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.session.mirror import DEAF_SECONDS
from runner.session.outlets import LARGE_BYTES, WATCHED_SECONDS
from tests.session.bed import CALLER, Bed
from tests.session.fake_agent import text_frame
from tests.session.gates import Gate
from tests.session.live import Bus, Followed, two
from tests.session.reading import Event, assert_contiguous, assert_ordered, conversation, cursor, ended, presence
from tests.session.several import Several
from tests.session.test_streams import rich_turn

pytestmark = pytest.mark.virtual_time

SMALL = {"server": {"ring_bytes": 2048, "reader_buffer_bytes": 4096}}


@pytest.fixture
def bus() -> Bus:
    return Bus()


@pytest.fixture
async def several(bus: Bus) -> AsyncIterator[Several]:
    world = Several(bus)
    yield world
    await world.close()


async def started(bed: Bed, nth: int = 1, **fields: Any) -> tuple[Any, Any, dict[str, Any]]:
    """A turn whose agent has its prompt."""
    handle = await bed.dispatch(prompt=f"prompt {nth}", prompt_id=f"p{nth}", **{"keep_on_disconnect": True, **fields})
    agent = await bed.agent()
    return handle, agent, await agent.prompt(nth)


async def said(follower: Followed, text: str) -> None:
    async with asyncio.timeout(300):
        while text not in "".join(str(event["data"].get("text", "")) for event in follower.events):
            await asyncio.sleep(0.01)


def same_as_stored(events: list[Event], stored: list[Event]) -> None:
    assert_ordered([event for event in events if "cursor" in event])
    assert conversation(events) == conversation(stored)


async def test_a_follower_elsewhere_sees_every_frame(several: Several) -> None:
    """Case H6: contiguous from the first event, without a connection to the owner."""
    a, b = await two(several)
    _, agent, frame = await started(a)
    follower = Followed(b)
    await follower.until("turn_admitted")
    for n in range(20):
        agent.say(f"word{n} ")
        await asyncio.sleep(0.02)
    agent.answer(frame)
    await follower.until("session_idle")
    events = await follower.leave()
    assert_contiguous(events)
    assert [event["type"] for event in events].count("message_delta") == 20
    assert follower.peers.asked == 0
    same_as_stored(events, await a.history())


async def test_one_that_comes_late_sees_the_open_message_from_its_beginning(several: Several) -> None:
    a, b = await two(several)
    _, agent, frame = await started(a)
    for n in range(5):
        agent.say(f"word{n} ")
        await asyncio.sleep(0.5)
    follower = Followed(b)
    await said(follower, "word4")
    agent.say("end")
    agent.answer(frame)
    await follower.until("session_idle")
    events = await follower.leave()
    assert_contiguous(events)
    assert [e["data"]["text"] for e in events if e["type"] == "message_delta"] == [
        *(f"word{n} " for n in range(5)),
        "end",
    ]


async def test_wherever_it_comes_in_it_sees_the_same(several: Several, bus: Bus) -> None:
    """Case H3: subscribed at any instant of a turn, with and without a cursor; rings that keep next to nothing."""
    bus.latency = 0.013
    a, b = await two(several, **SMALL)
    instants = [n * 0.03 for n in range(60)]
    followers: list[Followed] = []

    async def come() -> None:
        for _ in instants:
            seen = followers[-1].events if followers else []
            after = next((event["cursor"] for event in reversed(seen) if "cursor" in event), None)
            followers.append(Followed(b, None if len(followers) % 2 else after))
            await asyncio.sleep(0.03)

    _, agent, frame = await started(a)
    coming = asyncio.create_task(come())
    for n in range(60):
        agent.send(*(text_frame(f"w{n}.{i} ") for i in range(5)))
        if n % 7 == 0:
            agent.update(sessionUpdate="tool_call", toolCallId=f"t{n}", title="ls", kind="execute", status="pending")
            agent.update(sessionUpdate="tool_call_update", toolCallId=f"t{n}", status="completed", rawInput={"a": n})
        await asyncio.sleep(0.03)
    await coming
    agent.answer(frame)
    stored: list[Event] = []
    for follower in followers:
        await follower.until("session_idle")
        events = await follower.leave()
        stored = stored or await a.history()
        first = cursor(events[0])
        assert_ordered(events)
        expected = conversation([e for e in stored if cursor(e) >= first])
        assert conversation(events)["rest"] == expected["rest"]
        blocks = [e for e in events if e["type"] == "message"]
        assert blocks == [e for e in stored if e["type"] == "message" and cursor(e) >= first]


async def test_what_the_owner_has_not_written_yet_is_not_missed(several: Several) -> None:
    """Case H3: the ring has lost it, and the store does not have it while its write is held."""
    a, b = await two(several, **SMALL)
    _, agent, frame = await started(a)
    gate = several.store.gates["append"] = Gate()
    for n in range(40):
        agent.update(sessionUpdate="tool_call", toolCallId=f"t{n}", title="x" * 200, status="completed")
    await asyncio.sleep(1)
    follower = Followed(b)
    await asyncio.sleep(1)
    gate.open()
    del several.store.gates["append"]
    agent.answer(frame)
    await follower.until("session_idle")
    same_as_stored(await follower.leave(), await a.history())


async def test_it_waits_while_the_store_lacks_what_was_shown(several: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case H3: a record stream that cannot be read for a while; nobody is told a history with a hole."""
    a, b = await two(several, **SMALL)
    _, agent, frame = await started(a)
    for n in range(40):
        agent.update(sessionUpdate="tool_call", toolCallId=f"t{n}", title="x" * 200, status="completed")
    asked = []

    async def caught_up(project: str, session_id: str) -> None:
        asked.append(session_id)
        if len(asked) <= 3:
            raise RunnerError("store_unavailable", "scripted")

    monkeypatch.setattr(several.store, "caught_up", caught_up)
    follower = Followed(b)
    await asyncio.sleep(0.3)
    assert follower.events == []
    agent.answer(frame)
    await follower.until("session_idle")
    assert len(asked) > 3
    same_as_stored(await follower.leave(), await a.history())


async def test_a_hundred_followers_cost_the_owner_one_writer(several: Several, bus: Bus) -> None:
    """Case H8: entries are counted, not time."""
    a, b = await two(several)
    counts = []
    for nth, many in ((1, 1), (2, 100)):
        _, agent, frame = await started(a, nth)
        followers = [Followed(b) for _ in range(many)]
        for follower in followers:
            await follower.until("turn_admitted", nth)
        before = bus.published
        for n in range(50):
            agent.say(f"word{n} ")
            await asyncio.sleep(0.05)
        agent.answer(frame)
        for follower in followers:
            await follower.until("session_idle", nth)
        counts.append(bus.published - before)
        assert presence(a) == 1
        seen = [await follower.leave() for follower in followers]
        assert all(events == seen[0] for events in seen)
        assert_ordered(seen[0])
    assert counts[1] <= counts[0] + 2, counts


@pytest.mark.parametrize("losing", [1, 3])
async def test_entries_that_are_lost_are_sent_again(several: Several, bus: Bus, losing: int) -> None:
    a, b = await two(several)
    _, agent, frame = await started(a)
    follower = Followed(b)
    agent.say("first ")
    await said(follower, "first")
    bus.losing = losing
    for n in range(10):
        agent.say(f"word{n} ")
        await asyncio.sleep(0.05)
    agent.answer(frame)
    await follower.until("session_idle")
    events = await follower.leave()
    assert_contiguous(events)
    assert follower.peers.asked == 0


@pytest.mark.parametrize("loses", [False, True])
async def test_a_bus_that_goes_away_and_comes_back_costs_no_event(several: Several, bus: Bus, loses: bool) -> None:
    """Case H10: the follower keeps its place, with no other way to the owner, and sees everything once."""
    a, b = await two(several)
    _, agent, frame = await started(a)
    follower = Followed(b)
    agent.say("first ")
    await said(follower, "first")
    bus.away = True
    for n in range(10):
        agent.say(f"word{n} ")
        await asyncio.sleep(0.4)
    if loses:
        bus.forget()
    bus.away = False
    agent.say("end ")
    await said(follower, "end ")
    agent.answer(frame)
    await follower.until("session_idle")
    events = await follower.leave()
    assert_contiguous(events)
    assert follower.peers.asked > 0


async def test_a_plane_that_forgets_the_owner_costs_no_resync(several: Several) -> None:
    """Case M8: nobody holds the session until the owner's next beat; its turn is open, so it is waited for."""
    a, b = await two(several)
    _, agent, frame = await started(a)
    follower = Followed(b)
    agent.say("first ")
    await said(follower, "first")
    several.plane._leases.clear()
    await asyncio.sleep(3)
    agent.say("second ")
    await said(follower, "second")
    agent.answer(frame)
    await follower.until("session_idle")
    events = await follower.leave()
    assert_contiguous(events)


async def test_it_goes_on_when_the_owner_dies(several: Several) -> None:
    """Case H10: the lost turn's ending, then the next turn, which runs where it follows."""
    a, b = await two(several)
    _, agent, _ = await started(a)
    follower = Followed(b)
    agent.say("half ")
    await said(follower, "half")
    await several.kill("rep_a")
    await follower.until("done")
    assert (await b.turn(prompt="again"))["ok"]
    await follower.until("done", 2)
    events = await follower.leave()
    behind = [event for event in events if event["type"] != "resync"]
    assert [event["data"]["outcome"] for event in behind if event["type"] == "done"][-2:] == ["lost", "completed"]


async def test_it_goes_on_at_the_next_owner(several: Several) -> None:
    a, b = await two(several)
    c = await several.replica("rep_c")
    assert (await a.turn())["ok"]
    follower = Followed(b)
    await follower.until("session_idle")
    live = a.pool.live(("p", "s"))
    assert live is not None
    a.pool.dismiss(live, "test")
    await asyncio.sleep(5)
    assert (await c.turn(prompt="again"))["ok"]
    await follower.until("session_idle", 2)
    events = await follower.leave()
    assert_ordered(events)
    assert [event["type"] for event in events].count("resync") == 0


async def test_a_follower_elsewhere_is_a_reader(several: Several) -> None:
    """DESIGN 3.4: its session's sandbox stays warm; behind its leaving, and the grace, the next turn's does not."""
    a, b = await two(several, pool={"idle_seconds": 600})
    _, agent, _ = await started(a, keep_on_disconnect=False)
    follower = Followed(b)
    await follower.until("turn_admitted")
    await asyncio.sleep(60)
    await agent.finish()
    async for _ in ended(a, "p1"):
        pass
    await asyncio.sleep(1)
    assert a.pool.live(("p", "s")) is not None
    _, agent, _ = await started(a, 2, keep_on_disconnect=False)
    await follower.leave()
    await asyncio.sleep(0.1)
    assert presence(a) == 0
    await asyncio.sleep(a.replica.settings.server.reader_grace_seconds + 1)
    await agent.finish(2)
    async for _ in ended(a, "p2"):
        pass
    await asyncio.sleep(1)
    assert a.pool.live(("p", "s")) is None


async def test_a_watch_that_is_not_renewed_lapses(several: Several) -> None:
    a, b = await two(several)
    await started(a)
    follower = Followed(b)
    await follower.until("turn_admitted")
    assert presence(a) == 1
    await several.kill("rep_b", proven=False)
    await asyncio.sleep(WATCHED_SECONDS + 1)
    assert presence(a) == 0
    await follower.leave()


async def test_a_quiet_session_is_watched_for_as_long_as_it_is_followed(several: Several, bus: Bus) -> None:
    """Case N5: nothing has an end of its own; hours later the next event is there at once, and nothing was sent."""
    a, b = await two(several, turn={"idle_seconds": 36_000, "first_update_seconds": 36_000, "quiet_seconds": 36_000})
    _, agent, frame = await started(a)
    follower = Followed(b)
    agent.say("before ")
    await said(follower, "before")
    sent = bus.published
    await asyncio.sleep(3 * 3600)
    assert (presence(a), bus.published) == (1, sent)
    agent.say("after ")
    agent.answer(frame)
    await follower.until("session_idle")
    events = await follower.leave()
    assert_contiguous(events)


async def test_it_ends_with_the_session(several: Several) -> None:
    a, b = await two(several)
    assert (await a.turn())["ok"]
    follower = Followed(b)
    await follower.until("session_idle")
    await a.sessions.delete(CALLER, "s")
    await asyncio.sleep(5)
    assert follower.ended
    await follower.leave()


async def test_a_cursor_that_the_mirror_has_not_reached_is_no_resync(several: Several, bus: Bus) -> None:
    """Case H10: seen at the owner, then followed elsewhere, where the newest events have not arrived yet."""
    bus.latency = 0.5
    a, b = await two(several)
    _, agent, frame = await started(a)
    first = Followed(b)
    await first.until("turn_admitted")
    agent.say("one ")
    await asyncio.sleep(0.1)
    session = a.sessions._registry.known(("p", "s"))
    assert session is not None
    epoch, n = session.head.epoch, session.head.n
    newest = f"{epoch}.{n}"
    assert newest not in [event["cursor"] for event in first.events]
    second, wrong = Followed(b, newest), Followed(b, f"{epoch}.{n + 1000}")
    await wrong.until("resync")
    agent.say("two ")
    agent.answer(frame)
    for follower in (first, second, wrong):
        await follower.until("session_idle")
    events = await second.leave()
    assert cursor(events[0]) == (epoch, n + 1)
    assert_contiguous(events)
    await first.leave()
    await wrong.leave()


async def test_a_slow_follower_is_cut_here_and_costs_the_others_nothing(several: Several) -> None:
    """Case H9: it goes on with blocks for frames; the owner and the other follower do not notice."""
    a, b = await two(several, **SMALL)
    _, agent, frame = await started(a)
    quick = Followed(b)
    await quick.until("turn_admitted")
    slow = await quick.relay.follow(CALLER, "s", None, {})
    for n in range(100):
        agent.say(f"word{n} ")
        await asyncio.sleep(0.02)
    agent.answer(frame)
    await quick.until("session_idle")
    assert_contiguous(await quick.leave())
    lines = b""
    while b"session_idle" not in lines:
        lines += await slow.next(60) or b""
    slow.close()
    assert b"".join(f"word{n} ".encode() for n in range(100)) in lines


async def test_an_owner_that_does_not_answer_is_asked_over_http(several: Several) -> None:
    """First of all for a while, and for longer each time; the bus is still there where that fails, too."""
    a, b = await two(several)
    await started(a)
    outlets, a.sessions.outlets = a.sessions.outlets, None
    mirrors = b.replica.mirrors
    assert mirrors is not None
    for seconds in (DEAF_SECONDS[0], 2 * DEAF_SECONDS[0]):
        follower = Followed(b)
        with pytest.raises(RunnerError, match="cannot be reached"):
            await follower.task
        assert follower.peers.asked == 1
        await asyncio.sleep(seconds - 0.1)
        assert not mirrors.serves("rep_a")
        await asyncio.sleep(0.2)
        assert mirrors.serves("rep_a")
    assert mirrors.serves("rep_b")
    follower = Followed(b)
    with pytest.raises(RunnerError):
        await follower.task
    a.sessions.outlets = outlets
    follower = Followed(b)
    await follower.until("turn_admitted")
    assert follower.peers.asked == 1
    assert mirrors.serves("rep_a")
    await follower.leave()


async def test_what_is_too_large_for_the_bus_is_read_in_the_store(several: Several, bus: Bus) -> None:
    """Case E1: neither the frame nor its block goes over; whoever follows has the block all the same."""
    a, b = await two(several)
    _, agent, frame = await started(a)
    follower = Followed(b)
    agent.say("before ")
    await said(follower, "before")
    sizes: list[int] = []
    work = bus.publish

    async def publish(replica_id: str, entries: Sequence[bytes]) -> None:
        sizes.extend(map(len, entries))
        await work(replica_id, entries)

    bus.publish = publish  # type: ignore[method-assign]
    agent.update(sessionUpdate="tool_call", toolCallId="t", title="ls", kind="execute", status="completed")
    agent.say("x" * (LARGE_BYTES + 1))
    await asyncio.sleep(1)
    agent.update(sessionUpdate="tool_call", toolCallId="u", title="ls", kind="execute", status="completed")
    agent.say("after ")
    agent.answer(frame)
    await follower.until("session_idle")
    same_as_stored(await follower.leave(), await a.history())
    assert max(sizes) < LARGE_BYTES


async def test_a_whole_turn_is_the_same_everywhere(several: Several) -> None:
    """Case H7: three readers, one of which reconnects ten times, one at the owner: identical in normal form."""
    a, b = await two(several)
    turning = asyncio.create_task(rich_turn(a))
    await a.agent()
    at_a, steady = Followed(a), Followed(b)
    pieces: list[Event] = []
    for _ in range(10):
        again = Followed(b, pieces[-1]["cursor"] if pieces else None)
        await asyncio.sleep(0.2)
        pieces += await again.leave()
    await turning
    again = Followed(b, pieces[-1]["cursor"])
    for follower in (at_a, steady):
        await follower.until("session_idle")
    await asyncio.sleep(1)
    stored = await a.history()
    for seen in (await at_a.leave(), await steady.leave(), [*pieces, *await again.leave()]):
        same_as_stored(seen, stored)
