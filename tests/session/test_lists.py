"""Lists have one order, and a limit cuts their end, whatever their ids look like (case G14)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.store.port import Admission
from tests.session.bed import CALLER, Bed
from tests.session.gates import SlowStore
from tests.store.rows import question, record, session, turn

pytestmark = pytest.mark.virtual_time
SHUFFLED = [f"s{n * 7 % 10}" for n in range(10)]


async def paged(read: Any, limit: int) -> list[dict[str, Any]]:
    items, cursor = [], None
    while True:
        page = await read(limit, cursor)
        assert len(page["items"]) <= limit
        items += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            return items


async def test_sessions_come_newest_first_case_g14(bed: Bed) -> None:
    """Case G14: 10 sessions with shuffled ids, a limit of 3."""
    for name in SHUFFLED:
        await bed.turn(name, agents=SHUFFLED.index(name) + 1)
        await asyncio.sleep(1)
    first = await bed.sessions.sessions(CALLER, 3, None)
    assert [item["session_id"] for item in first["items"]] == SHUFFLED[:-4:-1]
    every = await paged(lambda limit, cursor: bed.sessions.sessions(CALLER, limit, cursor), 3)
    assert [item["session_id"] for item in every] == SHUFFLED[::-1], "no gap, nothing twice"


async def test_what_was_set_aside_comes_in_the_order_in_which_it_was_case_g14(bed: Bed) -> None:
    """Case G14."""
    for name in SHUFFLED:
        await bed.store.quarantine([record(1, in_session=name, project=CALLER.project)], "why", 1_000)
    every = await paged(lambda limit, cursor: bed.sessions.quarantine(CALLER, limit, cursor), 3)
    assert [item["session_id"] for item in every] == SHUFFLED


async def test_questions_come_in_the_order_in_which_they_were_asked_case_g14() -> None:
    """Case G14: a tie keeps the order of their commits."""
    store = SlowStore()
    bed = await Bed.make(store=store)
    for at, name in enumerate(SHUFFLED):
        asked = question(f"int_{name}", in_session=name, turn_id=f"t-{name}", created_at=at // 2)
        await store.admit(Admission(session(name), turn(f"t-{name}", 1, name), interactions=[asked]))
    listed = (await bed.sessions.interactions(CALLER, None, None))["items"]
    assert [item["session_id"] for item in listed] == SHUFFLED
    await bed.close()


async def test_records_come_by_their_cursors_case_g14(bed: Bed) -> None:
    """Case G14: ids of records are digests; nothing is ordered by them."""
    for nth in (1, 2, 3):
        await bed.turn(nth=nth)
    await asyncio.sleep(1)

    async def read(limit: int, after: str | None) -> dict[str, Any]:
        return await bed.sessions.records(CALLER, "s", after, limit)

    every = await paged(read, 2)
    cursors = [tuple(map(int, item["cursor"].split("."))) for item in every]
    assert cursors == sorted(set(cursors))
    assert [item["record_id"] for item in every] != sorted(item["record_id"] for item in every)
