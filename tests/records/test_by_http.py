"""Fork, export, quarantine and the project feed as any HTTP client sees them, at two replicas over PostgreSQL."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from runner.ids import record_id
from runner.store.port import RecordRow
from runner.store.stream.codec import encode
from tests.e2e.server import SECONDS
from tests.normal_form import normal_form
from tests.records.bed import Fleet
from tests.records.test_poison import publish
from tests.replicas.bed import TOKEN, Member, until_async

Line = dict[str, Any]


def call(member: Member, method: str, path: str, body: Any = None, accept: str = "*/*") -> tuple[int, bytes]:
    """One request and its whole answer; blocks."""
    request = urllib.request.Request(member.url + path, method=method)
    request.add_header("Authorization", f"Bearer {TOKEN}")
    request.add_header("Accept", accept)
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


async def ask(member: Member, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    status, content = await asyncio.to_thread(call, member, method, path, body, "application/json")
    return status, json.loads(content)


async def lines(member: Member, path: str) -> list[Line]:
    status, content = await asyncio.to_thread(call, member, "GET", path)
    assert status == 200, content
    return [json.loads(line) for line in content.splitlines() if line]


class Feed:
    """The project feed at one replica, live."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def follow(cls, member: Member) -> Feed:
        """What comes from now on."""
        host, port = member.address
        feed = cls(*await asyncio.open_connection(host, port))
        head = f"GET /v1/events?follow=1 HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        feed._writer.write(head.encode())
        assert (await feed._line())["kind"] == "ping"
        return feed

    async def until(self, kind: str, count: int = 1) -> list[Line]:
        """The next events up to the n-th of this type."""
        found: list[Line] = []
        while [one["type"] for one in found].count(kind) < count:
            line = await self._line()
            found += [line] if line["kind"] == "event" else []
        return found

    def close(self) -> None:
        self._writer.close()

    async def _line(self) -> Line:
        async with asyncio.timeout(SECONDS):
            while not (line := await self._reader.readline()).startswith(b"{"):
                assert line, "the feed ended"
        return dict(json.loads(line))


async def prompt(member: Member, session: str, text: str) -> Line:
    status, result = await ask(member, "POST", f"/v1/sessions/{session}/turns", {"prompt": text, "harness": "demo"})
    assert (status, result["ok"]) == (200, True), result
    return dict(result)


async def records(member: Member, session: str) -> list[Line]:
    status, page = await ask(member, "GET", f"/v1/sessions/{session}/records?limit=500")
    assert (status, page["next_cursor"]) == (200, None)
    return list(page["items"])


async def doors(fleet: Fleet, path: str) -> list[Line]:
    """What both replicas answer alike; of the session's view, which tells of the replica's own seats, only its name."""
    seen = [await lines(member, path) for member in (fleet.cluster.a, fleet.cluster.b)]
    for line in (line for answer in seen for line in answer if line["kind"] == "session"):
        line["session"] = line["session"]["session_id"]
    assert seen[0] == seen[1]
    return seen[0]


@pytest.mark.timeout(120)
async def test_fork_and_export_by_http(fleet: Fleet) -> None:
    """A session that one replica ran is exported and forked at the other, and goes on there."""
    a, b = fleet.cluster.a, fleet.cluster.b
    await prompt(a, "first", "/think hm\n/stream 20\n/tool echo hi")
    await prompt(a, "first", "/write note.txt kept")
    told = await records(b, "first")
    assert told == await records(a, "first")
    head, *body, end = await doors(fleet, "/v1/sessions/first/export")
    assert (head["kind"], end["kind"], end["records"], end["complete"]) == ("session", "end", len(told), True)
    assert body == [{**one, "kind": "record"} for one in told]
    assert normal_form(await doors(fleet, "/v1/sessions/first/events")) == normal_form(told)

    cut = next(one["cursor"] for one in told if one["type"] == "session_idle")
    asked = {"after": cut, "session_id": "second"}
    status, made = await ask(b, "POST", "/v1/sessions/first/fork", asked)
    assert (status, made["session_id"], made["complete"]) == (201, "second", True)
    assert (await ask(a, "POST", "/v1/sessions/first/fork", asked))[0] == 200, "the same one again"
    before = [(one["type"], one["data"]) for one in told[: [one["cursor"] for one in told].index(cut) + 1]]
    forked = await records(a, "second")
    assert [(one["type"], one["data"]) for one in forked if one["type"] in ("message", "thought", "tool_call")] == [
        one for one in before if one[0] in ("message", "thought", "tool_call")
    ]
    result = await prompt(b, "second", "/told")
    assert (result["start"], result["context_lost"]) == ("cold", True)
    assert "/think hm" in result["text"], "its agent was told of the history up to the cut"
    assert "note.txt" not in result["text"], "and of nothing behind it"
    assert await records(a, "first") == told, "the first one is as it was"
    assert (await doors(fleet, "/v1/sessions/second/export"))[-1]["complete"]

    for path, wrong, code in (
        ("/v1/sessions/nobody/export", None, "not_found"),
        ("/v1/sessions/first/fork", {"after": "x"}, "invalid_request"),
        ("/v1/sessions/first/fork", {"after": "9.9"}, "invalid_request"),
    ):
        _, problem = await ask(b, "POST" if wrong else "GET", path, wrong)
        assert problem["code"] == code, problem


