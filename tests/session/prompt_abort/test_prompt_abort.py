"""Every numbered scenario of prompt-specific abort, through the real session over a scripted agent (DESIGN 3.6)."""

from __future__ import annotations

import pytest

from tests.session.prompt_abort import (  # noqa: F401
    claims,
    inside,
    one_prompt,
    preparing,
    queued,
    shells,
    steering,
    stops,
    wire,
)
from tests.session.prompt_abort.stage import SCENARIOS, Stage

pytestmark = pytest.mark.virtual_time

NUMBERS = [
    *map(str, range(1, 23)),
    "22b",
    *map(str, range(23, 45)),
    "46",
    *(f"W{n}" for n in range(1, 13)),
    *(f"S{n}" for n in range(1, 7)),
    *(f"P{n}" for n in range(1, 4)),
    "D1",
]


def test_the_set_of_prompt_abort_scenarios_is_whole() -> None:
    """Every number has its scenario, and no other is played."""
    assert sorted(SCENARIOS) == sorted(NUMBERS)


@pytest.mark.parametrize("number", NUMBERS)
async def test_prompt_abort(number: str) -> None:
    stage = await Stage.make()
    await SCENARIOS[number](stage)
    await stage.close()
