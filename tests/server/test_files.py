from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from aiohttp import ClientSession
from yarl import URL

from runner.client import ApiError, Client
from runner.errors import RunnerError
from runner.rules import files as rules
from runner.rules.files import Precondition, etag_of
from runner.server import files as server_files
from tests.server.double import FakeSessions, auth
from tests.server.neighbours import Neighbours

S1 = "/v1/sessions/s1"


async def ask(http: ClientSession, method: str, path: str, **more: Any) -> tuple[int, Any]:
    async with http.request(method, URL(f"{http._base_url}".rstrip("/") + path, encoded=True), **more) as answer:
        body = await answer.read()
        return answer.status, orjson.loads(body) if body and "json" in answer.content_type else body


async def test_a_file_is_what_it_is_and_never_a_page(http: ClientSession, sessions: FakeSessions) -> None:
    sessions.files.disk["evil", "page.html"] = "<script>ü</script>".encode()
    async with http.get(f"{S1}/files/evil/page.html") as answer:
        assert (answer.status, await answer.read()) == (200, "<script>ü</script>".encode())
        assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Content-Disposition"] == "attachment; filename*=UTF-8''page.html"
        assert answer.headers["Content-Security-Policy"] == "default-src 'none'; sandbox"
        assert answer.headers["ETag"] == etag_of("<script>ü</script>".encode())
        assert answer.headers["Last-Modified"] == "Thu, 01 Jan 1970 00:00:00 GMT"


async def test_a_probe_is_the_head_of_the_answer(http: ClientSession) -> None:
    async with http.head(f"{S1}/files/a.txt") as answer:
        assert (answer.status, answer.headers["Content-Length"], await answer.read()) == (200, "5", b"")
        assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
    async with http.head(f"{S1}/files/b.txt") as answer:
        assert (answer.status, await answer.read()) == (404, b"")


async def test_what_is_known_is_not_sent_again(http: ClientSession) -> None:
    for etag, status in ((etag_of(b"hello"), 304), (f'"x", W/{etag_of(b"hello")}', 304), ("*", 304), ('"x"', 200)):
        async with http.get(f"{S1}/files/a.txt", headers={"If-None-Match": etag}) as answer:
            assert (answer.status, answer.headers["ETag"]) == (status, etag_of(b"hello"))
            assert await answer.read() == (b"" if status == 304 else b"hello")


@pytest.mark.parametrize(
    ("sent", "path"),
    [
        ("a%20b/%C3%BC%F0%9F%98%80.txt", "a b/ü😀.txt"),
        ("a%2Fb", "a/b"),
        ("100%2525", "100%25"),
        ("q%3Fx%23y", "q?x#y"),
        ("a+b", "a+b"),
        ("a%0Ab", "a\nb"),
        ("new%5Cold", "new\\old"),
    ],
)
async def test_names_are_percent_encoded(http: ClientSession, sessions: FakeSessions, sent: str, path: str) -> None:
    assert (await ask(http, "PUT", f"{S1}/files/{sent}", data=b"1"))[0] == 201
    assert sessions.calls[-1][3] == (path, b"1", Precondition())
    assert await ask(http, "GET", f"{S1}/files/{sent}") == (200, b"1")
    async with Client(str(http._base_url), "all") as client:
        assert await client.read_file("s1", path) == b"1"
        assert (await client.write_file("s1", path, b"2"))["created"] is False


@pytest.mark.parametrize("sent", ["%2e%2e/x", "a/%2E%2E/%2E%2E/x", "%2Fetc/hosts", "/etc/hosts", "a%00b", "a/", "%2e"])
async def test_a_path_that_leaves_is_refused(http: ClientSession, sent: str) -> None:
    for method in ("GET", "PUT"):
        status, problem = await ask(http, method, f"{S1}/files/{sent}")
        assert (status, problem["code"], problem["field"]) == (400, "invalid_request", "path")


