"""The routes of the queue, of an explicit resume and of the shell; and what a dispatch answers that waits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import ClientSession

from runner.client import Client
from runner.errors import RunnerError
from tests.server.double import FakeHandle, FakeSessions, auth

SESSION = "/v1/sessions/s1"


async def posted(http: ClientSession, path: str, **request: Any) -> tuple[int, Any]:
    async with http.post(path, **request) as answer:
        return answer.status, await answer.json(content_type=None)


async def test_an_abort_says_whether_it_cancelled(http: ClientSession, sessions: FakeSessions) -> None:
    sessions.abortable.add("p1")
    assert await posted(http, f"{SESSION}/prompts/p1/abort") == (200, {"aborted": True})
    assert await posted(http, f"{SESSION}/prompts/p1/abort", json={}) == (200, {"aborted": False})
    assert sessions.calls[0] == ("abort_prompt", "default", "s1", "p1")


async def test_an_abort_refuses_what_it_does_not_know(http: ClientSession) -> None:
    status, problem = await posted(http, "/v1/sessions/unknown/prompts/p1/abort")
    assert (status, problem["code"]) == (404, "not_found")
    status, problem = await posted(http, f"{SESSION}/prompts/a.b/abort")
    assert (status, problem["field"]) == (400, "prompt_id")
    status, problem = await posted(http, f"{SESSION}/prompts/p1/abort", json={"force": True})
    assert (status, problem["field"]) == (400, "body")


async def test_an_abort_and_a_list_are_never_behind_the_cap(http: ClientSession, sessions: FakeSessions) -> None:
    """What helps a full server is not refused by it; what would fill it further is."""
    sessions.capacity = False
    assert (await posted(http, f"{SESSION}/prompts/p1/abort"))[0] == 200
    async with http.get(f"{SESSION}/prompts") as answer:
        assert answer.status == 200
    for path, body in ((f"{SESSION}/resume", None), (f"{SESSION}/shell", {"command": "ls"})):
        async with http.post(path, json=body) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (429, "1")


async def test_the_queue_is_listed(http: ClientSession, sessions: FakeSessions) -> None:
    sessions.active = "p1"
    sessions.waiting = [{"prompt_id": "p2", "state": "queued", "position": 1}]
    async with http.get(f"{SESSION}/prompts") as answer:
        assert await answer.json() == {"items": sessions.waiting, "next_cursor": None, "active": "p1"}


async def test_a_resume_names_its_turn(http: ClientSession, sessions: FakeSessions) -> None:
    assert await posted(http, f"{SESSION}/resume") == (200, {"turn_id": "t2"})
    assert sessions.calls == [("resume", "default", "s1", None)]


async def test_a_shell_answers_with_its_end(http: ClientSession, sessions: FakeSessions) -> None:
    status, reply = await posted(http, f"{SESSION}/shell", json={"command": "ls", "timeout_seconds": 5})
    assert (status, reply) == (200, {"turn_id": "t2", "exit_code": 0, "output": "out\n", "truncated": False})
    request = sessions.calls[0][3]
    assert (request.command, request.timeout_seconds) == ("ls", 5)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "command"),
        ({"command": ""}, "command"),
        ({"command": "a\0b"}, "command"),
        ({"command": "ls", "timeout_seconds": 0}, "timeout_seconds"),
        ({"command": "ls", "timeout_seconds": 3601}, "timeout_seconds"),
        ({"command": "ls", "cwd": "/"}, "cwd"),
    ],
)
async def test_a_shell_names_the_wrong_field(http: ClientSession, body: dict[str, Any], field: str) -> None:
    status, problem = await posted(http, f"{SESSION}/shell", json=body)
    assert (status, problem["code"], problem["field"]) == (400, "invalid_request", field)


@pytest.mark.parametrize("code", ["session_turn_in_use", "session_starting"])
async def test_a_busy_session_refuses_a_shell(http: ClientSession, sessions: FakeSessions, code: str) -> None:
    sessions.error = RunnerError(code, "Busy.")
    status, problem = await posted(http, f"{SESSION}/shell", json={"command": "ls"})
    assert (status, problem["code"], problem["retryable"]) == (409, code, code == "session_starting")


@pytest.mark.parametrize("route", ["prompts/p1/abort", "resume", "shell"])
async def test_a_reader_may_only_read(url: str, route: str) -> None:
    """Each has its scope."""
    async with ClientSession(url, headers=auth("reader")) as reader:
        assert (await posted(reader, f"{SESSION}/{route}", json={}))[0] == 403
        async with reader.get(f"{SESSION}/prompts") as answer:
            assert answer.status == 200


@pytest.mark.parametrize("headers", [{}, {"Accept": "application/json"}, {"Prefer": "respond-async"}])
async def test_a_context_only_prompt_is_stored(
    http: ClientSession, sessions: FakeSessions, headers: dict[str, str]
) -> None:
    body = {"prompt": "hi", "context_only": True}
    assert await posted(http, f"{SESSION}/turns", json=body, headers=headers) == (
        200,
        {"prompt_id": "p1", "state": "stored"},
    )
    assert sessions.calls[0][3][0].context_only


async def test_a_queued_prompt_is_acknowledged(http: ClientSession, sessions: FakeSessions) -> None:
    def queued() -> FakeHandle:
        handle = FakeHandle()
        handle.state, handle.turn_id = "queued", None
        return handle

    sessions.next_handle = queued
    body = {"prompt": "hi", "on_busy": "queue", "queue_mode": "fifo"}
    status, reply = await posted(http, f"{SESSION}/turns", json=body, headers={"Prefer": "respond-async"})
    assert (status, reply) == (202, {"prompt_id": "p1", "turn_id": None, "state": "queued"})
    request = sessions.calls[0][3][0]
    assert (request.on_busy, request.queue_mode) == ("queue", "fifo")


async def test_a_full_queue_says_so(http: ClientSession, sessions: FakeSessions) -> None:
    sessions.error = RunnerError("queue_full", "100 prompts wait already.", retry_after=1)
    status, problem = await posted(http, f"{SESSION}/turns", json={"prompt": "hi", "on_busy": "queue"})
    assert (status, problem["code"], problem["retryable"]) == (429, "queue_full", True)


async def test_a_client_that_leaves_does_not_take_its_abort_back(url: str, sessions: FakeSessions) -> None:
    """Case H8."""
    sessions.abortable.add("p1")
    sessions.gate = asyncio.Event()
    async with ClientSession(url, headers=auth()) as client:
        request = asyncio.create_task(client.post(f"{SESSION}/prompts/p1/abort"))
        while not sessions.calls:
            await asyncio.sleep(0.005)
        request.cancel()
    sessions.gate.set()
    async with asyncio.timeout(5):
        while sessions.abortable:
            await asyncio.sleep(0.005)


async def test_the_client_speaks_them(url: str, sessions: FakeSessions) -> None:
    sessions.abortable.add("p1")
    sessions.active = "p1"
    async with Client(url, "all") as api:
        assert [await api.abort_prompt("s1", "p1"), await api.abort_prompt("s1", "p1")] == [True, False]
        assert (await api.prompts("s1"))["active"] == "p1"
        assert await api.resume("s1") == "t2"
        assert (await api.shell("s1", "ls", timeout_seconds=3))["output"] == "out\n"
        await api.shell("s1", "ls")
    assert [call[3].timeout_seconds for call in sessions.calls if call[0] == "shell"] == [3, 120]
