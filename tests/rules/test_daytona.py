"""What a Daytona says and what follows from it (``runner.rules.daytona``); texts as SANDBOXES A5 has them."""

from __future__ import annotations

from typing import Any

import pytest

from runner.errors import RunnerError
from runner.rules.daytona import (
    Failure,
    Verdict,
    disk_over,
    fits,
    judge,
    late_creation,
    minutes,
    next_step,
    reap,
    start_code,
    trouble,
)

STATES = [
    *("creating", "restoring", "destroyed", "destroying", "started", "stopped", "starting", "stopping", "error"),
    *("build_failed", "pending_build", "building_snapshot", "unknown", "pulling_snapshot", "archived", "archiving"),
    *("resizing", "snapshotting", "forking", "pausing", "paused", "resuming", "unknown_default_open_api"),
]


def http(status: int, message: str = "", **more: Any) -> Failure:
    return Failure("http", status, message=message, **more)


ANSWERS = [
    ("create", http(400, "Total CPU limit exceeded. Maximum allowed: 10.\nUpgrade"), "fail", "provider_at_capacity"),
    ("create", http(400, "Total memory limit exceeded. Maximum allowed: 10GiB."), "fail", "provider_at_capacity"),
    ("create", http(400, "Total disk limit exceeded."), "fail", "provider_at_capacity"),
    ("create", http(400, "No available runners"), "fail", "provider_at_capacity"),
    ("create", http(400, "No available nodes"), "fail", "provider_at_capacity"),
    ("create", http(400, "Sandbox resource limit reached (16)"), "fail", "provider_at_capacity"),
    ("create", http(400, "CPU request 8 exceeds maximum allowed per sandbox (4)."), "fail", "sandbox_start_failed"),
    ("create", http(403, "Organization is suspended: Payment"), "fail", "sandbox_start_failed"),
    ("create", http(403, "Total CPU limit exceeded. Maximum allowed: 10."), "fail", "provider_at_capacity"),
    ("create", http(401, "Unauthorized"), "fail", "sandbox_start_failed"),
    ("create", http(404, "Snapshot S not found."), "fail", "sandbox_start_failed"),
    ("create", http(400, "Snapshot S not found. Did you add it?"), "fail", "sandbox_start_failed"),
    ("create", http(400, "Snapshot S is pulling"), "retry", "sandbox_start_failed"),
    ("create", http(400, "Snapshot S is inactive"), "activate", "sandbox_start_failed"),
    ("create", http(409, "Sandbox with name X already exists"), "adopt", "sandbox_start_failed"),
    ("create", http(409, "Sandbox state change in progress"), "look", "sandbox_start_failed"),
    ("create", http(502), "look", "sandbox_start_failed"),
    ("create", Failure("timeout"), "look", "sandbox_start_failed"),
    ("create", Failure("connection"), "look", "sandbox_start_failed"),
    ("create", Failure("queue"), "fail", "provider_at_capacity"),
    ("create", http(422, "name must be shorter"), "fail", "sandbox_start_failed"),
    ("start", http(400, "Sandbox is in an errored state"), "recover", "sandbox_start_failed"),
    ("start", http(409, "Sandbox state change in progress"), "look", "sandbox_start_failed"),
    ("start", http(404, "Sandbox with ID or name X not found"), "gone", "sandbox_lost"),
    ("stop", http(400, "Sandbox is not in a stoppable state"), "look", "sandbox_lost"),
    ("stop", http(404), "gone", "sandbox_lost"),
    ("delete", http(404), "gone", "sandbox_lost"),
    ("delete", http(503), "look", "sandbox_lost"),
    ("exec", http(400, "bad request: no IP address found. Is the Sandbox started?"), "look", "sandbox_lost"),
    ("exec", http(502), "look", "sandbox_lost"),
    ("exec", Failure("connection"), "look", "sandbox_lost"),
    ("exec", http(404, "sandbox container not found: No such container"), "gone", "sandbox_lost"),
    ("read", http(502), "retry", "sandbox_lost"),
    ("read", http(504), "retry", "sandbox_lost"),
    ("read", Failure("connection"), "retry", "sandbox_lost"),
    ("read", Failure("spot"), "gone", "sandbox_lost"),
    ("read", http(403), "fail", "sandbox_lost"),
]


@pytest.mark.parametrize(("call", "failure", "action", "code"), ANSWERS)
def test_the_error_table(call: Any, failure: Failure, action: str, code: str) -> None:
    verdict = judge(call, failure)
    assert (verdict.action, verdict.code) == (action, code)
    RunnerError(verdict.code, "every code is one of ours")


@pytest.mark.parametrize(("asked", "waits"), [(None, 5.0), (7.0, 7.0), (0.0, 0.5), (-1.0, 0.5), (3600.0, 60.0)])
def test_a_rate_limit_says_how_long(asked: float | None, waits: float) -> None:
    assert judge("exec", http(429, retry_after=asked)) == Verdict("retry", "provider_at_capacity", waits)


