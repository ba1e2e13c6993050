"""The Daytona provider with the real SDK against the emulator (cases C and D, remote)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from runner.sandbox.daytona.provider import DaytonaProvider
from runner.sandbox.selfcheck import check
from tests.daytona_emulator.fixture import EmulatorProcess
from tests.sandbox import bed
from tests.sandbox.daytona_bed import disk, provider, spec, states


@pytest.fixture
async def daytona(daytona_emulator: EmulatorProcess) -> AsyncIterator[DaytonaProvider]:
    made = provider(daytona_emulator)
    yield made
    await made.close()
    assert made.live == ()


async def test_started_asleep_woken_away(daytona: DaytonaProvider, daytona_emulator: EmulatorProcess) -> None:
    sandbox = await daytona.start(spec(workspace_files={"sub/given.txt": b"given"}, home_files={"conf": b"c"}))
    talk = bed.Talk(sandbox)
    assert await talk.say("hello") == "hello"
    assert await talk.say("cwd") == sandbox.workspace
    name = daytona.sandbox_name("default", "ses_1")
    assert states(daytona_emulator) == {name: "started"}
    root = disk(daytona_emulator, name) / "acp-runner"
    assert (root / "workspace/sub/given.txt").read_bytes() == b"given"
    assert (root / "home/conf").read_bytes() == b"c"
    (root / "workspace/kept.txt").write_text("kept")
    identity = await daytona.home_identity("default", "ses_1")
    await sandbox.mark("t").set(5.0)
    ran = await sandbox.run("r", ["/bin/sh", "-c", "sleep 100 & echo $HOME"], lambda data: None)
    assert ran.code == 0
    assert (await sandbox.kill_turn("t", 1.0)).killed == 1

    gone = await sandbox.destroy(0.0)
    assert (gone.proven, gone.proof) == (True, "stopped")
    assert states(daytona_emulator) == {name: "stopped"}
    assert daytona.live == ()
    assert daytona_emulator.state()["processes"] == []

    again = await daytona.start(spec(seat_id="seat_2"))
    assert again.woken
    assert await bed.Talk(again).say("back") == "back"
    assert (root / "workspace/kept.txt").read_text() == "kept"
    assert await daytona.home_identity("default", "ses_1") == identity
    await again.destroy(0.0)

    await daytona.remove("default", "ses_1")
    await bed.until(lambda: states(daytona_emulator) == {})
    assert await daytona.home_identity("default", "ses_1") is None
    assert daytona.counts["created"] == daytona.counts["woken"] == daytona.counts["deleted"] == 1


async def test_it_keeps_every_promise(daytona: DaytonaProvider, daytona_emulator: EmulatorProcess) -> None:
    """The self-check that ``doctor --sandbox daytona`` runs; nothing stays at the service."""
    checks = await check(daytona)
    assert [item for item in checks if not item.ok] == []
    assert len(checks) >= 20
    assert states(daytona_emulator) == {}