async def test_a_write_says_what_became_of_it(http: ClientSession, sessions: FakeSessions) -> None:
    every = bytes(range(256)) * 8
    made = {"path": "new/b.bin", "size": 2048, "etag": etag_of(every), "created": True}
    async with http.put(f"{S1}/files/new/b.bin", data=every) as answer:
        assert (answer.status, answer.headers["ETag"], await answer.json()) == (201, etag_of(every), made)
    assert await ask(http, "PUT", f"{S1}/files/new/b.bin", data=b"") == (
        200,
        {**made, "size": 0, "etag": etag_of(b""), "created": False},
    )
    assert sessions.files.disk["new", "b.bin"] == b""


async def test_a_condition_that_does_not_hold_is_412_and_changes_nothing(
    http: ClientSession, sessions: FakeSessions
) -> None:
    for name, value in (("If-None-Match", "*"), ("If-Match", '"other"'), ("If-None-Match", etag_of(b"hello"))):
        status, problem = await ask(http, "PUT", f"{S1}/files/a.txt", data=b"new", headers={name: value})
        assert (status, problem["code"], problem["field"]) == (412, "invalid_request", name)
    async with Client(str(http._base_url), "all") as client:
        with pytest.raises(ApiError) as caught:
            await client.write_file("s1", "a.txt", b"new", if_none_match="*")
        assert caught.value.status == 412
        assert (await client.write_file("s1", "a.txt", b"new", if_match=etag_of(b"hello")))["size"] == 3
    status, problem = await ask(http, "PUT", f"{S1}/files/a.txt", headers={"If-Match": "bare"})
    assert (status, problem["field"]) == (400, "If-Match")


