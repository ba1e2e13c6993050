"""kill -9 of a runner whose store is away: what was accepted is there after the next start, once (cases G1, M3)."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from runner.clock import SystemClock
from runner.store.spool import SpooledStore
from runner.store.spooling import hand_in
from runner.store.sqlite import SqliteStore
from tests.house.tree import ROOT
from tests.plane.spooling_child import POINTS
from tests.store.rows import ended, turn


@pytest.mark.parametrize("handed_in", [False, True])
@pytest.mark.parametrize("point", POINTS)
async def test_what_was_accepted_survives_kill_9_and_counts_once_case_g1(tmp_path: Path, point: str, handed_in: bool):
    """By the next start, or by another runner of this machine that takes the dead one's sessions over."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.plane.spooling_child",
        str(tmp_path),
        point,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(30):
        told, _ = await child.communicate()
    assert child.returncode == -signal.SIGKILL
    accepted = [int(line.split()[1]) for line in told.decode().splitlines()]
    assert accepted == ([2] if point == "put" else [2, 3, 4])
    remote = await SqliteStore.open(tmp_path / "store.sqlite3")
    if handed_in:
        waited = await hand_in(tmp_path / "spool", remote, SystemClock())
        assert waited == {"put": 1, "ended": 3, "before_replay": 3, "replay_written": 2, "dropped": 1}[point]
    store = await SpooledStore.open(remote, tmp_path / "spool", SystemClock())
    assert not (handed_in and store.waiting)
    async with asyncio.timeout(10):
        while store.waiting:
            await asyncio.sleep(0.02)
    assert [row.n for row in await store.records("p", "s", None, 10)] == [1, *accepted]
    assert await store.turn("p", "s", "t1") == (turn() if point == "put" else ended(turn()))
    assert await store.interaction("p", "i1") is not None
    assert await store.quarantined("p", 10) == []
    await store.close()
