"""Commands over HTTP: one can be read, and a request arrives with its head, however slow its body is."""

from __future__ import annotations

import asyncio

from aiohttp import ClientSession

from runner.clock import SystemClock
from tests.server.double import FakeSessions, auth, command

S1 = "/v1/sessions/s1"


async def test_one_command(http: ClientSession, sessions: FakeSessions) -> None:
    async with http.get("/v1/commands/c1") as answer:
        assert (answer.status, await answer.json()) == (200, command())
    assert sessions.calls == [("command", "default", None, "c1")]
    async with http.get("/v1/commands/c2") as answer:
        assert (answer.status, (await answer.json(content_type=None))["code"]) == (404, "not_found")


async def test_another_project_sees_no_command(http: ClientSession) -> None:
    async with http.get("/v1/commands/c1", headers=auth("other")) as answer:
        assert answer.status == 404


async def test_a_command_needs_the_scope_read(http: ClientSession, sessions: FakeSessions) -> None:
    async with http.get("/v1/commands/c1", headers=auth("sender")) as answer:
        assert answer.status == 403
    async with http.get("/v1/commands/c1", headers=auth("reader")) as answer:
        assert answer.status == 200
    for path in ("/v1/commands/a%20b", "/v1/commands/c1?x=1"):
        async with http.get(path) as answer:
            assert answer.status == 400
    assert len(sessions.calls) == 1


async def test_a_stop_arrives_with_its_head_not_with_its_body_case_b9(url: str, sessions: FakeSessions) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    head = f"POST {S1}/cancel HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer all\r\nContent-Length: 2\r\n\r\n"
    writer.write(head.encode())
    await writer.drain()
    await asyncio.sleep(0.3)
    assert sessions.calls == []
    before = SystemClock().monotonic()
    writer.write(b"{}")
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)).startswith(b"HTTP/1.1 200")
    writer.close()
    assert sessions.arrived_at is not None
    assert sessions.arrived_at < before - 0.1
