"""What an agent says behind its answer, or to nobody: never the next turn's, never left unanswered (A10, E8, L3)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from runner.leases.memory import MemoryLeasePlane
from runner.rules.lease import FREE
from runner.store.memory import MemoryStore
from tests.session.bed import Bed
from tests.session.fake_agent import permission_frame, text_frame, update_frame
from tests.virtual_time import LoopClock

pytestmark = pytest.mark.virtual_time


@pytest.fixture
async def bed() -> AsyncIterator[Bed]:
    made = await Bed.make()
    yield made
    await made.close()
    assert made.provider.alive == set()


async def prompted(bed: Bed):
    handle = await bed.dispatch(keep_on_disconnect=True)
    agent = await bed.agent()
    return handle, agent, await agent.prompt()


def answer(frame: dict, stop_reason: str = "end_turn") -> dict:
    return {"id": frame["id"], "result": {"stopReason": stop_reason}}


async def test_an_agent_that_answers_and_exits_at_once_is_not_kept_case_l3(bed: Bed):
    handle, agent, frame = await prompted(bed)
    agent.send(text_frame("bye"), answer(frame))
    agent.exit(0)
    assert (await handle.result())["outcome"] == "completed"
    await asyncio.sleep(1)
    assert bed.provider.alive == set()
    assert (await bed.turn(agents=2))["reason"] == "agent_exited"


async def test_an_agent_that_exits_while_its_tools_are_reaped_is_not_kept_case_l3(bed: Bed):
    handle, agent, frame = await prompted(bed)
    await bed.cancel()
    await agent.heard("session/cancel")
    agent.send(answer(frame, "cancelled"))
    agent.exit(0)
    result = await handle.result()
    assert (result["outcome"], result["cancel_settled"]) == ("cancelled", True)
    assert (await bed.turn(agents=2))["reason"] == "agent_exited"


async def test_a_permission_request_right_behind_the_answer_is_cancelled_case_a10(bed: Bed):
    handle, agent, frame = await prompted(bed)
    agent.send(text_frame("ok"), answer(frame), permission_frame(7), text_frame("late"))
    result = await handle.result()
    assert (result["outcome"], result["text"]) == ("completed", "ok")
    assert (await agent.answered(7))["result"] == {"outcome": {"outcome": "cancelled"}}
    assert (await bed.turn(nth=2))["text"] == "ok"


async def test_a_permission_request_of_an_idle_agent_is_cancelled_case_e8(bed: Bed):
    await bed.turn()
    agent = await bed.agent()
    agent.ask(8)
    assert (await agent.answered(8))["result"] == {"outcome": {"outcome": "cancelled"}}
    result = await bed.turn(nth=2)
    assert (result["start"], result["outcome"]) == ("hit", "completed")


async def test_what_an_idle_agent_says_about_itself_is_learnt_case_e8(bed: Bed):
    modes = {"currentModeId": "default", "availableModes": [{"id": "default"}, {"id": "plan"}]}
    bed.provider.manners["new"] = {"modes": modes}
    await bed.turn()
    agent = await bed.agent()
    agent.send(update_frame(sessionUpdate="current_mode_update", currentModeId="plan"), text_frame("banner"))
    await asyncio.sleep(1)
    handle = await bed.dispatch(keep_on_disconnect=True, mode="default")
    await agent.finish(2)
    assert (await handle.result())["text"] == "ok"
    assert [frame["params"]["modeId"] for frame in agent.all("session/set_mode")] == ["default"]


class SlowStore(MemoryStore):
    """A store whose endings take a second."""

    async def end(self, ending):
        await asyncio.sleep(1)
        return await super().end(ending)


async def test_an_agent_that_exits_while_its_ending_is_written_leaves_no_lease_case_l3():
    plane = MemoryLeasePlane(LoopClock(), 20)
    bed = await Bed.make(store=SlowStore(), plane=plane)
    handle, agent, frame = await prompted(bed)
    agent.send(text_frame("ok"), answer(frame))
    await asyncio.sleep(0.5)
    agent.exit(0)
    assert (await handle.result())["outcome"] == "completed"
    await asyncio.sleep(1)
    assert bed.provider.alive == set()
    lease = plane.lease("p", "s")
    assert (lease.owner, lease.alive, lease.running) == (FREE.owner, FREE.alive, FREE.running)
    assert (await bed.turn(agents=2))["reason"] == "agent_exited"
    await bed.close()


async def test_a_stop_before_the_first_step_of_a_start_leaves_the_seat_free_case_a12(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
):
    """A task that is cancelled before its first step runs none of its own clean-up."""
    await bed.turn()
    tasks, spawn = bed.replica.services.tasks, bed.replica.services.tasks.spawn

    def spawn_behind_a_stop(name, work):
        if name.startswith("start "):
            stop = bed.cancel()
            asyncio.get_running_loop().call_soon(drive, stop)
        return spawn(name, work)

    def drive(coroutine):
        with pytest.raises(StopIteration):
            coroutine.send(None)

    monkeypatch.setattr(tasks, "spawn", spawn_behind_a_stop)
    handle = await bed.dispatch(env={"A": "changed"}, keep_on_disconnect=True)
    assert (await handle.result())["outcome"] == "cancelled"
    await asyncio.sleep(1)
    assert (bed.pool.book.taken, len(bed.provider.sandboxes)) == (0, 1)
    monkeypatch.undo()
    assert (await bed.turn(agents=2))["start"] == "cold"
