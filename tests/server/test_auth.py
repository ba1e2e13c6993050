from __future__ import annotations

from typing import Any

import pytest
from aiohttp import ClientSession

from runner.errors import RunnerError
from runner.server.auth import ALL_BUT_RUNNER, AccessToken, Gate, is_loopback
from runner.server.routes import OPEN, ROUTES, Route
from tests.server.double import FakeSessions, auth

BODIES: dict[str, Any] = {
    "dispatchTurn": {"prompt": "x"},
    "answerInteraction": {"decision": "allow"},
    "runShell": {"command": "ls"},
    "forkSession": {"after": "1.1"},
}
# These make the session when there is none, of the caller's own project.
MAKES: frozenset[str] = frozenset({"dispatchTurn", "runShell"})
GUARDED = [route for route in ROUTES if route.scope != OPEN]


def path_of(route: Route) -> str:
    return route.path.format(session_id="s1", interaction_id="i1", prompt_id="p1", command_id="c1", path="a.txt")


async def status_of(http: ClientSession, route: Route, headers: dict[str, str]) -> int:
    async with http.request(route.method, path_of(route), json=BODIES.get(route.name), headers=headers) as answer:
        await answer.read()
        return answer.status


@pytest.mark.parametrize("route", GUARDED, ids=lambda route: route.name)
async def test_every_route_needs_a_token(url: str, sessions: FakeSessions, route: Route) -> None:
    async with ClientSession(url) as http:
        for header in ({}, auth("wrong"), {"Authorization": "Basic YWxs"}, {"Authorization": "Bearer"}, auth("al")):
            async with http.request(route.method, path_of(route), headers=header) as answer:
                assert answer.status == 401
                assert answer.headers["WWW-Authenticate"] == "Bearer"
                if route.method != "HEAD":
                    assert (await answer.json(content_type=None))["code"] == "unauthorized"
    assert sessions.calls == []


@pytest.mark.parametrize("route", GUARDED, ids=lambda route: route.name)
async def test_a_scope_opens_its_routes_and_no_other(http: ClientSession, sessions: FakeSessions, route: Route) -> None:
    for token, scope in (("reader", "read"), ("sender", "dispatch"), ("operator", "operate")):
        status = await status_of(http, route, auth(token))
        assert status in ((200, 201) if route.scope in (scope, "any") else (403,))


@pytest.mark.parametrize("route", GUARDED, ids=lambda route: route.name)
async def test_the_project_comes_from_the_token_case_j6(
    http: ClientSession, sessions: FakeSessions, route: Route
) -> None:
    """Case J6: every read and control verb with another project's session id reaches the guard with its own scope."""
    status = await status_of(http, route, auth("other"))
    if route.name in ("openapi", "readMetrics"):
        assert sessions.calls == []
        return
    assert [call[1] for call in sessions.calls] == ["elsewhere"]
    if "{session_id}" in route.path and route.name not in MAKES:
        assert status == 404


async def test_health_and_ready_are_open_and_say_little(url: str, sessions: FakeSessions) -> None:
    foreign = {"Host": "evil.example", "Origin": "http://evil.example"}
    async with ClientSession(url) as http:
        async with http.get("/health", headers=foreign) as answer:
            assert await answer.json() == {"status": "ok", "version": "9.9"}
        async with http.get("/health", headers=auth()) as answer:
            assert (await answer.json())["replica_id"] == "rep_1"
        async with http.get("/ready", headers=foreign) as answer:
            assert answer.status == 200
            assert set(await answer.json()) == {"ready", "version"}
        sessions.is_ready = False
        async with http.get("/ready", headers=auth()) as answer:
            assert answer.status == 503
            assert (await answer.json())["store"] == "ok"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost:1"}, 200),
        ({"Host": "[::1]:8765"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "localhost@evil.example"}, 403),
        ({"Host": "192.168.1.5"}, 403),
        ({"Host": "localhost:8765", "Origin": "http://localhost:8765"}, 200),
        ({"Host": "localhost:8765", "Origin": "http://localhost:3000"}, 403),
        ({"Host": "localhost:8765", "Origin": "null"}, 403),
        ({"Host": "localhost:8765", "Origin": "http://evil.example"}, 403),
    ],
)
async def test_host_and_origin_are_checked(http: ClientSession, headers: dict[str, str], status: int) -> None:
    async with http.get("/v1/sessions", headers=headers) as answer:
        assert answer.status == status


def test_allowed_hosts_and_wider_binds() -> None:
    tokens = [AccessToken("t", "p", ALL_BUT_RUNNER)]
    good = auth("t")
    wide = Gate(tokens, bind_host="0.0.0.0", allowed_hosts=["runner.example", "other.example:8443"])
    for host in ("10.0.0.7:8765", "runner.example", "RUNNER.example:1", "other.example:8443", "localhost"):
        assert wide.admit({"Host": host, **good}, "read").project == "p"
    for host in ("other.example:80", "evil.example", "", "a:b:c"):
        with pytest.raises(RunnerError, match="Host"):
            wide.admit({"Host": host, **good}, "read")
    cross = {"Host": "10.0.0.7:8765", "Origin": "https://runner.example", **good}
    assert wide.admit(cross, "read").project == "p"
    assert Gate(tokens, allowed_hosts=["*"]).admit({"Host": "anything.example", **good}, None).project == "p"


def test_a_gate_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        Gate([])


def test_a_token_is_not_in_a_repr() -> None:
    assert "secret-token" not in repr(AccessToken("secret-token", "p", ALL_BUT_RUNNER))


@pytest.mark.parametrize(("host", "expected"), [("127.0.0.2", True), ("::1", True), ("0.0.0.0", False), ("x", False)])
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
