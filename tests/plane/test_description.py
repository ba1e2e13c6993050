"""The coordination routes do what their description says, whatever is sent."""

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

from runner.server.coordination import COORDINATION_ROUTES
from runner.server.openapi import describe
from runner.store.codec import CALLS
from tests.plane.bed import ServedPlane, serve_plane
from tests.server.double import auth

DESCRIBED = [route for route in COORDINATION_ROUTES if route.method == "POST"]
DESCRIPTION: dict[str, Any] = orjson.loads(describe(DESCRIBED))
api = schemathesis.openapi.from_dict(DESCRIPTION)
CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """The plane on a loop of its own: schemathesis is synchronous."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        plane: ServedPlane = asyncio.run_coroutine_threadsafe(serve_plane(), loop).result(10)
        yield plane.url
        asyncio.run_coroutine_threadsafe(plane.stop(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@api.parametrize()
@settings(max_examples=15, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
def test_a_plane_does_what_it_describes(case: schemathesis.Case, served: str) -> None:
    response = case.call(base_url=served, headers=auth("run-p"), timeout=10)
    case.validate_response(response, checks=CHECKS)


def test_no_reference_of_the_description_dangles() -> None:
    text = orjson.dumps(DESCRIPTION).decode()
    names = {name.split('"')[0] for name in text.split("#/components/schemas/")[1:]}
    assert names
    assert names <= set(DESCRIPTION["components"]["schemas"])


def test_the_calls_are_the_port_s_own() -> None:
    assert {"admit", "end", "append", "records", "open_turns", "claim_command"} <= CALLS
    assert not {"close", "open", "__init__"} & CALLS
