"""A start that fails at any step leaves nothing, and tells in time; secrets go with their sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.sandbox.daytona.provider import DaytonaProvider
from tests.daytona_emulator.fixture import SECRET, EmulatorProcess
from tests.sandbox import bed
from tests.sandbox.daytona_bed import provider, spec, states


@pytest.fixture
async def daytona(daytona_emulator: EmulatorProcess) -> AsyncIterator[DaytonaProvider]:
    made = provider(daytona_emulator, secret_hosts=("api.example.com",))
    yield made
    daytona_emulator.scenario("restored")
    await made.close()
    assert made.live == ()


def creations(emulator: EmulatorProcess) -> int:
    return sum((one["method"], one["template"]) == ("POST", "/api/sandbox") for one in emulator.exchanges())


STEPS = [
    # the step behind the creation that is refused for ever
    "/user-home-dir$",
    "/process/execute$",
    "/files/bulk-upload$",
    "/process/session$",
    "/process/session/[^/]+/exec$",
    "/logs$",
    "/preview-url$",
    "^PREVIEW ",
]


@pytest.mark.parametrize("step", STEPS)
async def test_a_start_that_fails_behind_its_creation_leaves_nothing(
    daytona: DaytonaProvider, daytona_emulator: EmulatorProcess, step: str
) -> None:
    """Cases C7, C14: the sandbox was made; the step is named; the service's list is empty again."""
    daytona_emulator.fault(step, status=403, message="not this one", times=-1)
    with pytest.raises(RunnerError) as caught:
        await daytona.start(spec(seconds=4.0))
    assert caught.value.code == "sandbox_start_failed"
    assert creations(daytona_emulator) == 1
    await bed.until(lambda: daytona.live == () and states(daytona_emulator) == {})
    assert daytona.disks() == ()


@pytest.mark.parametrize("step", ["/process/execute$", "/logs$", "/preview-url$"])
async def test_a_step_that_never_returns_is_given_up_in_time(
    daytona: DaytonaProvider, daytona_emulator: EmulatorProcess, step: str
) -> None:
    """Cases I5, C14."""
    daytona_emulator.fault(step, delay=3.0, status=504, times=-1)
    with pytest.raises(RunnerError, match="in time") as caught:
        await daytona.start(spec(seconds=1.5))
    assert caught.value.code == "sandbox_start_failed"
    daytona_emulator.clear_faults()
    await bed.until(lambda: daytona.live == () and states(daytona_emulator) == {})


REFUSALS: list[dict[str, Any]] = [
    {"status": 403, "message": "Total CPU limit exceeded. Maximum allowed: 10."},
    {"status": 400, "message": "Total CPU limit exceeded. Maximum allowed: 10."},
    {"status": 429, "message": "ThrottlerException: Too Many Requests", "headers": {"Retry-After": "1"}},
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: str(refusal["status"]))
async def test_a_quota_is_told_as_one_and_not_asked_for_again_and_again(
    daytona: DaytonaProvider, daytona_emulator: EmulatorProcess, refusal: dict[str, Any]
) -> None:
    """Case I9: whatever status it has; a rate limit is asked again when it said so."""
    daytona_emulator.fault("^POST /api/sandbox$", times=-1, **refusal)
    with pytest.raises(RunnerError) as caught:
        await daytona.start(spec(seconds=2.5))
    assert caught.value.code == "provider_at_capacity"
    assert creations(daytona_emulator) <= (1 if refusal["status"] != 429 else 3)


async def test_secrets_go_with_their_sandbox_after_a_crash_too(daytona_emulator: EmulatorProcess) -> None:
    """Case K3: no request but the one that stores it holds the value (``fixture.careless``); nor does a disk."""
    terms: dict[str, Any] = {"secret_hosts": ("api.example.com",)}
    dead, heir = provider(daytona_emulator, **terms), provider(daytona_emulator, **terms)
    hidden: dict[str, Any] = {"env": {"KEY": SECRET}, "secret_names": frozenset({"KEY"})}
    left = await dead.start(spec(**hidden))
    service = await heir.service()
    assert len(await service._secrets("acp_")) == 1
    await heir.remove("default", "ses_1")
    await bed.until(lambda: states(daytona_emulator) == {})
    await heir._leaving.wait(left.name, 10.0)
    assert await service._secrets("acp_") == []
    assert (await left.destroy(0.0)).proof == "deleted"
    await dead.close()
    await heir.close()
