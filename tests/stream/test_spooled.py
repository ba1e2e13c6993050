"""The spool before the stream: what the stream takes says nothing about the database."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from runner.clock import SystemClock
from runner.errors import RunnerError
from runner.store import spooling
from runner.store.memory import MemoryStore
from runner.store.port import Ending
from runner.store.spool import SpooledStore
from runner.store.stream.memory import MemoryRecordStream
from runner.store.stream.pipelined import PipelinedStore
from tests.stream.bed import admission, ending, row, stored, until

TURNS = 10


class Frozen(MemoryStore):
    """Answers an ending only after a while, and then that it cannot; counts who asked."""

    frozen = False
    asked = 0

    async def end(self, ending: Ending) -> bool:
        if self.frozen:
            self.asked += 1
            await asyncio.sleep(0.05)
            raise RunnerError("store_unavailable", "no answer")
        return await super().end(ending)


async def test_one_turn_waits_for_a_frozen_database_and_not_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records go on by the stream meanwhile; endings wait in the spool at once, and all arrive with their records."""
    monkeypatch.setattr(spooling, "FIRST_RETRY_SECONDS", 60.0)
    clock = SystemClock()
    database, stream = Frozen(clock=clock), MemoryRecordStream(clock)
    store = await SpooledStore.open(
        PipelinedStore(database, stream), tmp_path / "spool", clock, may_spool=lambda *of: True
    )
    names = [(f"s{n}", f"t{n}") for n in range(TURNS)]
    for session, turn in names:
        assert await store.admit(admission(session, turn))
        assert (await store.append([row(1, session=session, turn=turn)])).on_the_way
    database.frozen = True
    first, *others = names

    async def end(session: str, turn: str) -> None:
        assert await store.end(ending([row(3, session=session, turn=turn)], session, turn))

    await end(*first)
    await asyncio.sleep(spooling.DOWN_SECONDS + 0.1)
    for session, turn in others:
        await store.append([row(2, session=session, turn=turn)])
    await asyncio.gather(*(end(*name) for name in others))
    assert database.asked <= 3, "the first one, its replay, and the probe of the next second"
    database.frozen = False
    await store.caught_up("proj", "s0")
    await until(lambda: store.waiting == 0)
    for session, turn in others:
        assert await stored(database, session) == [row(n, session=session, turn=turn) for n in (1, 2, 3)]
    assert await database.quarantined("proj", 10) == []
    await store.close()
