"""What a runner that is killed leaves of an agent session, and the one that comes after it (cases L2, M6)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.errors import RunnerError
from tests.session.bed import CALLER, Bed
from tests.session.resuming import LOADS, first_turn, next_turn, prompt_texts
from tests.session.test_restart import crash

pytestmark = pytest.mark.virtual_time


async def successor(bed: Bed) -> Bed:
    """The runner after a kill -9, on the same machine."""
    made = await Bed.make(store=await crash(bed), replica_id="rep_2")
    made.provider.manners.update(LOADS)
    return made


async def test_the_next_runner_loads_what_the_killed_one_had() -> None:
    bed = await Bed.make()
    await first_turn(bed)
    again = await successor(bed)
    result, agent = await next_turn(again, 1)
    assert (result["ok"], result["start"]) == (True, "resumed")
    assert prompt_texts(agent) == ["next"]
    await again.close()


@pytest.mark.parametrize(("seconds", "start"), [(0.0, "cold"), (1.0, "resumed")])
async def test_the_agent_session_of_a_first_turn_is_known_while_it_runs(seconds: float, start: str) -> None:
    """Durable soon, not at once: no short turn pays for it."""
    bed = await Bed.make()
    await bed.dispatch(prompt="long", keep_on_disconnect=True)
    await (await bed.agent()).prompt()
    await asyncio.sleep(seconds)
    again = await successor(bed)
    result, agent = await next_turn(again, 1)
    assert (result["ok"], result["start"]) == (True, start)
    assert prompt_texts(agent)[-1] == "next"
    assert len(prompt_texts(agent)) == (1 if start == "resumed" else 2)
    await again.close()


async def test_a_store_that_is_away_costs_only_that() -> None:
    bed = await Bed.make()
    handle = await bed.dispatch(prompt="long", keep_on_disconnect=True)
    agent = await bed.agent()
    frame = await agent.prompt()
    bed.store.unavailable = True
    await asyncio.sleep(1)
    bed.store.unavailable = False
    agent.say("done")
    agent.answer(frame)
    assert (await handle.result())["ok"]
    row: Any = await bed.store.session("p", "s")
    assert row.agent_state["agent"]["agent_session_id"] == "agent-session"
    await bed.close()


async def test_a_deleted_session_is_not_written_again() -> None:
    """A turn that the deletion killed does not bring its agent session back."""
    bed = await Bed.make()
    await bed.dispatch(prompt="long", keep_on_disconnect=True)
    await (await bed.agent()).prompt()
    deleting = asyncio.create_task(bed.sessions.delete(CALLER, "s"))
    await asyncio.sleep(2)
    await deleting
    row: Any = await bed.store.session("p", "s")
    assert row.agent_state == {}
    with pytest.raises(RunnerError):
        await bed.dispatch(prompt="more")
    await bed.close()