async def test_what_is_too_large_is_refused(
    http: ClientSession, sessions: FakeSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4096 bytes bound every body of this server."""
    status, problem = await ask(http, "PUT", f"{S1}/files/large", data=b"x" * 4097)
    assert (status, problem["code"]) == (413, "too_large")
    monkeypatch.setattr(server_files, "MAX_FILE_BYTES", 10)
    status, problem = await ask(http, "PUT", f"{S1}/files/large", data=b"x" * 11)
    assert (status, problem["code"], "10 bytes" in problem["detail"]) == (413, "too_large", True)
    assert sessions.calls == []


async def test_a_folder_is_listed(http: ClientSession, sessions: FakeSessions) -> None:
    status, page = await ask(http, "GET", f"{S1}/files")
    assert (status, [item["name"] for item in page["items"]]) == (200, ["a.txt"])
    sessions.files.disk["b", "c"] = b""
    cursor = rules.encode_cursor(b"a")
    status, page = await ask(http, "GET", f"{S1}/files?path=b%2F&limit=7&cursor={cursor}")
    assert (status, [item["name"] for item in page["items"]]) == (200, ["c"])
    assert [call[3] for call in sessions.calls] == [("", 200, None), ("b/", 7, cursor)]
    async with Client(str(http._base_url), "all") as client:
        assert [item["type"] for item in (await client.files("s1"))["items"]] == ["file", "folder"]
        assert (await client.files("s1", "b", limit=1))["items"][0]["name"] == "c"
    for asked, field in (("path=..", "path"), ("limit=0", "limit"), ("cursor=%21", "cursor"), ("depth=2", "depth")):
        status, problem = await ask(http, "GET", f"{S1}/files?{asked}")
        assert (status, problem["field"]) == (400, field)


async def test_what_stands_in_the_way_has_its_status(http: ClientSession, sessions: FakeSessions) -> None:
    """Case L5: retryable while the sandbox is being started."""
    for code, status in (("session_starting", 409), ("session_ended", 410), ("forbidden", 403), ("internal", 500)):
        sessions.error = RunnerError(code, "No.", retry_after=1)
        for method, path in (("GET", "/files/a.txt"), ("PUT", "/files/a.txt"), ("GET", "/files")):
            got, problem = await ask(http, method, S1 + path)
            assert (got, problem["code"], problem["retryable"]) == (status, code, code == "session_starting")
    sessions.error = None
    assert (await ask(http, "PUT", "/v1/sessions/nobody/files/x"))[0] == 404
    assert (await ask(http, "DELETE", f"{S1}/files/a.txt"))[0] == 405


@pytest.mark.parametrize(
    ("token", "read", "write"), [("reader", 200, 403), ("sender", 403, 200), ("operator", 403, 403)]
)
async def test_scopes(http: ClientSession, token: str, read: int, write: int) -> None:
    assert (await ask(http, "GET", f"{S1}/files/a.txt", headers=auth(token)))[0] == read
    assert (await ask(http, "HEAD", f"{S1}/files/a.txt", headers=auth(token)))[0] == read
    assert (await ask(http, "GET", f"{S1}/files", headers=auth(token)))[0] == read
    assert (await ask(http, "PUT", f"{S1}/files/a.txt", data=b"1", headers=auth(token)))[0] == write


async def test_a_client_that_leaves_does_not_stop_its_write(http: ClientSession, sessions: FakeSessions) -> None:
    sessions.gate = asyncio.Event()
    writing = asyncio.create_task(ask(http, "PUT", f"{S1}/files/a.txt", data=b"left"))
    while not sessions.calls:
        await asyncio.sleep(0.001)
    writing.cancel()
    await asyncio.wait({writing})
    sessions.gate.set()
    async with asyncio.timeout(5):
        while sessions.files.disk["a.txt",] != b"left":
            await asyncio.sleep(0.001)


async def test_they_are_the_owner_s_to_answer_and_a_plane_asks_a_runner() -> None:
    """Reads too: the store that replicas share has no files (DESIGN 3.1.10)."""
    two = Neighbours()
    try:
        for name in ("a", "b"):
            await two.add(name)
        two.book.holder = "b"
        two.sessions["b"].files.disk["ü", "x"] = every = bytes(range(256)) * 300
        name = "%C3%BC%2Fx"
        assert await ask(two.clients["a"], "GET", f"{S1}/files/{name}") == (200, every)
        async with two.clients["a"].head(f"{S1}/files/a.txt") as answer:
            assert (answer.status, answer.headers["Content-Length"]) == (200, "5")
        assert (await ask(two.clients["a"], "PUT", f"{S1}/files/new", data=every))[0] == 201
        assert (await ask(two.clients["a"], "PUT", f"{S1}/files/new", headers={"If-None-Match": "*"}))[0] == 412
        assert (await ask(two.clients["a"], "GET", f"{S1}/files?path=%C3%BC"))[1]["items"][0]["name"] == "x"
        two.sessions["b"].error = RunnerError("session_starting", "No.", retry_after=1)
        status, problem = await ask(two.clients["a"], "GET", f"{S1}/files/new")
        assert (status, problem["code"]) == (409, "session_starting")
        assert two.sessions["a"].calls == []
        two.book.holder = None
        await two.add("plane", gateway=True)
        for path in ("files/a.txt", "files"):
            assert (await ask(two.clients["plane"], "GET", f"{S1}/{path}"))[0] == 503
        await two.add("r1")
        for method, path in (("GET", "files/a.txt"), ("HEAD", "files/a.txt"), ("GET", "files"), ("PUT", "files/a.txt")):
            assert (await ask(two.clients["plane"], method, f"{S1}/{path}"))[0] == 200
        assert [call[0] for call in two.sessions["r1"].calls] == ["read", "read", "list", "write"]
        assert two.sessions["plane"].calls == []
    finally:
        await two.close()


@pytest.mark.parametrize("path", ["a%ffb", "%ed%a0%80", "f/%c3"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT"])
async def test_a_path_that_is_no_text_names_no_file(
    http: ClientSession, sessions: FakeSessions, method: str, path: str
) -> None:
    before = dict(sessions.files.disk)
    status, body = await ask(http, method, f"{S1}/files/{path}")
    assert status == 400
    assert method == "HEAD" or (body["code"], body["field"]) == ("invalid_request", "path")
    assert sessions.files.disk == before
