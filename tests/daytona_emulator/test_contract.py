"""The judges of the recorded exchanges notice what is wrong; the emulator in its own process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from daytona import AsyncDaytona, CreateSandboxFromSnapshotParams, DaytonaConfig

from runner.sandbox.census import scan
from tests.daytona_emulator import contract
from tests.daytona_emulator.contract import openapi_violations, sdk_operations, sdk_violations
from tests.daytona_emulator.fixture import EmulatorProcess
from tests.daytona_emulator.recording import Exchange
from tests.daytona_emulator.server import DaytonaEmulator


def said(
    answered: Any, method: str = "GET", template: str = "/api/volumes/{id}", status: int = 200, asked: Any = None
) -> list[Exchange]:
    return [Exchange(method, template, template, status, asked, answered, answered is not None)]


VOLUME: dict[str, Any] = {
    "id": "v",
    "name": "n",
    "organizationId": "o",
    "state": "ready",
    "createdAt": "2026-01-01T00:00:00Z",
    "updatedAt": "2026-01-01T00:00:00Z",
    "errorReason": None,
}
REFUSAL = {"statusCode": 404, "message": "m", "path": "/p", "timestamp": "t"}


@pytest.mark.parametrize(
    ("exchanges", "told"),
    [
        (said(VOLUME | {"state": "odd"}), "unknown value"),
        (said(VOLUME | {"surprise": 1}), "has no ['surprise']"),
        (said(VOLUME | {"id": 1}), "not a VolumeDto"),
        (said([VOLUME]), "not a VolumeDto"),
        (said(VOLUME, status=201), "the SDK takes ['200'"),
        (said(VOLUME, template="/api/volumes/{id}/odd"), "no operation of the SDK"),
        (said(None, "POST", "/api/secret", 200), "the SDK takes ['201'"),
        (said({"message": "m"}, status=404), "not the API's error body"),
        (said({"message": "m"}, template="/toolbox/{id}/work-dir", status=404), "not a ErrorResponse"),
        (said({}, template="/api/volumes"), "not a list"),
    ],
)
def test_the_generated_models_judge(exchanges: list[Exchange], told: str) -> None:
    assert told in "".join(sdk_violations(exchanges))


def test_what_is_right_passes() -> None:
    right = [
        *said(VOLUME),
        *said([VOLUME], template="/api/volumes"),
        *said({"dir": "/"}, template="/toolbox/{id}/work-dir"),
    ]
    right += said(REFUSAL, template="/toolbox/{id}/work-dir", status=404)
    assert sdk_violations(right) == openapi_violations(right) == []


def test_a_faulted_answer_is_nobodys_word() -> None:
    assert sdk_violations([Exchange("GET", "/api/volumes", "/api/volumes", 200, None, 7, True, faulted=True)]) == []


def test_the_clients_are_read_whole() -> None:
    assert len(sdk_operations("daytona_api_client_async")) > 150
    assert len(sdk_operations("daytona_toolbox_api_client_async")) > 80


async def test_the_published_openapi_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = '{"type": "object", "required": ["name"], "properties": {"name": {"type": "string", "nullable": true}}}'
    answers = f'{{"200": {{"content": {{"application/json": {{"schema": {schema}}}}}}}}}'
    body = f'{{"content": {{"application/json": {{"schema": {schema}}}}}}}'
    operation = f'{{"requestBody": {body}, "responses": {answers}}}'
    (tmp_path / "api.json").write_text(
        f'{{"paths": {{"/thing/{{named}}": {{"post": {operation}}}}}, "components": {{}}}}'
    )
    monkeypatch.setenv("DAYTONA_OPENAPI", str(tmp_path))
    contract.spec_folder.cache_clear()
    contract._spec.cache_clear()
    try:
        thing = "/api/thing/{id}"
        assert openapi_violations(said({"name": None}, "POST", thing, asked={"name": "a"})) == []
        assert "answer $" in openapi_violations(said({}, "POST", thing))[0]
        assert "request $.name" in openapi_violations(said({"name": "a"}, "POST", thing, asked={"name": 1}))[0]
        assert "the OpenAPI has ['200']" in openapi_violations(said({}, "POST", thing, 201))[0]
        assert "no operation" in openapi_violations(said({}, "GET", thing))[0]
    finally:
        contract.spec_folder.cache_clear()
        contract._spec.cache_clear()


async def test_in_a_process_of_its_own(daytona_emulator: EmulatorProcess) -> None:
    daytona_emulator.bake("baked", {"hello": b"#!/bin/sh\necho hello\n"})
    daytona_emulator.fault("^POST /api/sandbox$", status=503, message="busy")
    config = DaytonaConfig(api_key=daytona_emulator.api_key, api_url=daytona_emulator.api_url, target="us")
    async with AsyncDaytona(config) as sdk:
        asked = CreateSandboxFromSnapshotParams(name="one", snapshot="baked", auto_stop_interval=5)
        with pytest.raises(Exception, match="busy"):
            await sdk.create(asked)
        box = await sdk.create(asked)
        assert (await box.process.exec("./hello; (sleep 300 >/dev/null 2>&1 &)")).result == "hello\n"
        assert daytona_emulator.state()["processes"]
        assert scan(daytona_emulator.marker)
        daytona_emulator.advance(301)
        daytona_emulator.scenario("restored")
    state = daytona_emulator.state()
    assert [(one["name"], one["state"]) for one in state["sandboxes"]] == [("one", "stopped")]
    assert state["processes"] == []
    assert state["faults"] == ["POST /api/sandbox"]
    assert len(daytona_emulator.exchanges()) > 3
    with pytest.raises(AssertionError, match="no such scenario"):
        daytona_emulator.scenario("nonsense")


async def test_everything_ends_with_it_even_when_it_was_killed() -> None:
    emulator = EmulatorProcess()
    config = DaytonaConfig(api_key=emulator.api_key, api_url=emulator.api_url, target="us")
    async with AsyncDaytona(config) as sdk:
        box = await sdk.create()
        await box.process.exec("setsid sleep 300 >/dev/null 2>&1 &")
    emulator.kill()
    assert scan(emulator.marker)
    emulator.close()
    assert scan(emulator.marker) == []


async def test_sandboxes_that_are_gone_hold_no_files(emulator: DaytonaEmulator, sdk: AsyncDaytona) -> None:
    counts = []
    for number in range(30):
        box = await sdk.create(CreateSandboxFromSnapshotParams(name=f"many-{number}"))
        await box.process.create_session("s")
        await box.get_preview_link(number + 1)
        await box.delete(wait=True)
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] <= counts[19] + 2
