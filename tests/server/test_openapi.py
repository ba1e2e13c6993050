"""The description is valid, complete, and what the server does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi import checks

from runner.config import Settings
from runner.server.app import build_app, start_site, stop_site
from runner.server.openapi import describe
from runner.server.routes import OPEN, ROUTES
from tests.server.double import TOKENS, FakeSessions, auth

DESCRIPTION: dict[str, Any] = orjson.loads(describe())
api = schemathesis.openapi.from_dict(DESCRIPTION)
CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.unsupported_method,
]


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """The app on a loop of its own: schemathesis is synchronous."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        app = asyncio.run_coroutine_threadsafe(_start(), loop).result(10)
        yield app[1]
        asyncio.run_coroutine_threadsafe(stop_site(app[0]), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _start() -> Any:
    return await start_site(build_app(FakeSessions(), Settings(), TOKENS), "127.0.0.1", 0)


def test_every_route_is_described() -> None:
    described = {(method.upper(), path) for path, item in DESCRIPTION["paths"].items() for method in item}
    assert described == {(route.method, route.path) for route in ROUTES}
    assert DESCRIPTION["openapi"] == "3.1.0"
    for route in ROUTES:
        operation = DESCRIPTION["paths"][route.path][route.method.lower()]
        assert ("401" in operation["responses"]) is (route.scope != OPEN)


def test_the_dispatch_body_is_described() -> None:
    schema = DESCRIPTION["components"]["schemas"]["DispatchRequest"]
    assert schema["required"] == ["prompt"]
    assert schema["additionalProperties"] is False
    assert {"on_busy", "secrets", "limits", "workspace"} <= set(schema["properties"])


def test_no_reference_dangles() -> None:
    found: set[str] = set()

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                found.add(value["$ref"])
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)

    walk(DESCRIPTION)
    names = {f"#/components/schemas/{name}" for name in DESCRIPTION["components"]["schemas"]}
    assert found
    assert found <= names


@api.parametrize()
@settings(max_examples=25, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
def test_the_server_does_what_it_describes(case: schemathesis.Case, served: str) -> None:
    response = case.call(base_url=served, headers=auth(), timeout=10)
    case.validate_response(response, checks=CHECKS)
