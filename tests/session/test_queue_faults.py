"""A queue through full runners, drains, hiccups of the store, and other replicas that read it (DESIGN 3.6, 3.7)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.store.rows import CONTEXT_MAX
from tests.session.bed import CALLER, Bed, types
from tests.session.gates import Gate, SlowPlane
from tests.session.several import Several
from tests.session.test_restart import crash

pytestmark = pytest.mark.virtual_time


def sent(*beds: Bed) -> list[str]:
    """The last text of each prompt frame that an agent received."""
    agents = [sandbox.agent for bed in beds for sandbox in bed.provider.sandboxes]
    return [frame["params"]["prompt"][-1]["text"] for agent in agents for frame in agent.all("session/prompt")]


async def submit(bed: Bed, name: str, **fields: Any) -> Any:
    return await bed.dispatch(prompt=name, prompt_id=name, **{"keep_on_disconnect": True, **fields})


async def test_a_full_runner_hands_over_at_once() -> None:
    bed = await Bed.make(settings={"server": {"max_turns": 2}})
    await submit(bed, "A")
    agent = await bed.agent()
    await agent.prompt()
    queued = await submit(bed, "B", on_busy="queue")
    await bed.dispatch("other", keep_on_disconnect=True)
    await (await bed.agent(2)).prompt()
    began = asyncio.get_running_loop().time()
    await agent.finish()
    async with asyncio.timeout(30):
        await agent.finish(2)
    assert asyncio.get_running_loop().time() - began < 0.5
    assert (await queued.result())["start"] == "hit"
    await bed.close()


async def test_a_draining_runner_hands_over_to_nobody() -> None:
    several = Several()
    bed = await several.replica("r1")
    first = await submit(bed, "A")
    agent = await bed.agent()
    frame = await agent.prompt()
    await submit(bed, "B", on_busy="queue")
    draining = asyncio.create_task(bed.sessions.drain(30))
    await asyncio.sleep(0)
    agent.say("ok")
    agent.answer(frame)
    await first.result()
    await draining
    holder = await several.plane.look("p", "s")
    assert holder is None or holder.running is None, "others need not wait until its lease has run out"
    row = await several.store.prompt("p", "s", "B")
    assert row is not None and row.state == "queued"
    await several.close()


@pytest.mark.parametrize("fields", [{"on_busy": "queue"}, {"context_only": True}])
async def test_what_waits_before_the_first_turn_is_admitted_survives_a_restart(fields: dict[str, Any]) -> None:
    plane = SlowPlane()
    bed = await Bed.make(plane=plane)
    gate = plane.gates["running"] = Gate()
    first = asyncio.create_task(submit(bed, "A"))
    await gate.reached.wait()
    await bed.dispatch(prompt="B", prompt_id="B", **fields)
    first.cancel()
    again = await Bed.make(store=await crash(bed), replica_id="rep_2")
    if fields.get("context_only"):
        await submit(again, "C")
    async with asyncio.timeout(30):
        frame = await (await again.agent()).prompt()
    texts = [block["text"] for block in frame["params"]["prompt"]]
    assert texts == (["B", "C"] if fields.get("context_only") else ["B"])
    await again.close()


async def test_the_same_context_at_the_same_time_is_told_once() -> None:
    bed = await Bed.make()
    await asyncio.gather(*(bed.dispatch(prompt="X", prompt_id="X", context_only=True) for _ in range(2)))
    await submit(bed, "A")
    frame = await (await bed.agent()).prompt()
    assert [block["text"] for block in frame["params"]["prompt"]] == ["X", "A"]
    await bed.close()


async def test_a_second_stop_tells_what_it_has_cancelled() -> None:
    bed = await Bed.make()
    await submit(bed, "A")
    await (await bed.agent()).prompt()
    await submit(bed, "B", on_busy="queue")
    kept = await bed.cancel(queue="keep")
    assert kept.body["cancelled_prompts"] == []
    assert (await bed.cancel()).body["cancelled_prompts"] == ["B"]
    await bed.close()


async def test_a_stop_through_another_replica_stops_the_turn_and_the_queue() -> None:
    several = Several()
    owner, other = await several.replica("r1"), await several.replica("r2")
    running = await submit(owner, "A")
    agent = await owner.agent()
    frame = await agent.prompt()
    await submit(owner, "B", on_busy="queue")
    await asyncio.sleep(1)
    stopping = asyncio.create_task(other.cancel(wait_seconds=5))
    async with asyncio.timeout(30):
        await agent.heard("session/cancel")
    agent.answer(frame, "cancelled")
    reply = await stopping
    assert (reply.body["outcome"], reply.body["cancelled_prompts"]) == ("stopped", ["B"])
    assert (await running.result())["outcome"] == "cancelled"
    assert sent(owner, other) == ["A"]
    await several.close()


async def waits_unheld(several: Several) -> tuple[Bed, Bed]:
    """B waits at the first of two replicas, that does not hold the session: its admission behind A failed."""
    first, other = await several.replica("r1"), await several.replica("r2")
    running = await submit(first, "A", keep_on_disconnect=False)
    agent = await first.agent()
    await agent.prompt()
    await submit(first, "B", on_busy="queue", keep_on_disconnect=False)
    several.store.failing["admit"] = 2
    agent.exit(9)
    await running.result()
    await asyncio.sleep(0.3)
    assert several.store.failing["admit"] == 0
    return first, other


async def test_a_prompt_that_another_replica_has_served_is_not_served_again() -> None:
    several = Several()
    first, other = await waits_unheld(several)
    await other.sessions.revive()
    await (await other.agent()).finish()
    await asyncio.sleep(200)
    assert sent(first, other) == ["A", "B"]
    told = [event["data"] for event in await other.history() if event["type"] == "prompt_ended"]
    assert [(data["prompt_id"], data["state"]) for data in told] == [("A", "failed"), ("B", "done")]
    assert (await first.sessions.prompts(CALLER, "s"))["items"] == []
    await several.close()


async def test_a_prompt_that_was_aborted_at_another_replica_is_not_served() -> None:
    several = Several()
    first, other = await waits_unheld(several)
    assert await other.sessions.abort_prompt(CALLER, "s", "B")
    await asyncio.sleep(100)
    assert sent(first, other) == ["A"]
    assert types(await other.history()).count("session_idle") == 1
    assert (await first.sessions.prompts(CALLER, "s"))["items"] == []
    await several.close()


async def test_a_steering_prompt_goes_first_behind_a_restart_too() -> None:
    bed = await Bed.make()
    await submit(bed, "A")
    await (await bed.agent()).prompt()
    for name in "BC":
        await submit(bed, name, on_busy="queue", queue_mode="fifo")
    await submit(bed, "X", on_busy="steer", queue_mode="fifo")
    again = await Bed.make(store=await crash(bed), replica_id="rep_2")
    for nth in (1, 2, 3):
        await (await again.agent()).finish(nth)
    assert sent(again) == ["X", "B", "C"]
    await again.close()


async def test_context_that_waits_is_bounded() -> None:
    bed = await Bed.make()
    for nth in range(CONTEXT_MAX):
        await bed.dispatch(prompt=f"{nth}", context_only=True)
    with pytest.raises(RunnerError) as full:
        await bed.dispatch(prompt="more", context_only=True)
    assert full.value.code == "queue_full"
    await submit(bed, "A")
    assert len((await (await bed.agent()).prompt())["params"]["prompt"]) == CONTEXT_MAX + 1
    assert (await bed.dispatch(prompt="more", context_only=True)).state == "stored"
    await bed.close()


async def test_who_asks_elsewhere_for_a_prompt_that_waits_sees_it_run() -> None:
    several = Several()
    first, other = await waits_unheld(several)
    asked = await submit(other, "B", on_busy="queue", keep_on_disconnect=False)
    async with asyncio.timeout(30):
        await (await other.agent()).finish()
        assert (await asked.result())["ok"]
    await asyncio.sleep(100)
    assert sent(first, other) == ["A", "B"]
    await several.close()
