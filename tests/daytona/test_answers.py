"""Every row of the error table, from the service's answer through the real SDK to what is done (SANDBOXES A5)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from runner.rules.daytona import judge
from runner.sandbox.daytona.service import CallFailed, DaytonaService, Plan
from tests.daytona_emulator.fixture import EmulatorProcess
from tests.daytona_emulator.problems import rate_limited

LABELS = {"acp-runner-store": "store_1"}
JSON = {"Content-Type": "application/json"}
MATCH = {
    "create": "^POST /api/sandbox$",
    "start": "^POST /api/sandbox/[^/]+/start$",
    "stop": "^POST /api/sandbox/[^/]+/stop$",
    "delete": "^DELETE /api/sandbox/",
    "read": "^GET /api/sandbox$",
    "exec": "/process/execute$",
}
NO_ANSWER: list[tuple[str, str, str, str]] = [
    # call, how its answer is lost, action, code
    ("create", "before", "look", "sandbox_start_failed"),
    ("create", "after", "look", "sandbox_start_failed"),
    ("start", "before", "look", "sandbox_start_failed"),
    ("stop", "after", "look", "sandbox_lost"),
    ("delete", "before", "look", "sandbox_lost"),
    ("read", "before", "retry", "sandbox_lost"),
    ("exec", "before", "look", "sandbox_lost"),
    ("exec", "after", "look", "sandbox_lost"),
]
ANSWERS: list[tuple[str, int, str, str, str]] = [
    # call, status, text, action, code
    ("create", 400, "Total CPU limit exceeded. Maximum allowed: 10.", "fail", "provider_at_capacity"),
    ("create", 400, "Total memory limit exceeded. Maximum allowed: 10GiB.", "fail", "provider_at_capacity"),
    ("create", 400, "Total disk limit exceeded. Maximum allowed: 30GiB.", "fail", "provider_at_capacity"),
    ("create", 400, "No available runners", "fail", "provider_at_capacity"),
    ("create", 400, "Sandbox resource limit reached (16)", "fail", "provider_at_capacity"),
    ("create", 400, "CPU request 8 exceeds maximum allowed per sandbox (4).", "fail", "sandbox_start_failed"),
    ("create", 400, "Snapshot S is pulling", "retry", "sandbox_start_failed"),
    ("create", 400, "Snapshot S is pending", "retry", "sandbox_start_failed"),
    ("create", 400, "Snapshot S is inactive", "activate", "sandbox_start_failed"),
    ("create", 400, "Snapshot S not found. Did you add it?", "fail", "sandbox_start_failed"),
    ("create", 401, "Invalid credentials", "fail", "sandbox_start_failed"),
    ("create", 403, "Total CPU limit exceeded. Maximum allowed: 10.", "fail", "provider_at_capacity"),
    ("create", 403, "Organization is suspended: Payment", "fail", "sandbox_start_failed"),
    ("create", 403, "Region R is not available to the organization", "fail", "sandbox_start_failed"),
    ("create", 404, "Snapshot S not found", "fail", "sandbox_start_failed"),
    ("create", 409, "Sandbox with name X already exists", "adopt", "sandbox_start_failed"),
    ("create", 410, "Gone", "fail", "sandbox_start_failed"),
    ("create", 422, "name must be shorter", "fail", "sandbox_start_failed"),
    *[("create", status, "", "look", "sandbox_start_failed") for status in (408, 500, 502, 503, 504)],
    ("start", 400, "Sandbox is in an errored state", "recover", "sandbox_start_failed"),
    ("start", 400, "Total CPU limit exceeded. Maximum allowed: 10.", "fail", "provider_at_capacity"),
    ("start", 404, "Sandbox with ID or name X not found", "gone", "sandbox_lost"),
    ("start", 409, "Sandbox state change in progress", "look", "sandbox_start_failed"),
    ("start", 502, "", "look", "sandbox_start_failed"),
    ("stop", 400, "Sandbox is not in a stoppable state", "look", "sandbox_lost"),
    ("stop", 404, "", "gone", "sandbox_lost"),
    ("stop", 503, "", "look", "sandbox_lost"),
    ("delete", 404, "", "gone", "sandbox_lost"),
    ("delete", 409, "Sandbox state change in progress", "look", "sandbox_lost"),
    ("delete", 500, "", "look", "sandbox_lost"),
    ("read", 403, "Forbidden", "fail", "sandbox_lost"),
    *[("read", status, "", "retry", "sandbox_lost") for status in (408, 500, 502, 503, 504)],
    ("exec", 400, "bad request: no IP address found. Is the Sandbox started?", "look", "sandbox_lost"),
    ("exec", 404, "sandbox container not found: No such container", "gone", "sandbox_lost"),
    ("exec", 502, "", "look", "sandbox_lost"),
    ("exec", 408, "timed out", "look", "sandbox_lost"),
]


class Calls:
    """One call of each kind, on a sandbox that is there."""

    def __init__(self, emulator: EmulatorProcess, service: DaytonaService) -> None:
        self.emulator, self.service = emulator, service
        self.identity = ""
        self.made = 0

    def plan(self) -> Plan:
        self.made += 1
        return Plan(f"acp-{self.made}", LABELS, "", 15, 31, 600)

    async def failed(self, call: str, seconds: float = 5.0) -> CallFailed:
        """What the call raises."""
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "create": lambda: self.service.create(self.plan(), seconds),
            "start": lambda: self.service.start(self.identity, seconds),
            "stop": lambda: self.service.stop(self.identity, seconds),
            "delete": lambda: self.service.delete(self.identity),
            "read": lambda: self.service.labelled(LABELS),
            "exec": lambda: self.service.execute(self.identity, "true", seconds),
        }
        with pytest.raises(CallFailed) as caught:
            await calls[call]()
        self.emulator.clear_faults()
        assert caught.value.call == call
        return caught.value

    def told(self, **changes: Any) -> dict[str, Any]:
        """The sandbox as a read shows it, changed."""
        shown = [one["answered"] for one in self.emulator.exchanges() if one["template"] == "/api/sandbox/{id}"]
        return {**shown[-1], **changes}


@pytest.fixture
async def calls(daytona_emulator: EmulatorProcess) -> AsyncIterator[Calls]:
    service = DaytonaService(daytona_emulator.api_url, daytona_emulator.api_key, "us")
    made = Calls(daytona_emulator, service)
    made.identity = (await service.create(made.plan(), 10.0)).id
    yield made
    await service.close()


async def test_what_the_service_answers(calls: Calls) -> None:
    found = []
    for call, status, text, _, _ in ANSWERS:
        calls.emulator.fault(MATCH[call], status=status, message=text)
        failed = await calls.failed(call)
        verdict = judge(failed.call, failed.failure)
        found.append((call, status, text, verdict.action, verdict.code))
        assert text in str(failed)
    assert found == ANSWERS


async def test_what_it_does_not_answer(calls: Calls) -> None:
    found = []
    for call, drop, _, _ in NO_ANSWER:
        calls.emulator.fault(MATCH[call], drop=drop, times=-1)
        failed = await calls.failed(call)
        verdict = judge(failed.call, failed.failure)
        found.append((call, drop, verdict.action, verdict.code))
        assert failed.failure.kind == "connection"
    assert found == NO_ANSWER


@pytest.mark.parametrize("call", ["create", "start", "stop", "delete", "read", "exec"])
async def test_a_rate_limit_of_any_call_says_how_long(calls: Calls, call: str) -> None:
    problem = rate_limited("7")
    calls.emulator.fault(MATCH[call], status=429, message=problem.message, headers=problem.headers)
    failed = await calls.failed(call)
    verdict = judge(failed.call, failed.failure)
    assert (verdict.action, verdict.code, verdict.seconds) == ("retry", "provider_at_capacity", 7.0)


async def test_what_takes_too_long_for_us(calls: Calls) -> None:
    """The SDK's own deadline, not an answer."""
    calls.emulator.fault(MATCH["create"], delay=2.0)
    failed = await calls.failed("create", 0.2)
    assert (failed.failure.kind, judge("create", failed.failure).action) == ("timeout", "look")


