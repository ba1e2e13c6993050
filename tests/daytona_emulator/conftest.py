"""An emulator in the loop of the test and the real SDK against it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from daytona import AsyncDaytona, AsyncSandbox, CreateSandboxFromSnapshotParams, DaytonaConfig

from tests.daytona_emulator.contract import openapi_violations, sdk_violations
from tests.daytona_emulator.server import DaytonaEmulator


@pytest.fixture
async def emulator() -> AsyncIterator[DaytonaEmulator]:
    """Whatever a test does: no process is left, and nothing was said that the service would not say."""
    async with DaytonaEmulator(step=0.01) as running:
        yield running
    assert running.processes.alive() == []
    assert sdk_violations(running.recording.all()) == []
    assert openapi_violations(running.recording.all()) == []


@pytest.fixture
async def sdk(emulator: DaytonaEmulator) -> AsyncIterator[AsyncDaytona]:
    config = DaytonaConfig(api_key=emulator.api_key, api_url=emulator.api_url, target="us")
    async with AsyncDaytona(config) as client:
        yield client


@pytest.fixture
async def box(sdk: AsyncDaytona) -> AsyncSandbox:
    return await sdk.create(CreateSandboxFromSnapshotParams(name="one", labels={"runner": "r1", "cell": "c1"}))
