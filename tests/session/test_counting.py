"""What a replica counts by itself, beside what clients make it do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from runner.metrics import (
    LEASES_LOST,
    LIVE_FILE_BYTES,
    LIVE_FILE_FAILING,
    LIVE_FILE_UNWRITTEN,
    PLANE_ERRORS,
    PROMPTS_QUEUED,
    RETENTION_DELETED,
    SANDBOX_SECONDS,
    SEATS,
    TEARDOWNS_UNPROVEN,
    TURNS,
    Family,
)
from tests.session.bed import Bed
from tests.session.gates import SlowPlane
from tests.session.several import LEASE_SECONDS, Several

pytestmark = pytest.mark.virtual_time
DAY = 24 * 3600


def count(bed: Bed, family: Family, *labels: str) -> float:
    return bed.replica.services.metrics.numbers().get(family, {}).get(labels, 0)


async def test_a_warm_sandbox_counts_until_its_window_is_over(bed: Bed) -> None:
    await bed.turn()
    assert (count(bed, SEATS, "idle"), count(bed, SANDBOX_SECONDS, "p", "warm")) == (1, 0)
    await asyncio.sleep(70)
    assert count(bed, SEATS, "idle") == 0
    assert count(bed, SANDBOX_SECONDS, "p", "warm") == pytest.approx(60, abs=1)


async def test_a_teardown_that_is_not_proven_is_seen(bed: Bed) -> None:
    await bed.turn()
    bed.provider.unproven = 1
    await asyncio.sleep(70)
    assert count(bed, TEARDOWNS_UNPROVEN) == 1


async def test_turns_of_a_killed_replica_are_counted_as_lost_at_the_boot(bed: Bed) -> None:
    await bed.dispatch()
    await (await bed.agent()).prompt()
    await bed.die()
    again = await Bed.make(store=bed.store, replica_id="rep_2")
    assert count(again, TURNS, "lost", "none") == 1
    await again.close()


async def test_a_lapsed_lease_and_the_turn_that_another_replica_ended(several: Several) -> None:
    one, two = await several.replica("a"), await several.replica("b")
    handle = await one.dispatch(keep_on_disconnect=True)
    await (await one.agent()).prompt()
    await asyncio.sleep(3)
    several.sides["a"].open.clear()
    await asyncio.sleep(LEASE_SECONDS + 1)
    assert (await two.turn(prompt="mine now"))["ok"]
    several.sides["a"].open.set()
    await handle.result()
    assert count(one, LEASES_LOST, "lapsed") == 1
    assert count(one, PLANE_ERRORS) > 0
    assert count(two, TURNS, "lost", "none") == count(two, TURNS, "completed", "demo") == 1
    assert sum(one.replica.services.metrics.numbers().get(TURNS, {}).values()) == 0, "each turn is counted once"


async def test_a_plane_without_an_answer_is_counted() -> None:
    plane = SlowPlane()
    bed = await Bed.make(plane=plane)
    await bed.turn()
    assert count(bed, PLANE_ERRORS) == 0
    plane.down = True
    await asyncio.sleep(20)
    assert count(bed, PLANE_ERRORS) > 1
    plane.down = False
    await bed.close()


async def test_what_retention_deletes_is_counted() -> None:
    settings = {"records": {"retention_days": 1}, "leases": {"beat_seconds": 120, "lease_seconds": 600}}
    bed = await Bed.make(settings=settings)
    await bed.turn()
    await asyncio.sleep(DAY + 2 * 3600)
    assert count(bed, RETENTION_DELETED, "records") > 5
    await bed.close()


async def test_the_live_file_has_a_size_and_says_when_it_cannot_be_written(tmp_path: Path) -> None:
    bed = await Bed.make(live_dir=tmp_path / "live")
    await bed.turn()
    assert count(bed, LIVE_FILE_BYTES) > 0
    assert count(bed, LIVE_FILE_FAILING) == count(bed, LIVE_FILE_UNWRITTEN) == count(bed, PROMPTS_QUEUED) == 0
    await bed.close()
    (tmp_path / "file").write_text("")
    blocked = await Bed.make(live_dir=tmp_path / "file" / "live", replica_id="rep_2")
    await blocked.turn()
    assert count(blocked, LIVE_FILE_FAILING) == 1
    assert count(blocked, LIVE_FILE_UNWRITTEN) > 0
    await blocked.close()
