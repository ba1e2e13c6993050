"""Followers of a session that changes hands: every event once, in order, and the stream goes on (cases H5 and H10)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import aiohttp
import orjson
import pytest

from runner.errors import RunnerError
from runner.server import relay, upstream
from tests.server.double import FakeReader, FakeSessions, line
from tests.server.neighbours import Book, FakeOwners, Neighbours
from tests.server.test_forward import answered

EVENTS = "/v1/sessions/s1/events"
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"


def text(n: int) -> bytes:
    return line(n, "message_delta", {"message_id": "m", "text": f"part {n}"})


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.fixture
async def two(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Neighbours]:
    monkeypatch.setattr(relay, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(relay, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(upstream, "READ_SECONDS", 0.2)
    monkeypatch.setattr(upstream, "WATCH_SECONDS", 0.05)
    made = Neighbours()
    try:
        for name in ("a", "b", "c"):
            sessions = await made.add(name)
            stored(sessions)
        yield made
    finally:
        await made.close()


def stored(sessions: FakeSessions, *cursors: str) -> None:
    """What the session's records are behind any cursor."""

    async def records(caller: Any, session_id: str, after: str | None, limit: int) -> dict[str, Any]:
        later = [{"cursor": cursor} for cursor in cursors if after is None or cursor > after]
        return {"items": later[:limit], "next_cursor": None}

    sessions.records = records  # type: ignore[method-assign]


class Following:
    """A follower at one replica: a task collects its lines."""

    def __init__(self, two: Neighbours, by: str = "a", query: str = "follow=1", **headers: str) -> None:
        self.body = b""
        self.changed = asyncio.Event()
        self._task = asyncio.create_task(self._collect(two.clients[by], f"{EVENTS}?{query}", headers))

    async def _collect(self, http: aiohttp.ClientSession, path: str, headers: dict[str, str]) -> None:
        async with http.get(path, headers=headers) as answer:
            assert answer.status == 200
            async for data in answer.content.iter_any():
                self.body += data
                self.changed.set()

    @property
    def cursors(self) -> list[str]:
        lines = [orjson.loads(part) for part in self.body.split(b"\n") if part]
        return [item["cursor"] for item in lines if "cursor" in item]

    async def until(self, wanted: bytes) -> None:
        async with asyncio.timeout(5):
            while wanted not in self.body:
                assert not self._task.done(), self.body
                self.changed.clear()
                await self.changed.wait()

    async def ended(self) -> None:
        async with asyncio.timeout(5):
            await self._task

    async def leave(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})


async def opened(sessions: FakeSessions, before: FakeReader | None = None) -> FakeReader:
    async with asyncio.timeout(5):
        while getattr(sessions, "reader", None) in (None, before):
            await asyncio.sleep(0.002)
    reader: FakeReader = sessions.reader
    return reader


def silent(sessions: FakeSessions) -> None:
    sessions.follow_reader = FakeReader


async def test_a_follower_at_another_replica_reads_live(two: Neighbours) -> None:
    two.book.holder = "b"
    silent(two.sessions["b"])
    at = Following(two, query="follow=1&after=1.1")
    reader = await opened(two.sessions["b"])
    assert two.sessions["b"].calls[0] == ("follow", "default", "s1", ("1.1", True))
    reader.feed(text(2))
    await at.until(b"part 2")
    reader.feed(text(3) + text(4), text(5)).end()
    await at.ended()
    assert at.cursors == ["1.2", "1.3", "1.4", "1.5"]
    assert two.sessions["a"].calls == []


async def test_it_has_pings_of_its_own_in_silence(two: Neighbours) -> None:
    two.book.holder = "b"
    silent(two.sessions["b"])
    at = Following(two)
    await at.until(b'{"kind":"ping"}\n{"kind":"ping"}\n')
    await at.leave()


@pytest.mark.parametrize("end", ["stop", "moves"])
async def test_it_goes_on_at_the_next_owner(two: Neighbours, end: str) -> None:
    """Case H10: the owner ends, or only loses the session; the client's stream goes on and nothing comes twice."""
    two.book.holder = "b"
    for name in ("b", "c"):
        silent(two.sessions[name])
    at = Following(two)
    (await opened(two.sessions["b"])).feed(text(1), text(2))
    await at.until(b"part 2")
    two.book.holder = "c"
    if end == "stop":
        await two.stop("b")
    reader = await opened(two.sessions["c"])
    assert two.sessions["c"].calls[0][3] == ("1.2", True)
    reader.feed(text(3)).end()
    await at.ended()
    assert at.cursors == ["1.1", "1.2", "1.3"]
    assert b"resync" not in at.body
    async with asyncio.timeout(5):
        await two.sessions["b"].reader.closed.wait()


