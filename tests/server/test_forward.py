"""Requests of a session that another replica holds: passed on once, whole, and never twice (DESIGN 3.1.10)."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest

from runner.errors import RunnerError
from runner.server import forward, upstream
from tests.server.double import FakeHandle, line, result, view
from tests.server.neighbours import Neighbours

S1 = "/v1/sessions/s1"
TURNS = f"{S1}/turns"
PROMPT = {"prompt": "hi"}
JSON = {"Accept": "application/json"}


@pytest.fixture
async def two() -> AsyncIterator[Neighbours]:
    made = Neighbours()
    try:
        await made.add("a")
        await made.add("b")
        yield made
    finally:
        await made.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (upstream, forward):
        monkeypatch.setattr(module, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(upstream, "TAKE_SECONDS", 0.15)
    monkeypatch.setattr(upstream, "READ_SECONDS", 0.15)
    monkeypatch.setattr(forward, "STORED_SECONDS", 0.15)


async def ask(two: Neighbours, method: str, path: str, by: str = "a", **more: Any) -> tuple[int, Any, Any]:
    async with two.clients[by].request(method, path, **more) as answer:
        body = await answer.read()
        whole = answer.content_type in ("application/json", "application/problem+json")
        return answer.status, orjson.loads(body) if whole else body, answer.headers


async def test_a_session_that_nobody_holds_is_answered_here(two: Neighbours) -> None:
    assert (await ask(two, "GET", S1))[0] == 200
    assert [call[0] for call in two.sessions["a"].calls] == ["view"]
    assert two.sessions["b"].calls == []


async def test_what_belongs_to_a_session_goes_to_its_owner(two: Neighbours) -> None:
    two.book.holder = "b"
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("GET", S1, {}),
        ("GET", f"{S1}/records?after=1.2&limit=7", {}),
        ("GET", f"{S1}/events?after=1.1", {}),
        ("GET", f"{S1}/export", {}),
        ("GET", f"{S1}/interactions?status=pending", {}),
        ("POST", f"{S1}/interactions/i1/answer", {"json": {"decision": "allow"}}),
        ("POST", TURNS, {"json": PROMPT, "headers": JSON}),
        ("DELETE", S1, {}),
    ]
    for method, path, more in asked:
        assert (await ask(two, method, path, **more))[0] == 200, path
    names = [call[0] for call in two.sessions["b"].calls]
    assert names == ["view", "records", "follow", "export", "interactions", "answer", "dispatch", "delete"]
    assert two.sessions["b"].calls[1][3] == ("1.2", 7)
    assert two.sessions["a"].calls == []


async def test_commands_and_lists_stay(two: Neighbours) -> None:
    two.book.holder = "b"
    for method, path in (
        ("POST", f"{S1}/cancel"),
        ("POST", f"{S1}/kill"),
        ("GET", "/v1/sessions"),
        ("GET", "/v1/interactions"),
        ("GET", "/v1/pool"),
        ("GET", "/health"),
        ("GET", "/ready"),
    ):
        assert (await ask(two, method, path))[0] == 200, path
    assert two.sessions["b"].calls == []


async def test_a_refusal_of_the_owner_comes_through_as_it_is(two: Neighbours) -> None:
    two.book.holder = "b"
    two.sessions["b"].error = RunnerError("runner_at_capacity", "Full.", retry_after=7)
    status, problem, headers = await ask(two, "POST", TURNS, json=PROMPT)
    assert (status, problem["code"], headers["Retry-After"]) == (429, "runner_at_capacity", "7")
    assert headers["Content-Type"] == "application/problem+json"
    assert headers["Cache-Control"] == "no-store"


async def test_a_token_is_checked_here_and_there(two: Neighbours) -> None:
    two.book.holder = "b"
    status, problem, _ = await ask(two, "POST", TURNS, json=PROMPT, headers={"Authorization": "Bearer reader"})
    assert (status, problem["code"]) == (403, "forbidden")
    status, _, _ = await ask(two, "GET", S1, headers={"Authorization": "Bearer reader"})
    assert status == 200
    assert [call[1] for call in two.sessions["b"].calls] == ["default"]


@pytest.mark.parametrize("accept", ["application/x-ndjson", "text/event-stream"])
async def test_a_stream_passes_line_by_line(two: Neighbours, accept: str) -> None:
    two.book.holder = "b"
    handle = FakeHandle()
    two.sessions["b"].next_handle = lambda: handle
    async with two.clients["a"].post(TURNS, json=PROMPT, headers={"Accept": accept}) as answer:
        while not handle.readers:
            await asyncio.sleep(0.001)
        for n in range(1, 4):
            sent = line(n, "message_delta", {"message_id": "m", "text": f"part {n}"})
            handle.readers[0].feed(sent)
            seen = b""
            while f"part {n}".encode() not in seen:
                seen += await answer.content.readany()
        assert answer.headers["Content-Type"] == accept
        assert answer.headers["X-Accel-Buffering"] == "no"
        handle.resolve(result())
        handle.readers[0].end()
        assert b'"kind":"result"' in await answer.read()


async def test_pings_of_a_silent_stream_pass(two: Neighbours) -> None:
    two.book.holder = "b"
    handle = FakeHandle()
    two.sessions["b"].next_handle = lambda: handle
    async with two.clients["a"].post(TURNS, json=PROMPT) as answer:
        assert await answer.content.readline() == b'{"kind":"ping"}\n'


async def test_a_client_that_leaves_detaches_at_the_owner(two: Neighbours) -> None:
    two.book.holder = "b"
    handle = FakeHandle()
    two.sessions["b"].next_handle = lambda: handle
    async with two.clients["a"].post(TURNS, json=PROMPT) as answer:
        await answer.content.readline()
        answer.close()
    async with asyncio.timeout(5):
        await handle.readers[0].closed.wait()


async def test_a_stream_that_the_owner_cuts_is_cut_here(two: Neighbours) -> None:
    two.book.holder = "b"
    handle = FakeHandle()
    two.sessions["b"].next_handle = lambda: handle
    handle.plan = lambda reader: reader.feed(line(1, "turn_admitted", {}), RuntimeError("a fault"))
    async with two.clients["a"].post(TURNS, json=PROMPT) as answer:
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()


async def test_what_was_forwarded_once_is_not_forwarded_again(two: Neighbours) -> None:
    two.book.holder = "c"
    two.nowhere("c")
    status, problem, headers = await ask(two, "GET", S1, headers={upstream.FORWARDED: "x"})
    assert (status, problem["code"], problem["owner"]) == (409, "owned_elsewhere", "c")
    assert (problem["retryable"], headers["Retry-After"]) == (True, "1")
    two.book.holder = "a"
    assert (await ask(two, "GET", S1, headers={upstream.FORWARDED: "x"}))[0] == 200


async def test_an_owner_that_refuses_connections_is_named(two: Neighbours) -> None:
    """Case L2: the client reads that the session is being recovered, and when to come again."""
    two.nowhere("c")
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("GET", S1, {}),
        ("POST", TURNS, {"json": PROMPT}),
        ("GET", f"{S1}/events?follow=1", {}),
    ]
    for method, path, more in asked:
        status, problem, headers = await ask(two, method, path, **more)
        assert (status, problem["code"], problem["owner"]) == (409, "owned_elsewhere", "c")
        assert (problem["retryable"], problem["retry_after"], headers["Retry-After"]) == (True, 1, "1")
        assert "recovered" in problem["detail"]
    assert two.sessions["a"].calls == []


async def test_an_owner_that_is_provably_gone_is_nobody(two: Neighbours) -> None:
    two.nowhere("c")
    two.book.dead.add("c")
    assert (await ask(two, "POST", TURNS, json=PROMPT, headers=JSON))[0] == 200
    assert [call[0] for call in two.sessions["a"].calls] == ["dispatch"]
    assert two.sessions["a"].calls[0][3][0].prompt == "hi"


@pytest.mark.parametrize("url", [None, "ftp://127.0.0.1/x", "http://u:p@127.0.0.1:1", "nonsense"])
async def test_an_owner_without_a_good_address_is_not_asked(two: Neighbours, url: str | None) -> None:
    two.book.holder, two.book.urls["c"] = "c", url
    assert (await ask(two, "GET", S1))[1]["code"] == "owned_elsewhere"


async def test_an_address_that_is_our_own_is_not_asked(two: Neighbours) -> None:
    two.book.holder, two.book.urls["c"] = "c", two.book.urls["a"]
    assert (await ask(two, "GET", S1))[1]["code"] == "owned_elsewhere"
    assert two.sessions["a"].calls == []


@pytest.mark.usefixtures("quick")
async def test_a_frozen_owner_never_gets_the_body(two: Neighbours) -> None:
    """It holds the head of the request at most: whatever it does when it wakes, it has no prompt to run."""
    heard: list[bytes] = []

    async def frozen(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(65536):
            heard.append(chunk)

    await two.odd("c", frozen)
    status, problem, _ = await ask(two, "POST", TURNS, json={"prompt": "the words"})
    assert (status, problem["code"], problem["owner"]) == (409, "owned_elsewhere", "c")
    assert b"the words" not in b"".join(heard)
    assert b"100-continue" in b"".join(heard)
    assert (await ask(two, "GET", S1))[1]["code"] == "owned_elsewhere"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("path", ["records?after=1.2", "events?after=1.2", "export"])
async def test_what_the_store_has_is_told_without_an_owner_that_is_silent(two: Neighbours, path: str) -> None:
    async def frozen(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()

    await two.odd("c", frozen)
    assert (await ask(two, "GET", f"{S1}/{path}"))[0] == 200
    two.nowhere("c")
    assert (await ask(two, "GET", f"{S1}/{path}"))[0] == 200
    assert len(two.sessions["a"].calls) == 2


async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes = b"") -> bytes:
    """Take a whole request."""
    head = await reader.readuntil(b"\r\n\r\n")
    if b"100-continue" in head:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    length = next((int(row[15:]) for row in head.lower().split(b"\r\n") if row.startswith(b"content-length:")), 0)
    return head + await reader.readexactly(length)


async def test_a_dispatch_is_not_sent_twice(two: Neighbours) -> None:
    """The connection breaks behind the body: it may have been taken, also when the owner is proven dead then."""
    seen: list[bytes] = []

    async def breaks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await answered(reader, writer))

    await two.odd("c", breaks)
    two.book.dead.add("c")
    status, problem, _ = await ask(two, "POST", TURNS, json=PROMPT)
    assert (status, problem["code"], problem["retryable"]) == (409, "owned_elsewhere", True)
    assert "prompt_id" in problem["detail"]
    assert len(seen) == 1
    assert two.sessions["a"].calls == []


async def test_a_command_that_may_have_run_is_not_offered_again(two: Neighbours) -> None:
    async def breaks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answered(reader, writer)

    await two.odd("c", breaks)
    status, problem, _ = await ask(two, "POST", f"{S1}/shell", json={"command": "make"})
    assert (status, problem["code"], problem["retryable"]) == (500, "delivery_unknown", False)
    assert two.sessions["a"].calls == []


async def test_what_concerns_the_queue_goes_to_the_owner(two: Neighbours) -> None:
    two.book.holder = "b"
    two.sessions["b"].abortable.add("p1")
    assert (await ask(two, "POST", f"{S1}/prompts/p1/abort"))[1] == {"aborted": True}
    assert (await ask(two, "GET", f"{S1}/prompts"))[0] == 200
    assert (await ask(two, "POST", f"{S1}/resume"))[1] == {"turn_id": "t2"}
    assert (await ask(two, "POST", f"{S1}/shell", json={"command": "make"}))[1]["output"] == "out\n"
    assert [call[0] for call in two.sessions["b"].calls] == ["abort_prompt", "prompts", "resume", "shell"]
    assert two.sessions["a"].calls == []


@pytest.mark.parametrize("goes_to", ["b", None])
async def test_a_session_that_moves_while_it_is_asked_for_is_asked_for_again(
    two: Neighbours, goes_to: str | None
) -> None:
    """Whoever no longer holds it has done nothing, so the same request may go to whoever does."""

    async def moved(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answered(reader, writer)
        two.book.holder = goes_to
        body = b'{"code":"owned_elsewhere","detail":"Moved.","retryable":true,"owner":"b"}'
        writer.write(b"HTTP/1.1 409 Conflict\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    await two.odd("c", moved)
    assert (await ask(two, "POST", TURNS, json=PROMPT, headers=JSON))[0] == 200
    assert [call[0] for call in two.sessions[goes_to or "a"].calls] == ["dispatch"]


async def test_a_session_that_is_taken_while_it_is_answered_here_is_forwarded(two: Neighbours) -> None:
    def taken() -> FakeHandle:
        two.book.holder = "b"
        raise RunnerError("owned_elsewhere", "Taken.", owner="b")

    two.sessions["a"].next_handle = taken
    assert (await ask(two, "POST", TURNS, json=PROMPT, headers=JSON))[0] == 200
    assert [call[0] for call in two.sessions["b"].calls] == ["dispatch"]
    two.book.holder = None
    two.sessions["a"].error = RunnerError("owned_elsewhere", "Taken.", owner="x")
    assert (await ask(two, "GET", S1))[1]["owner"] == "x"


async def test_another_conflict_comes_through_as_it_is(two: Neighbours) -> None:
    two.book.holder = "b"
    two.sessions["b"].error = RunnerError("prompt_conflict", "Other words.")
    status, problem, headers = await ask(two, "POST", TURNS, json=PROMPT)
    assert (status, problem["code"], problem["detail"]) == (409, "prompt_conflict", "Other words.")
    assert headers["Content-Type"] == "application/problem+json"


async def test_a_read_is_repeated(two: Neighbours) -> None:
    async def breaks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answered(reader, writer)
        two.book.dead.add("c")

    await two.odd("c", breaks)
    assert (await ask(two, "GET", S1))[0] == 200
    assert [call[0] for call in two.sessions["a"].calls] == ["view"]


@pytest.mark.usefixtures("quick")
async def test_a_request_is_given_up_when_somebody_else_took_the_session(two: Neighbours) -> None:
    async def takes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answered(reader, writer)
        two.book.holder = "b"
        await reader.read()

    await two.odd("c", takes)
    status, problem, _ = await ask(two, "POST", TURNS, json=PROMPT, headers=JSON)
    assert (status, problem["code"], problem["owner"]) == (409, "owned_elsewhere", "c")
    assert two.sessions["b"].calls == []


@pytest.mark.usefixtures("quick")
async def test_a_stream_of_a_frozen_owner_is_cut_once_somebody_else_took_the_session(two: Neighbours) -> None:
    async def freezes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answered(reader, writer)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{}\n\r\n")
        await reader.read()

    await two.odd("c", freezes)
    async with two.clients["a"].post(TURNS, json=PROMPT) as answer:
        assert await answer.content.readany() == b"{}\n"
        two.book.holder = "b"
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.content.readany()


async def test_headers_of_one_connection_stay_behind(two: Neighbours) -> None:
    seen: list[bytes] = []

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await answered(reader, writer))
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: X-Gone\r\nX-Gone: 1\r\nKeep-Alive: 5\r\n"
            b"X-Kept: 1\r\nX-Kept: 2\r\nContent-Type: application/json\r\n\r\n{}"
        )

    await two.odd("c", plain)
    more = {"Connection": "X-Own", "X-Own": "1", "X-Up": "1", "Origin": two.book.urls["a"] or "", "TE": "trailers"}
    status, _, headers = await ask(two, "POST", TURNS, json=PROMPT, headers=more)
    assert status == 200
    head = seen[0].partition(b"\r\n\r\n")[0].lower()
    assert b"host: " + (two.book.urls["c"] or "").removeprefix("http://").encode() in head
    assert b"authorization: bearer all" in head
    assert b"x-acp-runner-forwarded: a" in head
    assert b"x-up: 1" in head
    for name in (b"origin:", b"x-own", b"\r\nte:"):
        assert name not in head
    assert headers.getall("X-Kept") == ["1", "2"]
    assert "X-Gone" not in headers and "Keep-Alive" not in headers


async def test_a_body_that_is_too_large_is_refused_here(two: Neighbours) -> None:
    two.book.holder = "b"
    status, problem, _ = await ask(two, "POST", TURNS, data=b"x" * 100_001)
    assert (status, problem["code"]) == (413, "too_large")
    assert two.sessions["b"].calls == []


async def test_other_expectations_are_refused(two: Neighbours) -> None:
    status, problem, _ = await ask(two, "POST", TURNS, json=PROMPT, headers={"Expect": "wonders"})
    assert (status, problem["code"], problem["field"]) == (417, "invalid_request", "Expect")


async def test_a_packed_body_arrives_unpacked(two: Neighbours) -> None:
    two.book.holder = "b"
    packed = gzip.compress(orjson.dumps({"prompt": "packed " * 1000}))
    headers = {"Content-Encoding": "gzip", **JSON}
    assert (await ask(two, "POST", TURNS, data=packed, headers=headers))[0] == 200
    assert two.sessions["b"].calls[0][3][0].prompt == "packed " * 1000


async def test_many_streams_pass_at_the_same_time(two: Neighbours) -> None:
    two.book.holder = "b"
    handles = []

    def waiting() -> FakeHandle:
        handles.append(FakeHandle())
        return handles[-1]

    two.sessions["b"].next_handle = waiting
    asked = [asyncio.create_task(ask(two, "POST", TURNS, json=PROMPT)) for _ in range(150)]
    while len(handles) < 150 or not all(handle.readers for handle in handles):
        await asyncio.sleep(0.01)
    for handle in handles:
        handle.resolve(result())
        handle.readers[0].end()
    assert {status for status, _, _ in await asyncio.gather(*asked)} == {200}


async def test_a_closing_replica_cuts_the_streams_that_it_passes(two: Neighbours) -> None:
    two.book.holder = "b"
    handle = FakeHandle()
    two.sessions["b"].next_handle = lambda: handle
    async with two.clients["a"].post(TURNS, json=PROMPT) as answer:
        await answer.content.readline()
        await two.stop("a")
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    async with asyncio.timeout(5):
        await handle.readers[0].closed.wait()


class TestGateway:
    """A replica that runs nothing itself."""

    @pytest.fixture
    async def gate(self) -> AsyncIterator[Neighbours]:
        made = Neighbours()
        try:
            await made.add("a", gateway=True)
            yield made
        finally:
            await made.close()

    async def test_without_a_runner_nothing_is_dispatched(self, gate: Neighbours) -> None:
        status, problem, headers = await ask(gate, "POST", TURNS, json=PROMPT)
        assert (status, problem["code"], problem["detail"]) == (503, "plane_unavailable", "No runner is connected.")
        assert (problem["retryable"], headers["Retry-After"]) == (True, "1")

    async def test_reads_need_no_runner(self, gate: Neighbours) -> None:
        assert (await ask(gate, "GET", S1))[1] == view("s1")
        assert (await ask(gate, "GET", f"{S1}/records"))[0] == 200

    async def test_a_new_session_goes_to_a_runner(self, gate: Neighbours) -> None:
        runner = await gate.add("r1")
        assert (await ask(gate, "POST", TURNS, json=PROMPT, headers=JSON))[0] == 200
        assert [call[0] for call in runner.calls] == ["dispatch"]
        assert gate.sessions["a"].calls == []

    async def test_a_runner_that_cannot_be_reached_is_passed_over(self, gate: Neighbours) -> None:
        gate.nowhere("r0")
        gate.book.holder = None
        runner = await gate.add("r1")
        status, problem, _ = await ask(gate, "POST", TURNS, json=PROMPT, headers=JSON)
        assert status == 200, problem
        assert [call[0] for call in runner.calls] == ["dispatch"]
        await gate.stop("r1")
        status, problem, _ = await ask(gate, "POST", TURNS, json=PROMPT)
        assert (status, problem["code"]) == (503, "plane_unavailable")

    async def test_what_a_runner_sends_to_a_plane_is_not_run_there(self, gate: Neighbours) -> None:
        for method, path in (("POST", TURNS), ("DELETE", S1)):
            status, problem, _ = await ask(gate, method, path, headers={upstream.FORWARDED: "r1"})
            assert (status, problem["code"], problem["retryable"]) == (409, "owned_elsewhere", True)
        assert gate.sessions["a"].calls == []
        assert (await ask(gate, "GET", S1, headers={upstream.FORWARDED: "r1"}))[0] == 200

    async def test_a_runner_that_is_full_is_passed_over(self, gate: Neighbours) -> None:
        full, other = await gate.add("r1"), await gate.add("r2")
        full.capacity = False
        assert (await ask(gate, "POST", TURNS, json=PROMPT, headers=JSON))[0] == 200
        assert [call[0] for call in other.calls] == ["dispatch"]
        other.capacity = False
        status, problem, headers = await ask(gate, "POST", TURNS, json=PROMPT)
        assert (status, problem["code"], headers["Retry-After"]) == (429, "runner_at_capacity", "1")

    async def test_an_owner_that_is_full_is_not(self, gate: Neighbours) -> None:
        (await gate.add("r1")).capacity = False
        other = await gate.add("r2")
        gate.book.holder = "r1"
        assert (await ask(gate, "POST", TURNS, json=PROMPT))[0] == 429
        assert other.calls == []

    async def test_the_owner_comes_first(self, gate: Neighbours) -> None:
        await gate.add("r1")
        owner = await gate.add("r2")
        gate.book.holder = "r2"
        assert (await ask(gate, "DELETE", S1))[0] == 200
        assert [call[0] for call in owner.calls] == ["delete"]
