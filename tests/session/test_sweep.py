"""Anything may happen in any order: dispatches, agents' manners, Stops, kills, answers, silence, outages."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.session.bed import Bed
from tests.session.world import SETTINGS, World
from tests.virtual_time import VirtualTimeLoop

KINDS = (
    *("dispatch",) * 2,
    *("agent",) * 4,
    *("sleep",) * 2,
    "command",
    "answer",
    "leave",
    "fault",
    "slow",
)
Story = list[tuple[str, int, int]]
STEPS = st.tuples(st.sampled_from(KINDS), st.integers(0, 5), st.integers(0, 9))


LOADS: tuple[dict[str, Any], ...] = (
    {"replay": 2, "late": 2},
    {"error": "no such session"},
    {"answer": {}},
    {"silent": True},
    {"leaves": True},
)


async def tell(story: Story, loads: dict[str, Any] | None = None) -> None:
    """Live through a story, calm down, and check what must hold; ``loads``: what comes of every load."""
    world = World(await Bed.make(settings=SETTINGS))
    if loads is not None:
        world.bed.provider.manners |= {"capabilities": {"loadSession": True}, "session/load": loads}
    try:
        for kind, one, two in story:
            await asyncio.sleep(world.step(kind, one, two))
        await world.calm()
        await world.check()
        await world.next_messages()
        await world.calm()
        await world.check()
        told = str(world.seen)
        assert "of old" not in told
        assert "late " not in told
        await world.restart()
    finally:
        await world.close()


@settings(max_examples=250, derandomize=True, print_blob=True)
@given(st.lists(STEPS, min_size=3, max_size=40))
def test_whatever_happens_it_comes_to_rest(story: Story) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(tell(story))


@settings(max_examples=100, derandomize=True, print_blob=True)
@given(st.lists(STEPS, min_size=3, max_size=40), st.sampled_from(LOADS))
def test_whatever_comes_of_a_load_it_comes_to_rest(story: Story, loads: dict[str, Any]) -> None:
    """Cases G13, I6, M6 and M7: agents that load, well or badly, among everything else."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(tell(story, loads))