async def test_it_waits_while_the_owner_is_not_reached_and_not_proven_gone(two: Neighbours) -> None:
    two.book.holder = "b"
    for name in ("a", "b"):
        silent(two.sessions[name])
    at = Following(two)
    (await opened(two.sessions["b"])).feed(text(1))
    await at.until(b"part 1")
    await two.stop("b")
    before = two.book.looks
    async with asyncio.timeout(5):
        while two.book.looks < before + 3:
            await asyncio.sleep(0.002)
    two.book.dead.add("b")
    reader = await opened(two.sessions["a"])
    assert two.sessions["a"].calls[0][3] == ("1.1", True)
    reader.feed(text(2)).end()
    await at.ended()
    assert at.cursors == ["1.1", "1.2"]


async def test_a_session_that_nobody_holds_is_read_from_the_store_until_somebody_takes_it(two: Neighbours) -> None:
    for name in ("a", "b"):
        silent(two.sessions[name])
    at = Following(two)
    mine = await opened(two.sessions["a"])
    mine.feed(text(1))
    await at.until(b"part 1")
    two.book.holder = "b"
    (await opened(two.sessions["b"])).feed(text(2))
    await at.until(b"part 2")
    assert mine.closed.is_set()
    two.book.holder = None
    reader = await opened(two.sessions["a"], mine)
    assert two.sessions["a"].calls[-1][3] == ("1.2", True)
    reader.feed(text(3)).end()
    await at.ended()
    assert at.cursors == ["1.1", "1.2", "1.3"]


async def test_what_came_and_went_between_two_looks_is_read_all_the_same(two: Neighbours) -> None:
    silent(two.sessions["a"])
    at = Following(two)
    mine = await opened(two.sessions["a"])
    mine.feed(text(1))
    await at.until(b"part 1")
    stored(two.sessions["a"], "1.1", "1.2")
    reader = await opened(two.sessions["a"], mine)
    assert mine.closed.is_set()
    reader.feed(text(2)).end()
    await at.ended()
    assert at.cursors == ["1.1", "1.2"]


async def test_what_is_not_kept_here_any_more_is_read_from_the_store(two: Neighbours) -> None:
    """The live log was dropped, as when another replica had the session meanwhile."""
    silent(two.sessions["a"])
    at = Following(two)
    mine = await opened(two.sessions["a"])
    mine.feed(text(1)).cut("gone")
    reader = await opened(two.sessions["a"], mine)
    assert two.sessions["a"].calls[-1][3] == ("1.1", True)
    reader.feed(text(2)).end()
    await at.ended()
    assert at.cursors == ["1.1", "1.2"]
    assert b"resync" not in at.body


