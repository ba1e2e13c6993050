"""The dispatch route: forms of the answer, refusal, pings, slow and vanished clients."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import ClientSession, web

from runner.config import Settings
from runner.errors import TURN_IN_USE_SENTENCE, RunnerError
from runner.server import streams
from runner.server.app import build_app
from tests.server.double import TOKENS, FakeHandle, FakeSessions, auth, finished_handle, line, result

TURNS = "/v1/sessions/s1/turns"
PROMPT = {"prompt": "hi"}
JSON = {"Accept": "application/json"}
SSE = {"Accept": "text/event-stream"}


def lines_of(body: bytes) -> list[dict[str, Any]]:
    assert body.endswith(b"\n")
    return [orjson.loads(part) for part in body.splitlines()]


async def test_ndjson_is_the_default(http: ClientSession, sessions: FakeSessions) -> None:
    async with http.post(TURNS, json=PROMPT) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "application/x-ndjson"
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        lines = lines_of(await answer.read())
    assert [item.get("type", item["kind"]) for item in lines] == ["turn_admitted", "message_delta", "done", "result"]
    assert lines[-1]["result"] == result()
    name, project, session_id, (request, keep) = sessions.calls[0]
    assert (name, project, session_id, request.prompt, keep) == ("dispatch", "default", "s1", "hi", False)
    assert sessions.handles[0].readers[0].closed.is_set()


async def test_server_sent_events(http: ClientSession) -> None:
    async with http.post(TURNS, json=PROMPT, headers=SSE) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        frames = (await answer.text()).split("\n\n")
    assert frames[0].startswith('id: 1.1\ndata: {"kind":"event","cursor":"1.1"')
    assert frames[3].startswith('data: {"kind":"result"')
    assert frames[4] == ""


async def test_json_waits_for_the_result_and_is_a_reader_meanwhile(http: ClientSession, sessions: FakeSessions) -> None:
    handle = FakeHandle()
    sessions.next_handle = lambda: handle
    asking = asyncio.create_task(_json(http, TURNS, PROMPT, JSON))
    while not handle.readers:
        await asyncio.sleep(0)
    reader = handle.readers[0]
    await reader.asked.wait()
    assert not asking.done()
    assert not reader.closed.is_set()
    handle.resolve(result("failed", ok=False))
    reader.end()
    assert await asking == (200, result("failed", ok=False))
    assert reader.closed.is_set()


async def _json(http: ClientSession, path: str, body: Any, headers: dict[str, str]) -> tuple[int, dict[str, Any]]:
    async with http.post(path, json=body, headers=headers) as answer:
        return answer.status, orjson.loads(await answer.read())


async def test_respond_async(http: ClientSession, sessions: FakeSessions) -> None:
    async with http.post(TURNS, json=PROMPT, headers={"Prefer": "wait=5, Respond-Async"}) as answer:
        assert answer.status == 202
        assert answer.headers["Preference-Applied"] == "respond-async"
        assert await answer.json() == {"prompt_id": "p1", "turn_id": "t1", "state": "active"}
    assert sessions.calls[0][3][1] is True
    assert sessions.handles[0].readers == []


async def test_a_refusal_in_a_stream_case_b6(http: ClientSession, sessions: FakeSessions) -> None:
    """Case B6, the refusal: one error event without a cursor, then the failed result."""
    sessions.refuse()
    async with http.post(TURNS, json=PROMPT) as answer:
        assert answer.status == 200
        error, last = lines_of(await answer.read())
    assert "cursor" not in error
    assert error["type"] == "error"
    assert error["data"] == {"code": "session_turn_in_use", "message": TURN_IN_USE_SENTENCE, "retryable": False}
    assert last["result"]["turn_id"] is None
    assert last["result"]["outcome"] == "failed"
    assert sessions.handles[0].readers == []


@pytest.mark.parametrize("headers", [JSON, {"Prefer": "respond-async"}])
async def test_a_refusal_without_a_stream_is_409(
    http: ClientSession, sessions: FakeSessions, headers: dict[str, str]
) -> None:
    sessions.refuse()
    status, problem = await _json(http, TURNS, PROMPT, headers)
    assert status == 409
    assert problem["code"] == "session_turn_in_use"
    assert problem["detail"] == TURN_IN_USE_SENTENCE


@pytest.mark.parametrize("accept", ["application/x-ndjson", "text/event-stream", "application/json"])
@pytest.mark.parametrize(
    ("code", "status"),
    [("session_ended", 410), ("harness_unknown", 422), ("plane_unavailable", 503), ("owned_elsewhere", 409)],
)
async def test_an_error_before_the_first_line_has_its_status(
    http: ClientSession, sessions: FakeSessions, accept: str, code: str, status: int
) -> None:
    sessions.error = RunnerError(code, "Why.", retry_after=3)
    async with http.post(TURNS, json=PROMPT, headers={"Accept": accept}) as answer:
        assert answer.status == status
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert answer.headers["Retry-After"] == "3"
        assert (await answer.json(content_type=None))["detail"] == "Why."


async def test_an_unexpected_error_says_nothing_about_the_inside(http: ClientSession, sessions: FakeSessions) -> None:
    sessions.error = ValueError("the password is swordfish")
    async with http.post(TURNS, json=PROMPT) as answer:
        assert answer.status == 500
        body = await answer.text()
    assert orjson.loads(body)["code"] == "internal"
    assert "swordfish" not in body


async def test_at_capacity_the_body_is_not_read(url: str, sessions: FakeSessions) -> None:
    """429 comes although the body never does."""
    sessions.capacity = False
    reader, writer = await _raw(url)
    writer.write(b"POST %b HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer all\r\n" % TURNS.encode())
    writer.write(b"Content-Length: 1000\r\n\r\n")
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    writer.close()
    assert head.startswith(b"HTTP/1.1 429")
    assert b"Retry-After: 1\r\n" in head
    assert sessions.calls == []


async def test_commands_are_not_behind_the_cap(http: ClientSession, sessions: FakeSessions) -> None:
    sessions.capacity = False
    async with http.post("/v1/sessions/s1/cancel") as answer:
        assert answer.status == 200


async def test_bodies_are_bounded(http: ClientSession, sessions: FakeSessions) -> None:
    async def chunks() -> Any:
        yield b'{"prompt":"'
        yield b"x" * 5000

    packed = {"Content-Encoding": "gzip"}
    for data, headers in (
        (b"x" * 5000, {}),
        (chunks(), {}),
        (gzip.compress(b'{"prompt":"' + b"x" * 100_000), packed),
    ):
        async with http.post(TURNS, data=data, headers=headers) as answer:
            assert answer.status == 413
            assert (await answer.json(content_type=None))["code"] == "too_large"
    assert sessions.calls == []


@pytest.mark.parametrize(
    ("body", "field"),
    [(b"", "body"), (b"nonsense", "body"), (b'{"prompt":"x","on_bsy":1}', "on_bsy"), (b"\xff\xfe", "body")],
)
async def test_a_bad_body_is_a_problem(http: ClientSession, sessions: FakeSessions, body: bytes, field: str) -> None:
    async with http.post(TURNS, data=body) as answer:
        assert answer.status == 400
        problem = await answer.json(content_type=None)
    assert problem["code"] == "invalid_request"
    assert problem["field"] == field
    assert sessions.calls == []


async def test_a_workspace_by_path_needs_operate(http: ClientSession, sessions: FakeSessions) -> None:
    body = {"prompt": "x", "workspace": {"path": "/srv/checkout"}}
    status, problem = await _json(http, TURNS, body, auth("sender"))
    assert (status, problem["code"], problem["field"]) == (403, "forbidden", "workspace.path")
    assert sessions.calls == []
    status, _ = await _json(http, TURNS, body, JSON)
    assert status == 200


async def test_pings_fill_the_silence(http: ClientSession, sessions: FakeSessions) -> None:
    handle = FakeHandle()
    sessions.next_handle = lambda: handle
    for headers, ping in ((SSE, b": ping\n"), ({}, b'{"kind":"ping"}\n')):
        handle = FakeHandle()
        async with http.post(TURNS, json=PROMPT, headers=headers) as answer:
            assert await answer.content.readline() == ping
            handle.resolve(result())
            handle.readers[0].end()
            assert b'"kind":"result"' in await answer.read()


async def test_a_cut_reader_cuts_the_connection_after_its_reason(http: ClientSession, sessions: FakeSessions) -> None:
    handle = FakeHandle()
    handle.plan = lambda reader: reader.feed(line(1, "plan", {})).cut("too far behind")
    sessions.next_handle = lambda: handle
    async with http.post(TURNS, json=PROMPT) as answer:
        await answer.content.readline()
        last = orjson.loads(await answer.content.readline())
        assert last["type"] == "resync"
        assert last["data"] == {"from": "1.1", "reason": "too far behind"}
        with pytest.raises(aiohttp.ClientError):
            await answer.read()
    assert handle.readers[0].closed.is_set()


async def test_a_reader_that_fails_never_looks_like_a_whole_stream(http: ClientSession, sessions: FakeSessions) -> None:
    handle = FakeHandle()
    handle.plan = lambda reader: reader.feed(line(1, "plan", {}), RuntimeError("boom"))
    sessions.next_handle = lambda: handle
    async with http.post(TURNS, json=PROMPT) as answer:
        with pytest.raises(aiohttp.ClientError):
            await answer.read()
    assert handle.readers[0].closed.is_set()


async def test_a_client_that_does_not_read_stalls_nobody(url: str, http: ClientSession, sessions: FakeSessions) -> None:
    """Its handler waits for it; another request is answered meanwhile."""
    slow = FakeHandle()
    block = line(1, "message_delta", {"text": "x" * 200_000})
    slow.plan = lambda reader: reader.feed(*[block] * 200).cut("too far behind")
    sessions.next_handle = lambda: slow
    _, writer = await _raw(url, limit=1)
    writer.write(_dispatch_bytes())
    await _until(lambda: bool(slow.readers))
    sessions.next_handle = finished_handle
    async with http.post(TURNS, json=PROMPT, headers=JSON) as answer:
        assert answer.status == 200
    assert not slow.readers[0].closed.is_set()
    writer.transport.abort()
    await asyncio.wait_for(slow.readers[0].closed.wait(), 5)


async def test_a_client_that_reads_nothing_is_cut_in_the_end(
    url: str, sessions: FakeSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "STALL_SECONDS", 0.05)
    slow = FakeHandle()
    block = line(1, "message_delta", {"text": "x" * 200_000})
    slow.plan = lambda reader: reader.feed(*[block] * 200)
    sessions.next_handle = lambda: slow
    _, writer = await _raw(url, limit=1)
    writer.write(_dispatch_bytes())
    await _until(lambda: bool(slow.readers))
    await asyncio.wait_for(slow.readers[0].closed.wait(), 5)
    assert slow.readers[0].given_up, "it did not leave: the sandbox is kept for it"
    writer.transport.abort()


@pytest.mark.parametrize("cancellation", [True, False])
@pytest.mark.parametrize("accept", ["application/x-ndjson", "application/json"])
async def test_a_disconnect_only_detaches_the_reader_case_h8(
    sessions: FakeSessions, settings: Settings, cancellation: bool, accept: str
) -> None:
    """Case H8, with the cancellation flag on and off: nothing is called and nothing stays."""
    handle = FakeHandle()
    handle.plan = lambda reader: reader.feed(line(1, "plan", {}))
    sessions.next_handle = lambda: handle
    async with _served(sessions, settings, cancellation) as url:
        _, writer = await _raw(url)
        writer.write(_dispatch_bytes(accept))
        await _until(lambda: bool(handle.readers) and handle.readers[0].asked.is_set())
        writer.transport.abort()
        if not cancellation and accept == "application/json":
            handle.resolve(result())
            handle.readers[0].end()
        await asyncio.wait_for(handle.readers[0].closed.wait(), 5)
    assert [call[0] for call in sessions.calls] == ["dispatch"]


async def test_a_disconnect_while_admission_is_pending_case_h8(url: str, sessions: FakeSessions) -> None:
    """Case H8 at the await of the dispatch: the call is cancelled and no reader was ever made."""
    sessions.gate = asyncio.Event()
    _, writer = await _raw(url)
    writer.write(_dispatch_bytes())
    await _until(lambda: bool(sessions.calls))
    assert _handlers() == 1
    writer.transport.abort()
    await _until(lambda: _handlers() == 0)
    sessions.gate.set()
    await asyncio.sleep(0)
    assert sessions.handles == []


async def test_a_command_outlives_its_client_case_h8(url: str, sessions: FakeSessions) -> None:
    """Case H8 at the await of a Stop: it is performed although its client went away."""
    sessions.gate = asyncio.Event()
    _, writer = await _raw(url)
    writer.write(b"POST /v1/sessions/s1/cancel HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer all\r\n\r\n")
    await _until(lambda: bool(sessions.calls))
    assert _handlers() == 1
    writer.transport.abort()
    await _until(lambda: _handlers() == 0)
    assert not sessions.passed.is_set()
    sessions.gate.set()
    await asyncio.wait_for(sessions.passed.wait(), 5)


async def test_closing_the_site_ends_streams(sessions: FakeSessions, settings: Settings) -> None:
    handle = FakeHandle()
    handle.plan = lambda reader: reader.feed(line(1, "plan", {}))
    sessions.next_handle = lambda: handle
    async with ClientSession(headers=auth()) as http:
        async with _served(sessions, settings, True) as url:
            answer = await http.post(url + TURNS, json=PROMPT)
            await answer.content.readline()
            reading = asyncio.ensure_future(answer.content.readline())
        last = orjson.loads(await reading)
        assert last["data"] == {"from": "1.1", "reason": "the server is shutting down"}
        with pytest.raises(aiohttp.ClientError):
            await answer.read()
    assert handle.readers[0].closed.is_set()


def _handlers() -> int:
    return sum("RequestHandler.start" in repr(task.get_coro()) for task in asyncio.all_tasks())


def _dispatch_bytes(accept: str = "application/x-ndjson") -> bytes:
    body = orjson.dumps(PROMPT)
    head = f"POST {TURNS} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer all\r\nAccept: {accept}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def _raw(url: str, limit: int = 2**16) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    port = int(url.rpartition(":")[2])
    return await asyncio.open_connection("127.0.0.1", port, limit=limit)


async def _until(done: Any, seconds: float = 5) -> None:
    async with asyncio.timeout(seconds):
        while not done():
            await asyncio.sleep(0.001)


class _served:  # noqa: N801
    """An app under its own aiohttp runner, with the cancellation flag chosen."""

    def __init__(self, sessions: FakeSessions, settings: Settings, cancellation: bool) -> None:
        app = build_app(sessions, settings, TOKENS)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=cancellation, shutdown_timeout=1)

    async def __aenter__(self) -> str:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
