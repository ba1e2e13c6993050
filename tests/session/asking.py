"""Turns whose agents ask, and what must hold once a race is over."""

from __future__ import annotations

import asyncio
from typing import Any

from runner.session.services import Services
from tests.session.bed import CALLER, Bed, types
from tests.session.fake_agent import FakeAgent
from tests.session.reading import (
    assert_ordered,
    lease,
)


def services(bed: Bed) -> Services:
    return bed.replica.services


async def asking(bed: Bed, count: int = 1, **fields: Any) -> tuple[Any, FakeAgent, dict[str, Any]]:
    """A turn whose agent asks, not paused yet."""
    handle = await bed.dispatch(keep_on_disconnect=True, **fields)
    agent = await bed.agent()
    frame = await agent.prompt()
    for n in range(count):
        agent.ask(n, f"t{n}")
    return handle, agent, frame


async def paused(bed: Bed, count: int = 1, **fields: Any) -> tuple[Any, FakeAgent, dict[str, Any], list[str]]:
    handle, agent, frame = await asking(bed, count, **fields)
    assert (await handle.result())["outcome"] == "paused"
    return handle, agent, frame, (await bed.sessions.view(CALLER, "s"))["open_interactions"]


async def check(bed: Bed, outcomes: list[str]) -> None:
    """One ending each, one prompt_ended each, busy and idle in turns, cursors in order, no lease but a seat's."""
    await asyncio.sleep(1)
    events = await bed.history()
    assert_ordered(events)
    assert [event["data"]["outcome"] for event in events if event["type"] == "done"] == outcomes
    ended = [event["data"]["prompt_id"] for event in events if event["type"] == "prompt_ended"]
    assert len(ended) == len(set(ended))
    beats = [kind for kind in types(events) if kind in ("session_busy", "session_idle")]
    assert beats == ["session_busy", "session_idle"] * (len(beats) // 2)
    closed = [event["data"]["interaction_id"] for event in events if event["type"] == "interaction_closed"]
    asked = [event["data"]["interaction_id"] for event in events if event["type"] == "interaction_requested"]
    assert sorted(closed) == sorted(asked)
    rows = await bed.store.interactions("p", "s")
    assert {row.status for row in rows} <= {"consumed", "cancelled", "expired"}
    assert (await bed.state(), lease(bed).running) == ("idle", None)
    assert {seat.seat_id for seat in bed.pool.book.seats.values()} == bed.provider.alive
