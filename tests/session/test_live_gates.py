"""A follower that comes in over the bus and is held between any two of its steps, while the turn goes on (case H3)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.session.bed import Bed
from tests.session.gates import Gate
from tests.session.live import Bus, Followed, two
from tests.session.reading import Event, assert_ordered, conversation, cursor
from tests.session.several import Several

pytestmark = pytest.mark.virtual_time

SMALL = {"server": {"ring_bytes": 2048, "reader_buffer_bytes": 4096}}
LARGE: dict[str, Any] = {}
STEPS = ["push", "publish", "read", "append", "caught_up", "records"]


@pytest.fixture
async def several() -> AsyncIterator[Several]:
    world = Several(Bus())
    yield world
    await world.close()


def held(several: Several, step: str, nth: int, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """From its ``nth`` call from now on, this step waits at a gate."""
    gate, calls = Gate(), 0
    target: Any = {"push": several.plane, "publish": several.live, "read": several.live}.get(step, several.store)
    work: Callable[..., Any] = getattr(target, step)

    async def call(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= nth:
            await gate.passes()
        return await work(*args, **named)

    monkeypatch.setattr(target, step, call)
    return gate


async def goes_on(agent: Any, name: str) -> None:
    """The turn shows more than a small ring keeps: frames, a block, tool calls."""
    for n in range(12):
        agent.say(f"{name}{n} ")
        await asyncio.sleep(0.02)
    agent.update(sessionUpdate="tool_call", toolCallId=name, title="x" * 300, kind="execute", status="pending")
    agent.update(sessionUpdate="tool_call_update", toolCallId=name, status="completed", rawInput={"a": "y" * 300})
    agent.say(f"{name} open ")
    await asyncio.sleep(0.05)


@pytest.mark.parametrize("settings", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("again", [False, True], ids=["new", "again"])
@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("step", STEPS)
async def test_held_at_any_step_it_misses_nothing_and_sees_nothing_twice(
    several: Several,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    nth: int,
    again: bool,
    settings: dict[str, Any],
) -> None:
    a, b = await two(several, **settings)
    await a.dispatch(prompt_id="p1", keep_on_disconnect=True)
    agent = await a.agent()
    frame = await agent.prompt()
    await goes_on(agent, "one")
    after = await _newest(b) if again else None
    gate = held(several, step, nth, monkeypatch)
    follower = Followed(b, after)
    await goes_on(agent, "two")
    await asyncio.sleep(1)
    await goes_on(agent, "three")
    gate.open()
    await goes_on(agent, "four")
    agent.answer(frame)
    await follower.until("session_idle")
    events = await follower.leave()
    assert "resync" not in [event["type"] for event in events]
    assert_ordered(events)
    stored = await a.history(after=after)
    assert _records(events) == _records(stored)
    assert conversation(events)["blocks"] == conversation(stored)["blocks"]
    if settings is LARGE:
        assert [event["type"] for event in events].count("message_delta") > 20


async def _newest(bed: Bed) -> str:
    """What a first follower has seen last."""
    first = Followed(bed)
    await first.until("tool_call")
    events = await first.leave()
    return str(events[-1]["cursor"])


def _records(events: list[Event]) -> list[Any]:
    """What every reader has to see, whether it came as an update or as its record."""
    durable = [event for event in events if not event["type"].endswith("_delta")]
    assert durable == sorted(durable, key=cursor)
    return [(event["cursor"], event["type"]) for event in durable if not event["type"].startswith("tool_call")]
