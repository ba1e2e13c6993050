from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from aiohttp import ClientSession

from runner.session.port import Reply
from tests.server.double import FakeReader, FakeSessions, line, question, view

S1 = "/v1/sessions/s1"


async def get(http: ClientSession, path: str, **headers: str) -> tuple[int, Any]:
    async with http.get(path, headers=headers) as answer:
        return answer.status, orjson.loads(await answer.read())


async def test_list_and_view(http: ClientSession, sessions: FakeSessions) -> None:
    assert await get(http, "/v1/sessions?limit=5&cursor=abc") == (200, {"items": [view("s1")], "next_cursor": None})
    assert sessions.calls == [("sessions", "default", None, (5, "abc"))]
    assert await get(http, S1) == (200, view("s1"))
    status, problem = await get(http, "/v1/sessions/nobody")
    assert (status, problem["code"]) == (404, "not_found")


async def test_records(http: ClientSession, sessions: FakeSessions) -> None:
    status, page = await get(http, f"{S1}/records?after=1.2&limit=1000")
    assert (status, page["items"][0]["record_id"]) == (200, "rec_1")
    await get(http, f"{S1}/records")
    assert [call[3] for call in sessions.calls] == [("1.2", 1000), (None, 200)]


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/sessions?limit=0", "limit"),
        ("/v1/sessions?limit=1001", "limit"),
        ("/v1/sessions?limit=ten", "limit"),
        ("/v1/sessions?limit=1&limit=2", "limit"),
        ("/v1/sessions?cursor=", "cursor"),
        ("/v1/sessions?page=2", "page"),
        (f"{S1}?x=1", "x"),
        (f"{S1}/records?after=latest", "after"),
        (f"{S1}/records?limit=-1", "limit"),
        (f"{S1}/events?after=01.2", "after"),
        (f"{S1}/events?follow=maybe", "follow"),
        (f"{S1}/interactions?status=open", "status"),
        ("/v1/interactions?status=open", "status"),
        ("/v1/sessions/a%20b", "session_id"),
        ("/v1/sessions/..%2f..%2fetc", "session_id"),
        ("/v1/sessions/" + "x" * 129, "session_id"),
    ],
)
async def test_bad_parameters_are_named(http: ClientSession, sessions: FakeSessions, path: str, field: str) -> None:
    status, problem = await get(http, path)
    assert (status, problem["code"], problem["field"]) == (400, "invalid_request", field)
    assert sessions.calls == []


async def test_a_bad_last_event_id_is_named(http: ClientSession) -> None:
    status, problem = await get(http, f"{S1}/events", **{"Last-Event-ID": "x"})
    assert (status, problem["field"]) == (400, "Last-Event-ID")


async def test_commands_answer_what_the_sessions_say(http: ClientSession, sessions: FakeSessions) -> None:
    stopping: dict[str, Any] = {
        "command_id": "c",
        "state": "stopping",
        "turn_id": "t",
        "cancelled_prompts": [],
        "outcome": None,
    }
    sessions.replies["cancel"] = Reply(202, stopping)
    async with http.post(f"{S1}/cancel", json={"expected_execution_id": "t", "wait_seconds": 1}) as answer:
        assert (answer.status, await answer.json()) == (202, stopping)
    assert sessions.calls[0][3].expected_execution_id == "t"
    for method, path in (("POST", f"{S1}/kill"), ("DELETE", S1)):
        async with http.request(method, path) as answer:
            assert answer.status == 200
        async with http.request(method, path, json={}) as answer:
            assert answer.status == 200
        async with http.request(method, path, json={"really": True}) as answer:
            assert answer.status == 400
    assert [call[0] for call in sessions.calls] == ["cancel", "kill", "kill", "delete", "delete"]


async def test_a_refused_command_is_no_failed_task(http: ClientSession, caplog: pytest.LogCaptureFixture) -> None:
    async with http.post("/v1/sessions/nobody/cancel") as answer:
        assert answer.status == 404
    assert caplog.records == []


