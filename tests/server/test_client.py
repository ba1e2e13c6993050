"""The Python client against the server with the double."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import orjson
import pytest

from runner.client import ApiError, Client, LineParser
from runner.errors import RunnerError
from runner.session.port import Reply
from tests.server.double import FakeHandle, FakeReader, FakeSessions, line, question, result, view


@pytest.fixture
async def api(url: str) -> Any:
    async with Client(url, "all") as client:
        yield client


async def test_dispatch_yields_lines_without_pings(api: Client, sessions: FakeSessions) -> None:
    handle = FakeHandle()
    handle.plan = lambda reader: reader.feed(line(1, "plan", {}))
    sessions.next_handle = lambda: handle
    seen = []
    async for item in api.dispatch("s1", "hi", prompt_id="p"):
        seen.append(item)
        if len(seen) == 1:
            await asyncio.sleep(0.12)  # two pings
            handle.readers[0].feed(line(2, "done", {})).end()
            handle.resolve(result())
    assert [item["kind"] for item in seen] == ["event", "event", "result"]


async def test_prompt_returns_the_result_of_a_refusal_too(api: Client, sessions: FakeSessions) -> None:
    assert await api.prompt("s1", "hi") == result()
    sessions.refuse()
    assert (await api.prompt("s1", "hi"))["error"]["code"] == "session_turn_in_use"


async def test_an_error_has_its_code_and_status(api: Client, sessions: FakeSessions) -> None:
    sessions.error = RunnerError("plane_unavailable", "Away.")
    with pytest.raises(ApiError) as caught:
        await api.prompt("s1", "hi")
    assert (caught.value.code, caught.value.status, caught.value.message) == ("plane_unavailable", 503, "Away.")
    assert caught.value.retryable
    with pytest.raises(ApiError):
        await api.session("s1")


async def test_leaving_the_generator_detaches(api: Client, sessions: FakeSessions) -> None:
    handle = FakeHandle()
    handle.plan = lambda reader: reader.feed(line(1, "plan", {}))
    sessions.next_handle = lambda: handle
    lines = api.dispatch("s1", "hi")
    await anext(lines)
    await lines.aclose()
    await asyncio.wait_for(handle.readers[0].closed.wait(), 5)


async def test_half_a_stream_is_an_error(api: Client, sessions: FakeSessions) -> None:
    handle = FakeHandle()
    handle.plan = lambda reader: reader.feed(line(1, "plan", {}), RuntimeError("boom"))
    sessions.next_handle = lambda: handle
    with pytest.raises(ApiError) as caught:
        await api.prompt("s1", "hi")
    assert caught.value.code == "stream_broken"


async def test_every_other_call(api: Client, sessions: FakeSessions) -> None:
    assert (await api.submit("s1", "hi"))["state"] == "active"
    sessions.replies["cancel"] = Reply(202, {"state": "stopping"})
    assert await api.cancel("s1", expected_execution_id="t", wait_seconds=1) == {"state": "stopping"}
    assert (await api.kill("s1"))["command_id"] == "c1"
    assert (await api.delete("s1"))["state"] == "ended"
    assert (await api.sessions(limit=3))["items"] == [view("s1")]
    assert await api.session("s1") == view("s1")
    assert (await api.records("s1", after="1.1", limit=2))["items"][0]["record_id"] == "rec_1"
    assert [item["kind"] async for item in api.export("s1")] == ["session", "record", "end"]
    made = await api.fork("s1", "1.2", session_id="mine", allow_incomplete=True)
    assert (made["session_id"], made["forked_from"], made["after"]) == ("mine", "s1", "1.2")
    sessions.questions = [question()]
    assert (await api.interactions(status="pending"))["items"] == [question()]
    assert (await api.interactions("s1"))["items"] == [question()]
    assert (await api.answer("s1", "i1", decision="allow"))["status"] == "consumed"
    assert (await api.pool())["max_seats"] == 64
    assert (await api.health())["replica_id"] == "rep_1"
    sessions.is_ready = False
    assert (await api.ready())["ready"] is False
    assert (await api.openapi())["openapi"] == "3.1.0"
    sessions.follow_reader = lambda: FakeReader().feed(line(4, "plan", {})).end()
    assert [item["cursor"] async for item in api.events("s1", after="1.3", follow=True)] == ["1.4"]
    assert sessions.calls[-1][3] == ("1.3", True)


async def test_ids_are_quoted(api: Client) -> None:
    with pytest.raises(ApiError) as caught:
        await api.session("../pool")
    assert caught.value.problem["field"] == "session_id"


async def test_without_a_server(unused_tcp_port: int) -> None:
    async with Client(f"http://127.0.0.1:{unused_tcp_port}", "all") as client:
        with pytest.raises(ApiError) as caught:
            await client.health()
    assert caught.value.code == "unreachable"
    assert str(caught.value) == f"No answer from http://127.0.0.1:{unused_tcp_port}: Connection refused."
    assert caught.value.retryable


async def test_a_proxy_is_ignored_on_loopback(url: str, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "http_proxy", f"http://127.0.0.1:{unused_tcp_port}")
    async with Client(url, "all") as client:
        assert (await client.health())["status"] == "ok"


async def test_an_answer_that_is_not_ours(unused_tcp_port: int) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 6\r\n\r\n<html>")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", unused_tcp_port)
    async with server, Client(f"http://127.0.0.1:{unused_tcp_port}", "all") as client:
        with pytest.raises(ApiError) as caught:
            await client.session("s1")
    assert (caught.value.code, caught.value.status) == ("unexpected_answer", 502)


def test_the_parser_cuts_anywhere_case_h5() -> None:
    """Case H5: half a line stays with its own parser, that is, with its connection."""
    body = line(1, "message_delta", {"text": "é" * 10}) + line(2, "plan", {}) + b'{"kind":"result","result":{}}\n'
    whole = [orjson.loads(part) for part in body.splitlines()]
    for size in (1, 2, 7, 50, len(body)):
        parser = LineParser()
        got = [item for start in range(0, len(body), size) for item in parser.feed(body[start : start + size])]
        assert got == whole
        assert not parser.unfinished
    cut = LineParser()
    cut.feed(body[:100])
    assert cut.unfinished
    assert LineParser().feed(body) == whole


def test_the_parser_bounds_a_line_and_refuses_noise() -> None:
    parser = LineParser(max_line_bytes=10)
    with pytest.raises(ApiError, match="more than 10 bytes"):
        parser.feed(b"x" * 11)
    for noise in (b"hello\n", b"[1]\n"):
        with pytest.raises(ApiError, match="no JSON object"):
            LineParser().feed(noise)