@pytest.mark.parametrize("call", ["create", "start", "stop", "delete", "exec"])
@pytest.mark.parametrize("failure", [Failure("timeout"), Failure("connection"), http(500), http(502), http(504)])
def test_no_side_effect_is_repeated_without_a_look(call: Any, failure: Failure) -> None:
    assert judge(call, failure).action == "look"


TABLE = {
    "run": {
        "use": ["started"],
        "start": ["stopped", "archived", "paused"],
        "replace": ["destroyed", "destroying", "error", "build_failed"],
    },
    "sleep": {
        "stop": ["started"],
        "done": ["stopped", "archived", "paused", "destroyed", "destroying"],
        "delete": ["error", "build_failed"],
    },
    "gone": {"done": ["destroyed", "destroying"]},
}


@pytest.mark.parametrize("want", ["run", "sleep", "gone"])
@pytest.mark.parametrize("state", STATES)
def test_the_state_table(want: Any, state: str) -> None:
    named = {name: step for step, names in TABLE[want].items() for name in names}
    assert next_step(want, state) == named.get(state, "delete" if want == "gone" else "wait")


def test_a_change_under_way_is_waited_for() -> None:
    assert next_step("run", "started", desired="stopped") == "wait"
    assert next_step("run", "stopped", desired="started") == "wait"
    assert next_step("sleep", "started", desired="stopped") == "wait"
    assert next_step("sleep", "started", desired="started") == "stop"


def test_an_errored_one_is_repaired_once() -> None:
    assert next_step("run", "error", recoverable=True) == "recover"
    assert next_step("run", "error", recoverable=True, recovered=True) == "replace"
    assert next_step("run", "build_failed", recoverable=True) == "replace"


@pytest.mark.parametrize(
    ("again", "state", "what"),
    [
        (True, "started", "adopt"),
        (True, "starting", "adopt"),
        (True, "error", "delete"),
        (False, "started", "delete"),
        (False, "creating", "delete"),
        (False, "destroying", "done"),
    ],
)
def test_late_creations_have_an_owner_or_go(again: bool, state: str, what: str) -> None:
    assert late_creation(again, state) == what


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({}, "keep"),
        ({"known": False}, "delete"),
        ({"known": False, "age_seconds": 30.0}, "keep"),
        ({"known": False, "in_use": True}, "keep"),
        ({"state": "error"}, "keep"),
        ({"state": "error", "silent_seconds": 700.0}, "delete"),
        ({"state": "error", "in_use": True}, "keep"),
        ({"known": False, "state": "destroying"}, "keep"),
        ({"known": False, "state": "destroying", "silent_seconds": 4000.0}, "stuck"),
        ({"state": "stopped"}, "keep"),
        ({"known": False, "state": "stopped"}, "delete"),
        ({"known": False, "state": "destroyed"}, "keep"),
        ({"silent_seconds": 119.0}, "keep"),
        ({"silent_seconds": 121.0}, "sleep"),
        ({"silent_seconds": 121.0, "owned": True}, "keep"),
        ({"silent_seconds": 121.0, "in_use": True}, "keep"),
        ({"silent_seconds": 121.0, "state": "starting"}, "keep"),
    ],
)
def test_the_reaper_takes_what_nobody_knows(changes: dict[str, Any], what: str) -> None:
    facts = {
        "known": True,
        "in_use": False,
        "owned": False,
        "state": "started",
        "age_seconds": 4000.0,
        "silent_seconds": 0.0,
        "orphan_seconds": 120.0,
    }
    assert reap(**{**facts, **changes}) == what


@pytest.mark.parametrize(
    ("state", "silent_seconds", "over"),
    [
        ("stopped", 1800.0, True),
        ("archived", 9000.0, True),
        ("stopped", 1775.0, True),
        ("stopped", 900.0, False),
        ("started", 9000.0, False),
        ("starting", 9000.0, False),
        ("destroying", 9000.0, False),
    ],
)
def test_a_disk_goes_only_where_nobody_used_it_since(state: str, silent_seconds: float, over: bool) -> None:
    assert disk_over(state, silent_seconds, 1800.0) is over


@pytest.mark.parametrize(
    ("failure", "word"),
    [
        (http(401, "Invalid credentials"), "key"),
        (http(403, "Organization is suspended: Payment"), "account"),
        (Failure("connection", message="refused"), "not reached"),
        (http(403, "Forbidden"), None),
        (http(429), None),
        (http(502), None),
        (Failure("timeout"), None),
        (Failure("queue"), None),
    ],
)
def test_what_makes_the_whole_service_unavailable(failure: Failure, word: str | None) -> None:
    told = trouble(failure)
    assert told is None if word is None else told is not None and word in told


def test_a_start_loses_no_sandbox() -> None:
    codes = ("sandbox_lost", "sandbox_start_failed", "provider_at_capacity")
    assert [start_code(code) for code in codes] == ["sandbox_start_failed", *codes[1:]]


def test_capacity_is_strict() -> None:
    assert [fits(taken, 2) for taken in range(4)] == [True, True, False, False]
    assert fits(1000, 0)


def test_an_interval_is_never_switched_off() -> None:
    assert [minutes(seconds) for seconds in (0.0, 1.0, 60.0, 61.0, 1800.0)] == [1, 1, 1, 2, 30]
