"""``GET /v1/events`` as HTTP: forms, cursors, scopes, pings, and a reader that is given up."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import ClientPayloadError, ClientSession

from runner.client import Client
from runner.wire.codec import feed_line, ping_line
from tests.server.double import FakeReader, FakeSessions, auth

AT = "2026-11-29T16:09:53.123Z"
BUSY = feed_line("0-7", "s1", "3.1", "t1", AT, "session_busy", b"{}")
ENDED = feed_line("0-8", "s2", "1.9", None, AT, "session_ended", b"{}")


async def test_lines(http: ClientSession, sessions: FakeSessions) -> None:
    sessions.follow_reader = lambda: FakeReader().feed(ping_line("0-6"), BUSY + ENDED).end()
    async with http.get("/v1/events") as answer:
        assert answer.headers["Content-Type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in (await answer.read()).splitlines()]
    assert sessions.calls == [("feed", "default", None, (None, False))]
    assert lines[0] == {"kind": "ping", "cursor": "0-6"}
    assert lines[1] == {
        "kind": "event",
        "cursor": "0-7",
        "session_id": "s1",
        "session_cursor": "3.1",
        "turn_id": "t1",
        "at": AT,
        "type": "session_busy",
        "data": {},
    }
    assert lines[2]["turn_id"] is None
    await asyncio.wait_for(sessions.reader.closed.wait(), 5)


async def test_server_sent_events_carry_the_cursor_before_the_first_event(
    http: ClientSession, sessions: FakeSessions
) -> None:
    sessions.follow_reader = lambda: FakeReader().feed(ping_line("0-6"), BUSY).end()
    async with http.get("/v1/events?follow=1&after=0-3", headers={"Accept": "text/event-stream"}) as answer:
        body = await answer.read()
    assert body.startswith(b": ping\nid: 0-6\n\nid: 0-7\ndata: {")
    assert sessions.calls == [("feed", "default", None, ("0-3", True))]


async def test_a_browser_that_reconnects_goes_on_behind_its_last_event(
    http: ClientSession, sessions: FakeSessions
) -> None:
    async with http.get("/v1/events?follow=1&after=0-3", headers={"Last-Event-ID": "0-9"}) as answer:
        assert answer.status == 200
    assert sessions.calls == [("feed", "default", None, ("0-9", True))]


async def test_silence_is_filled_case_h7(http: ClientSession, sessions: FakeSessions) -> None:
    sessions.follow_reader = FakeReader
    async with http.get("/v1/events?follow=1") as answer:
        assert await answer.content.readline() == b'{"kind":"ping"}\n'
    await asyncio.wait_for(sessions.reader.closed.wait(), 5)


async def test_a_reader_that_is_given_up_hears_why(http: ClientSession, sessions: FakeSessions) -> None:
    sessions.follow_reader = lambda: FakeReader().feed(BUSY).cut("you are slow")
    async with http.get("/v1/events?follow=1") as answer:
        assert await answer.content.readline() == BUSY
        last = json.loads(await answer.content.readline())
        with pytest.raises(ClientPayloadError):
            await answer.content.read()
    assert (last["type"], last["data"]) == ("resync", {"from": "0-7", "reason": "you are slow"})


@pytest.mark.parametrize("query", ["follow=2", "limit=3", "after=0-1&after=0-2"])
async def test_what_it_does_not_know_is_refused(http: ClientSession, query: str, sessions: FakeSessions) -> None:
    async with http.get(f"/v1/events?{query}") as answer:
        assert answer.status == 400
    assert sessions.calls == []


@pytest.mark.parametrize("cursor", ["3.17", "x", "-", "0-1-2"])
async def test_a_header_that_is_no_cursor_is_refused_by_its_name(
    http: ClientSession, cursor: str, sessions: FakeSessions
) -> None:
    async with http.get("/v1/events", headers={"Last-Event-ID": cursor}) as answer:
        problem = await answer.json(content_type=None)
    assert (answer.status, problem["code"]) == (400, "invalid_request")
    assert problem["detail"].startswith("Last-Event-ID: ")
    assert sessions.calls == []


async def test_scopes(url: str) -> None:
    async with ClientSession(url) as http:
        for token, status in (("reader", 200), ("sender", 403), ("operator", 403), ("nobody", 401)):
            async with http.get("/v1/events", headers=auth(token)) as answer:
                assert answer.status == status, token


async def test_the_client(url: str, sessions: FakeSessions) -> None:
    sessions.follow_reader = lambda: FakeReader().feed(ping_line("0-6"), BUSY).end()
    async with Client(url, "all") as client:
        lines = [line async for line in client.feed(after="0-3", follow=True)]
    assert [(line["kind"], line["cursor"]) for line in lines] == [("ping", "0-6"), ("event", "0-7")]
    assert sessions.calls == [("feed", "default", None, ("0-3", True))]