ENDINGS = [
    ({"state": "destroyed", "queueTimedOutAt": "2026-01-01T00:00:00.000Z"}, "queue", "fail", "provider_at_capacity"),
    ({"state": "destroyed", "spotEvictedAt": "2026-01-01T00:00:00.000Z"}, "spot", "gone", "sandbox_lost"),
    ({"state": "error", "errorReason": "Timeout while starting"}, "http", "look", "sandbox_start_failed"),
    ({"state": "build_failed", "errorReason": "no space"}, "http", "look", "sandbox_start_failed"),
]


@pytest.mark.parametrize(("shown", "kind", "action", "code"), ENDINGS)
async def test_how_a_creation_ends_by_itself(
    calls: Calls, shown: dict[str, Any], kind: str, action: str, code: str
) -> None:
    """It is admitted; what it became is said by its state."""
    await calls.service.get(calls.identity)
    dead = json.dumps(calls.told(**shown))
    calls.emulator.fault(MATCH["create"], status=200, body=json.dumps(calls.told(state="creating")), headers=JSON)
    calls.emulator.fault("^GET /api/sandbox/", status=200, body=dead, headers=JSON, times=-1)
    async with asyncio.timeout(20):
        failed = await calls.failed("create", 10.0)
    verdict = judge("create", failed.failure)
    assert (failed.failure.kind, verdict.action, verdict.code) == (kind, action, code)