@pytest.mark.timeout(120)
async def test_quarantine_by_http(fleet: Fleet) -> None:
    """What comes by the stream when its turn is over is hidden from all reads, and shown to operators."""
    a, b = fleet.cluster.a, fleet.cluster.b
    result = await prompt(a, "s", "hello")
    told, n = await records(a, "s"), 777
    name = record_id("s", result["turn_id"], n)
    late = RecordRow("default", "s", name, result["turn_id"], "p", 1, n, "message", b'{"text":"late"}', 1_000)
    await publish(fleet.redis.url, [encode(late)])

    async def shown() -> list[Line]:
        return [one for member in (a, b) for one in (await ask(member, "GET", "/v1/quarantine"))[1]["items"]]

    await until_async(shown, "it is in quarantine")
    one, other = await shown()
    assert one == other
    assert (one["record_id"], one["data"], one["cursor"]) == (name, {"text": "late"}, f"1.{n}")
    assert one["reason"] == "turn_ended"
    assert [await records(member, "s") for member in (a, b)] == [told, told]
    for path in ("/v1/sessions/s/export", "/v1/sessions/s/events"):
        assert name not in json.dumps(await doors(fleet, path))
    page = (await ask(b, "GET", "/v1/quarantine?limit=1"))[1]
    assert (page["items"], page["next_cursor"]) == ([one], None)


@pytest.mark.timeout(120)
async def test_the_project_feed_by_http(fleet: Fleet) -> None:
    """Both replicas tell of the sessions of both, in one order, live and from a cursor."""
    a, b = fleet.cluster.a, fleet.cluster.b
    start, *_ = await lines(b, "/v1/events")
    feeds = [await Feed.follow(member) for member in (a, b)]
    await prompt(a, "one", "hello")
    await prompt(b, "two", "hello")
    before = [await feed.until("session_idle", 2) for feed in feeds]
    assert (await ask(a, "DELETE", "/v1/sessions/two"))[0] == 200
    after = [await feed.until("session_ended") for feed in feeds]
    live, also = [*before[0], *after[0]], [*before[1], *after[1]]
    assert live == also
    told = [[one["type"] for one in live if one["session_id"] == name] for name in ("one", "two")]
    assert told == [["session_busy", "session_idle"], ["session_busy", "session_idle", "session_ended"]]
    for feed in feeds:
        feed.close()
    kept = [one for one in await doors(fleet, f"/v1/events?after={start['cursor']}") if one["kind"] == "event"]
    # With a session's content its items go; that it ended stays.
    wanted = [("one", "session_busy"), ("one", "session_idle"), ("two", "session_ended")]
    assert [(one["session_id"], one["type"]) for one in kept] == wanted
    rest = await doors(fleet, f"/v1/events?after={kept[0]['cursor']}")
    assert [one for one in rest if one["kind"] == "event"] == kept[1:]
    cursor = kept[1]["session_cursor"]
    assert [one["kind"] for one in await lines(b, f"/v1/sessions/one/events?after={cursor}")] in ([], ["ping"])
