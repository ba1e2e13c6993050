"""The life of a sandbox, driven by the real SDK."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from daytona import (
    AsyncDaytona,
    AsyncSandbox,
    CreateSandboxFromSnapshotParams,
    DaytonaConfig,
    ListSandboxesQuery,
    SandboxState,
)
from daytona.common.errors import (
    DaytonaAuthenticationError,
    DaytonaBadRequestError,
    DaytonaConflictError,
    DaytonaNotFoundError,
)

from tests.daytona_emulator.server import DaytonaEmulator


async def names(sdk: AsyncDaytona, **query: Any) -> list[str]:
    return [found.name async for found in sdk.list(ListSandboxesQuery(**query))]


async def test_created_used_stopped_started_deleted(sdk: AsyncDaytona, box: AsyncSandbox) -> None:
    assert box.state == SandboxState.STARTED
    assert (await sdk.get("one")).id == box.id
    await box.fs.upload_file(b"kept", "kept.txt")
    await box.process.create_session("s")
    token = (await box.get_preview_link(1)).token

    await box.stop()
    assert box.state == SandboxState.STOPPED
    with pytest.raises(DaytonaBadRequestError, match="not in a stoppable state"):
        await box.stop()
    with pytest.raises(DaytonaBadRequestError, match="Is the Sandbox started"):
        await box.process.exec("true")
    await box.start()
    assert await box.fs.download_file("kept.txt") == b"kept"
    assert await box.process.list_sessions() == []
    assert (await box.get_preview_link(1)).token != token

    await box.delete(wait=True)
    with pytest.raises(DaytonaNotFoundError, match="not found"):
        await sdk.get(box.id)


async def test_a_stop_ends_every_process(emulator: DaytonaEmulator, box: AsyncSandbox) -> None:
    deaf = "trap '' TERM HUP; while :; do sleep 0.1; done"
    started = await box.process.exec(f'(setsid nohup bash -c "{deaf}" >/dev/null 2>&1 &) ; sleep 0.1')
    assert started.exit_code == 0
    await box.process.exec("env -i setsid sleep 300 >/dev/null 2>&1 & sleep 0.05")
    assert emulator.processes.alive()
    await box.stop()
    assert emulator.processes.alive() == []


async def test_archive_and_back(box: AsyncSandbox) -> None:
    with pytest.raises(DaytonaBadRequestError, match="Sandbox is not stopped"):
        await box.archive()
    await box.stop()
    await box.archive()
    for _ in range(200):
        await box.refresh_data()
        if box.state == SandboxState.ARCHIVED:
            break
        await asyncio.sleep(0.01)
    await box.start()
    assert box.state == SandboxState.STARTED


async def test_a_name_is_taken_until_its_sandbox_is_deleted(sdk: AsyncDaytona, box: AsyncSandbox) -> None:
    again = CreateSandboxFromSnapshotParams(name="one")
    with pytest.raises(DaytonaConflictError, match="Sandbox with name one already exists"):
        await sdk.create(again)
    await box.delete()
    assert (await sdk.create(again)).id != box.id


async def test_list_by_label_over_pages(sdk: AsyncDaytona, box: AsyncSandbox) -> None:
    for number in range(4):
        await sdk.create(CreateSandboxFromSnapshotParams(name=f"more-{number}", labels={"runner": "r2"}))
    assert await names(sdk, labels={"runner": "r1"}) == ["one"]
    assert await names(sdk, labels={"runner": "r2"}, limit=1) == ["more-0", "more-1", "more-2", "more-3"]
    assert len(await names(sdk)) == 5
    assert await box.set_labels({"runner": "r2"})
    assert await names(sdk, labels={"runner": "r1"}) == []


async def test_a_change_in_progress_refuses_another(
    emulator: DaytonaEmulator, sdk: AsyncDaytona, box: AsyncSandbox
) -> None:
    emulator.boxes.step = 0.2
    stopping = asyncio.create_task(box.stop())
    same = await sdk.get(box.id)
    while same.desired_state != "stopped":
        await same.refresh_data()
    with pytest.raises(DaytonaConflictError, match="Sandbox state change in progress"):
        await same.delete()
    await stopping
    await same.delete(wait=True)


async def test_intervals_and_the_cron(emulator: DaytonaEmulator, sdk: AsyncDaytona, box: AsyncSandbox) -> None:
    await box.set_autostop_interval(5)
    await box.set_auto_delete_interval(60)
    await emulator.advance(4 * 60)
    await box.refresh_activity()
    await emulator.advance(4 * 60)
    await box.refresh_data()
    assert box.state == SandboxState.STARTED
    await emulator.advance(2 * 60)
    await box.refresh_data()
    assert box.state == SandboxState.STOPPED
    await emulator.advance(61 * 60)
    assert await names(sdk) == []


async def test_time_to_live_ends_a_busy_one(emulator: DaytonaEmulator, sdk: AsyncDaytona) -> None:
    await sdk.create(CreateSandboxFromSnapshotParams(name="brief", ttl_minutes=30, auto_stop_interval=0))
    await emulator.advance(31 * 60)
    assert await names(sdk) == []


async def test_an_ephemeral_one_goes_with_its_stop(sdk: AsyncDaytona) -> None:
    box = await sdk.create(CreateSandboxFromSnapshotParams(name="short", auto_delete_interval=0))
    await box.stop()
    for _ in range(200):
        if not await names(sdk):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the sandbox is still there")


async def test_a_wrong_key(emulator: DaytonaEmulator) -> None:
    async with AsyncDaytona(DaytonaConfig(api_key="wrong", api_url=emulator.api_url, target="us")) as sdk:
        with pytest.raises(DaytonaAuthenticationError):
            await sdk.create()
    assert emulator.boxes.all() == []


async def test_events_beat_the_poll(emulator: DaytonaEmulator, sdk: AsyncDaytona) -> None:
    emulator.boxes.step = 0.05
    for _ in range(200):
        if emulator.events.listeners:
            break
        await asyncio.sleep(0.01)
    await sdk.create(CreateSandboxFromSnapshotParams(name="told"))
    polls = [one for one in emulator.recording.all() if (one.method, one.template) == ("GET", "/api/sandbox/{id}")]
    assert len(polls) == 1
