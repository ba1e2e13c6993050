"""What is done beside the turns: activity, disks, what others left, deletions that hang (DESIGN 3.10)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from runner.sandbox.daytona.provider import DaytonaProvider
from tests.daytona_emulator.fixture import EmulatorProcess
from tests.sandbox import bed
from tests.sandbox.daytona_bed import provider, spec, states

LAST_ACTIVITY = "/api/sandbox/{id}/last-activity"


@pytest.fixture
async def daytona(daytona_emulator: EmulatorProcess) -> AsyncIterator[DaytonaProvider]:
    made = provider(daytona_emulator, auto_stop_seconds=0.9, orphan_seconds=1.0)
    yield made
    daytona_emulator.scenario("restored")
    await made.close()


async def yes(project: str, session_id: str) -> bool:
    return True


async def no(project: str, session_id: str) -> bool:
    return False


def refreshed(emulator: EmulatorProcess) -> int:
    return sum(one["template"] == LAST_ACTIVITY for one in emulator.exchanges())


async def minutes_pass(emulator: EmulatorProcess, count: int) -> None:
    """Each nearly as long as the auto-stop; in between a refresh had time to come."""
    for _ in range(count):
        emulator.advance(50)
        await refresh(emulator)


async def refresh(emulator: EmulatorProcess) -> None:
    """Wait for the next one."""
    known = refreshed(emulator)
    await bed.until(lambda: refreshed(emulator) > known)


async def test_what_lives_is_kept_from_the_auto_stop(
    daytona: DaytonaProvider, daytona_emulator: EmulatorProcess
) -> None:
    """Cases C4, C11: a silent agent and an open link are no activity to the service; the refreshes are."""
    sandbox = await daytona.start(spec())
    talk = bed.Talk(sandbox)
    daytona_emulator.scenario("idle_links", sandbox=sandbox.name)
    await minutes_pass(daytona_emulator, 5)
    assert await talk.say("still there") == "still there"
    assert states(daytona_emulator) == {sandbox.name: "started"}
    await sandbox.destroy(0.0)
    known = refreshed(daytona_emulator)
    daytona_emulator.advance(30)
    assert refreshed(daytona_emulator) == known


async def test_a_refresh_that_is_lost_loses_the_sandbox_and_is_told(
    daytona: DaytonaProvider, daytona_emulator: EmulatorProcess
) -> None:
    """Case C4, where the service stops it all the same."""
    sandbox = await daytona.start(spec())
    talk = bed.Talk(sandbox)
    for scenario in ("idle_links", "deaf"):
        daytona_emulator.scenario(scenario, sandbox=sandbox.name)
    daytona_emulator.advance(70)
    assert (await talk.ended()).lost
    assert (await sandbox.destroy(0.0)).proof == "stopped"


async def test_a_refresh_that_fails_comes_again(daytona: DaytonaProvider, daytona_emulator: EmulatorProcess) -> None:
    sandbox = await daytona.start(spec())
    daytona_emulator.scenario("server_error", match="/last-activity$", status=503, times=2)
    await bed.until(lambda: daytona.failures["activity", "later"] == 2)
    await minutes_pass(daytona_emulator, 2)
    assert states(daytona_emulator) == {sandbox.name: "started"}
    await sandbox.destroy(0.0)


async def test_what_a_dead_runner_left_is_put_to_sleep_unless_another_one_has_it(
    daytona_emulator: EmulatorProcess,
) -> None:
    """Case C3: an empty sandbox costs as much as a full one; another store's is not looked at."""
    dead, stranger = provider(daytona_emulator), provider(daytona_emulator, store_id="store_2")
    left = await dead.start(spec("ses_1"))
    theirs = await stranger.start(spec("ses_1"))
    await left.transport.aclose()
    later = provider(daytona_emulator, orphan_seconds=0.0)
    assert (await later.reap(yes, yes)).left == []
    assert (await later.reap(yes, no)).left == [left.name]
    await bed.until(lambda: states(daytona_emulator) == {left.name: "stopped", theirs.name: "started"})
    await later._leaving.wait(left.name, 10.0)
    assert (await later.reap(yes, no)).left == []
    (disk,) = later.disks()
    assert (disk.project, disk.session_id) == ("default", "ses_1")
    assert later.counts["left"] == 1
    for sandbox in (left, theirs):
        assert (await sandbox.destroy(0.0)).proven
    await later.close()
    await dead.close()
    await stranger.close()


async def test_a_disk_that_another_runner_woke_stays(daytona_emulator: EmulatorProcess) -> None:
    """The window that ends is that of the runner which put it to sleep; the sandbox is another one's by now."""
    first, second = provider(daytona_emulator, disk_seconds=20.0), provider(daytona_emulator)
    sandbox = await first.start(spec())
    await sandbox.destroy(0.0)
    again = await second.start(spec(seat_id="seat_2"))
    assert again.woken
    first._expire(sandbox.name)
    await first._leaving.wait(sandbox.name, 10.0)
    talk = bed.Talk(again)
    assert await talk.say("mine") == "mine"
    await first.close()
    assert await talk.say("still mine") == "still mine"
    await again.destroy(0.0)
    await second.close()


async def test_a_deletion_that_hangs_is_shown_and_asked_for_again(
    daytona: DaytonaProvider, daytona_emulator: EmulatorProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case C8: the session is gone at once; what holds the quota is not forgotten."""
    sandbox = await daytona.start(spec())
    (box,) = daytona_emulator.sandboxes()
    await sandbox.destroy(0.0)
    daytona_emulator.scenario("stuck_delete", sandbox=box["id"])
    await daytona.remove("default", "ses_1")
    assert states(daytona_emulator) == {}
    assert (await daytona.reap(no, no)).stuck == daytona.stuck == 0
    monkeypatch.setattr("runner.rules.daytona.STUCK_SECONDS", 0.0)
    asked = deletions(daytona_emulator)
    for number in (1, 2):
        assert (await daytona.reap(no, no)).stuck == daytona.stuck == 1
        assert deletions(daytona_emulator) == asked + number
    daytona_emulator.scenario("stuck_delete", sandbox=box["id"], stuck=False)
    await bed.until(lambda: daytona_emulator.sandboxes() == [])
    assert (await daytona.reap(no, no)).stuck == daytona.stuck == 0


async def test_what_cannot_be_deleted_yet_is_deleted_later(
    daytona: DaytonaProvider, daytona_emulator: EmulatorProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case C8: the service refuses to delete what it is starting."""
    dead = provider(daytona_emulator)
    sandbox = await dead.start(spec())
    monkeypatch.setattr("runner.rules.daytona.ORPHAN_GRACE_SECONDS", 0.0)
    daytona_emulator.scenario("in_state", sandbox=sandbox.name, state="starting")
    assert (await daytona.reap(no, no)).deleted == [sandbox.name]
    assert states(daytona_emulator) == {sandbox.name: "starting"}
    daytona_emulator.scenario("in_state", sandbox=sandbox.name, state="started")
    assert (await daytona.reap(no, no)).deleted == [sandbox.name]
    await bed.until(lambda: states(daytona_emulator) == {})
    assert (await sandbox.destroy(0.0)).proof == "deleted"
    await dead.close()


def deletions(emulator: EmulatorProcess) -> int:
    asked = [one for one in emulator.exchanges() if one["method"] == "DELETE"]
    return sum(one["template"] == "/api/sandbox/{id}" for one in asked)
