from __future__ import annotations

from typing import Any

import orjson
import pytest
from aiohttp import ClientPayloadError, ClientSession

from runner.client import ApiError, Client
from runner.errors import RunnerError
from runner.session.port import Reply
from runner.wire.models import ForkRequest
from tests.server.double import EXPORTED, FakeReader, FakeSessions, auth

S1 = "/v1/sessions/s1"
FORK = f"{S1}/fork"


async def test_an_export_is_json_lines_whatever_is_accepted(http: ClientSession) -> None:
    async with http.get(f"{S1}/export", headers={"Accept": "text/event-stream"}) as answer:
        assert (answer.status, answer.content_type) == (200, "application/x-ndjson")
        assert await answer.read() == b"".join(EXPORTED)


async def test_silence_of_a_slow_store_is_pings(http: ClientSession, sessions: FakeSessions) -> None:
    reader = FakeReader()
    sessions.export_reader = lambda: reader
    async with http.get(f"{S1}/export") as answer:
        assert await answer.content.readline() == b'{"kind":"ping"}\n'
        reader.feed(EXPORTED[1]).end()
        assert (await answer.read()).endswith(EXPORTED[1])


async def test_an_export_that_fails_on_its_way_is_cut(http: ClientSession, sessions: FakeSessions, url: str) -> None:
    broken = RunnerError("store_unavailable", "The store cannot be used.")
    sessions.export_reader = lambda: FakeReader().feed(EXPORTED[0], broken)
    with pytest.raises(ClientPayloadError):
        async with http.get(f"{S1}/export") as answer:
            await answer.read()
    async with Client(url, "all") as client:
        with pytest.raises(ApiError) as caught:
            assert [line async for line in client.export("s1")] == []
    assert caught.value.code == "stream_broken"


async def test_an_export_that_cannot_begin_has_its_status(http: ClientSession, sessions: FakeSessions) -> None:
    sessions.error = RunnerError("store_unavailable", "The store cannot be used.", retry_after=1)
    async with http.get(f"{S1}/export") as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
    sessions.error = None
    async with http.get("/v1/sessions/nobody/export") as answer:
        assert answer.status == 404
    async with http.get(f"{S1}/export?limit=3") as answer:
        assert orjson.loads(await answer.read())["field"] == "limit"


async def test_a_fork_is_created_and_located(http: ClientSession, sessions: FakeSessions) -> None:
    async with http.post(FORK, json={"after": "3.17"}) as answer:
        assert (answer.status, answer.headers["Location"]) == (201, "/v1/sessions/s2")
        assert orjson.loads(await answer.read())["forked_from"] == "s1"
    assert sessions.calls == [("fork", "default", "s1", ForkRequest(after="3.17"))]
    sessions.replies["fork"] = Reply(200, {"session_id": "mine"})
    async with http.post(FORK, json={"after": "3.17", "session_id": "mine"}) as answer:
        assert (answer.status, answer.headers["Location"]) == (200, "/v1/sessions/mine")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "after"),
        ({"after": None}, "after"),
        ({"after": "3"}, "after"),
        ({"after": "03.1"}, "after"),
        ({"after": "1.1\n"}, "after"),
        ({"after": 3.17}, "after"),
        ({"after": "1.1", "session_id": "a b"}, "session_id"),
        ({"after": "1.1", "allow_incomplete": "yes"}, "allow_incomplete"),
        ({"after": "1.1", "harness": "demo"}, "harness"),
    ],
)
async def test_a_bad_fork_is_refused_by_name(
    http: ClientSession, sessions: FakeSessions, body: dict[str, Any], field: str
) -> None:
    async with http.post(FORK, json=body) as answer:
        problem = orjson.loads(await answer.read())
        assert (answer.status, problem["code"], problem["field"]) == (400, "invalid_request", field)
    assert sessions.calls == []


@pytest.mark.parametrize(("token", "export", "fork"), [("reader", 200, 403), ("sender", 403, 201)])
async def test_scopes(http: ClientSession, token: str, export: int, fork: int) -> None:
    async with http.get(f"{S1}/export", headers=auth(token)) as answer:
        assert answer.status == export
    async with http.post(FORK, json={"after": "1.1"}, headers=auth(token)) as answer:
        assert answer.status == fork