async def test_half_a_line_of_a_cut_stream_is_not_shown(two: Neighbours) -> None:
    """Case H5: the half is thrown away with its connection, and the whole line comes from the next owner."""

    async def cuts(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answered(reader, writer)
        writer.write(CHUNKED + chunk(text(1) + text(2)[:20]))
        await writer.drain()
        await gone.wait()

    gone = asyncio.Event()
    await two.odd("x", cuts)
    silent(two.sessions["c"])
    at = Following(two)
    await at.until(b"part 1")
    two.book.holder = "c"
    gone.set()
    (await opened(two.sessions["c"])).feed(text(2)).end()
    await at.ended()
    assert at.cursors == ["1.1", "1.2"]


async def test_a_line_in_many_pieces_is_put_together(two: Neighbours) -> None:
    async def pieces(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answered(reader, writer)
        writer.write(CHUNKED)
        for byte in text(1) + b'{"kind":"ping"}\n' + text(2):
            writer.write(chunk(bytes([byte])))
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    await two.odd("x", pieces)
    at = Following(two)
    await at.ended()
    assert at.cursors == ["1.1", "1.2"]


async def test_server_sent_events_are_the_same_objects(two: Neighbours) -> None:
    two.book.holder = "b"
    two.sessions["b"].follow_reader = lambda: FakeReader().feed(text(1)).end()
    at = Following(two, Accept="text/event-stream", **{"Last-Event-ID": "1.0"})
    await at.ended()
    assert at.body == b"id: 1.1\ndata: " + text(1).rstrip() + b"\n\n"
    assert two.sessions["b"].calls[0][3] == ("1.0", True)


async def test_a_session_that_ends_meanwhile_ends_the_stream(two: Neighbours) -> None:
    two.book.holder = "b"
    silent(two.sessions["b"])
    at = Following(two)
    (await opened(two.sessions["b"])).feed(text(1))
    await at.until(b"part 1")
    two.sessions["c"].error = RunnerError("session_ended", "It has ended.")
    two.book.holder = "c"
    await at.ended()
    assert at.cursors == ["1.1"]


@pytest.mark.parametrize("held", [None, "b"])
async def test_a_session_that_is_not_there_is_refused(two: Neighbours, held: str | None) -> None:
    two.book.holder = held
    error = RunnerError("session_ended", "It has ended.")
    two.sessions["a"].error = two.sessions["b"].error = error
    async with two.clients["a"].get(f"{EVENTS}?follow=1") as answer:
        assert (answer.status, (await answer.json(content_type=None))["code"]) == (410, "session_ended")


async def test_a_follower_that_was_forwarded_is_broken_off_when_the_session_moves(two: Neighbours) -> None:
    silent(two.sessions["a"])
    two.book.holder = "a"
    async with two.clients["a"].get(f"{EVENTS}?follow=1", headers={upstream.FORWARDED: "x"}) as answer:
        (await opened(two.sessions["a"])).feed(text(1))
        assert await answer.content.readline() == text(1)
        two.book.holder = "b"
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    assert two.sessions["b"].calls == []


async def test_a_client_that_leaves_detaches_at_the_owner(two: Neighbours) -> None:
    two.book.holder = "b"
    silent(two.sessions["b"])
    at = Following(two)
    reader = await opened(two.sessions["b"])
    await at.leave()
    async with asyncio.timeout(5):
        await reader.closed.wait()


async def test_an_owner_that_is_provably_gone_is_nobody(two: Neighbours) -> None:
    two.nowhere("x")
    two.book.dead.add("x")
    two.sessions["a"].follow_reader = lambda: FakeReader().feed(text(1)).end()
    at = Following(two)
    await at.ended()
    assert at.cursors == ["1.1"]


class FakeMirrors:
    """A live bus by hand."""

    def __init__(self) -> None:
        self.up = True
        self.reader: FakeReader | None = None
        self.asked: list[str | None] = []

    def serves(self, owner: str) -> bool:
        return self.up

    async def follow(self, key: tuple[str, str], owner: str, after: str | None) -> FakeReader | None:
        assert (key, owner) == (("default", "s1"), "b")
        self.asked.append(after)
        return self.reader


async def test_it_changes_between_the_bus_and_http(two: Neighbours) -> None:
    """Cases H5 and H10: over the bus; over HTTP while that is away; back, each time behind its last cursor."""
    mirrors = FakeMirrors()
    stored(await two.add("d", mirrors=mirrors))
    two.book.holder = "b"
    silent(two.sessions["b"])
    mirrors.reader = over_bus = FakeReader().feed(text(1))
    at = Following(two, by="d")
    await at.until(b"part 1")
    assert two.sessions["b"].calls == []
    mirrors.up, mirrors.reader = False, None
    over_bus.cut("the bus is away")
    over_http = await opened(two.sessions["b"])
    over_http.feed(text(2))
    await at.until(b"part 2")
    mirrors.up, mirrors.reader = True, FakeReader().feed(text(3)).end()
    await at.until(b"part 3")
    await at.ended()
    assert at.cursors == ["1.1", "1.2", "1.3"]
    assert mirrors.asked == [None, "1.2"]
    async with asyncio.timeout(5):
        await over_http.closed.wait()


async def test_it_waits_a_moment_for_an_owner_that_the_plane_forgot(
    two: Neighbours, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case M8: while its turn has no ending; then the store alone tells what there is."""
    monkeypatch.setattr(relay, "FORGOTTEN_SECONDS", 1.0)
    two.book.holder = "b"
    for name in ("a", "b"):
        silent(two.sessions[name])
    at = Following(two)
    reader = await opened(two.sessions["b"])
    reader.feed(text(1))
    await at.until(b"part 1")
    two.book.unsettled, two.book.holder, looks = True, None, two.book.looks
    async with asyncio.timeout(5):
        while two.book.looks < looks + 3:
            await asyncio.sleep(0.002)
    reader.feed(text(2))
    await at.until(b"part 2")
    assert two.sessions["a"].calls == []
    (await opened(two.sessions["a"])).feed(text(3)).end()
    await at.ended()
    assert at.cursors == ["1.1", "1.2", "1.3"]


async def test_the_bus_is_tried_where_http_fails(two: Neighbours) -> None:
    mirrors = FakeMirrors()
    stored(await two.add("d", mirrors=mirrors))
    two.nowhere("b")
    mirrors.up, mirrors.reader = False, FakeReader().feed(text(1)).end()
    at = Following(two, by="d")
    await at.ended()
    assert at.cursors == ["1.1"]


async def test_followers_of_one_session_share_a_look_for_its_owner() -> None:
    book = Book()
    book.holder = "b"
    made = relay.Relay(FakeOwners(book, "a"), cast(Any, None), FakeSessions())
    for _ in range(20):
        owner = await made.holder(("default", "s1"), 3600)
        assert owner is not None
        assert owner.replica_id == "b"
    assert book.looks == 1
    book.holder = None
    assert await made.holder(("default", "s1")) is None
    assert await made.holder(("default", "s1"), 3600) is None
    assert book.looks == 2