async def test_questions_and_answers(http: ClientSession, sessions: FakeSessions) -> None:
    sessions.questions = [question()]
    assert (await get(http, "/v1/interactions?status=pending"))[1]["items"] == [question()]
    assert (await get(http, f"{S1}/interactions"))[1]["items"] == [question()]
    assert [call[2:] for call in sessions.calls] == [(None, "pending"), ("s1", None)]
    sessions.replies["answer"] = Reply(202, question(status="answered"))
    async with http.post(f"{S1}/interactions/i1/answer", json={"decision": "allow"}) as answer:
        assert (answer.status, (await answer.json())["status"]) == (202, "answered")
    filled = {"action": "accept", "content": {"name": "x", "times": 2}}
    async with http.post(f"{S1}/interactions/i1/answer", json=filled) as answer:
        assert answer.status == 202
    request = sessions.calls[-1][3][1]
    assert (request.action, request.content, request.decision) == ("accept", filled["content"], None)
    for body in ({}, {"action": "decline", "content": {}}, {"action": "accept", "decision": "allow"}):
        async with http.post(f"{S1}/interactions/i1/answer", json=body) as answer:
            assert answer.status == 400
    async with http.post(f"{S1}/interactions/i2/answer", json={"decision": "allow"}) as answer:
        assert answer.status == 404


async def test_history_ends(http: ClientSession, sessions: FakeSessions) -> None:
    sessions.follow_reader = lambda: FakeReader().feed(line(1, "plan", {}) + line(2, "done", {})).end()
    async with http.get(f"{S1}/events?after=1.0") as answer:
        assert answer.headers["Content-Type"] == "application/x-ndjson"
        assert (await answer.read()) == line(1, "plan", {}) + line(2, "done", {})
    assert sessions.calls[0][3] == ("1.0", False)
    assert sessions.reader.closed.is_set()


async def test_following_starts_at_once_and_pings(http: ClientSession, sessions: FakeSessions) -> None:
    sessions.follow_reader = FakeReader
    async with http.get(f"{S1}/events?follow=1", headers={"Accept": "text/event-stream"}) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        assert await answer.content.readline() == b": ping\n"
        sessions.reader.feed(line(7, "plan", {}))
        while (got := await answer.content.readline()) in (b": ping\n", b"\n"):
            pass
        assert got == b"id: 1.7\n"
        sessions.reader.end()
        await answer.read()
    assert sessions.calls[0][3] == (None, True)
    assert sessions.reader.closed.is_set()


async def test_the_head_of_a_follower_does_not_wait_for_an_event(url: str, sessions: FakeSessions) -> None:
    sessions.follow_reader = FakeReader
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(f"GET {S1}/events?follow=1 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer all\r\n\r\n".encode())
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    assert head.startswith(b"HTTP/1.1 200")
    writer.close()
    await asyncio.wait_for(sessions.reader.closed.wait(), 5)


async def test_a_reconnecting_browser_goes_on_where_it_was(http: ClientSession, sessions: FakeSessions) -> None:
    async with http.get(f"{S1}/events?after=1.1", headers={"Last-Event-ID": "1.9"}) as answer:
        assert answer.status == 200
    assert sessions.calls[0][3] == ("1.9", False)


async def test_an_unknown_session_is_not_a_stream(http: ClientSession) -> None:
    status, problem = await get(http, "/v1/sessions/nobody/events?follow=1")
    assert (status, problem["code"]) == (404, "not_found")


async def test_the_story_of_a_session(http: ClientSession, sessions: FakeSessions) -> None:
    status, story = await get(http, f"{S1}/story")
    assert (status, [item["event"] for item in story["items"]]) == (200, [{"name": "Begin"}])
    assert sessions.calls == [("story", "default", "s1", None)]
    assert (await get(http, "/v1/sessions/nobody/story"))[0] == 404


async def test_the_pool(http: ClientSession) -> None:
    assert await get(http, "/v1/pool") == (200, {"seats": [], "spares": [], "max_seats": 64})


async def test_the_quarantine(http: ClientSession, sessions: FakeSessions) -> None:
    status, page = await get(http, "/v1/quarantine?limit=5&cursor=3")
    assert (status, page["items"][0]["reason"], page["next_cursor"]) == (200, "turn_ended", "7")
    assert sessions.calls == [("quarantine", "default", None, (5, "3"))]


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/sessions/s1/spoon", "/v2/sessions", "/v1/sessions/s1/turns/"])
async def test_an_unknown_route_is_a_problem(http: ClientSession, path: str) -> None:
    async with http.post(path) as answer:
        assert (answer.status, answer.headers["Content-Type"]) == (404, "application/problem+json")
        assert (await answer.json(content_type=None))["code"] == "not_found"


async def test_a_wrong_method_names_the_right_ones(http: ClientSession) -> None:
    async with http.put(S1) as answer:
        assert (answer.status, answer.headers["Allow"]) == (405, "DELETE, GET")
        assert (await answer.json(content_type=None))["code"] == "invalid_request"


async def test_no_answer_names_the_library(http: ClientSession) -> None:
    for path in ("/health", "/nowhere", S1):
        async with http.get(path) as answer:
            assert answer.headers["Server"] == "acp-runner"
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["Cache-Control"] == "no-store"
