"""Scenarios S1 to S4 and S6: a prompt that takes the turn of what runs."""

from __future__ import annotations

import asyncio

from tests.session.bed import types
from tests.session.prompt_abort.inside import paused
from tests.session.prompt_abort.stage import Stage, scenario
from tests.session.resuming import LOADS


@scenario("S1")
async def steered_on_an_idle_session(stage: Stage) -> None:
    await stage.send("X", on_busy="steer")
    await stage.finish(1)
    await stage.check(["X"], X="done")


@scenario("S2")
async def steered_at_the_model(stage: Stage) -> None:
    await stage.active()
    await stage.send("X", on_busy="steer")
    await stage.yields(1)
    await stage.model(2)
    assert await stage.idles() == 0
    await stage.finish(2)
    assert (await stage.result("A"))["outcome"] == "cancelled"
    await stage.check(["A"], ["X"], A="aborted", X="done")


@scenario("S3")
async def steered_past_the_queue(stage: Stage) -> None:
    await stage.active("B")
    await stage.send("X", on_busy="steer")
    await stage.yields(1)
    await stage.finish(2)
    await stage.check(["A"], ["B", "X"], A="aborted", B="absorbed", X="done")
    await stage.close()
    stage.bed = (await Stage.make()).bed
    await stage.send("A", queue_mode="fifo")
    await stage.model(1)
    await stage.send("B", queue_mode="fifo")
    await stage.send("X", on_busy="steer", queue_mode="fifo")
    await stage.yields(1)
    await stage.finish(2)
    await stage.finish(3)
    await stage.check(["A"], ["X"], ["B"], A="aborted", B="done", X="done")


@scenario("S4")
async def steered_past_a_question(stage: Stage) -> None:
    await paused(stage)
    await stage.send("X", on_busy="steer")
    await stage.yields(1)
    await stage.finish(2)
    await stage.check(["A"], ["X"], A="aborted", X="done")
    assert "interaction_closed" in types(await stage.events())


@scenario("S6")
async def steered_past_an_agent_that_hangs(stage: Stage) -> None:
    await stage.active()
    await stage.send("X", on_busy="steer")
    await asyncio.sleep(11)
    await stage.finish(1, agent=2)
    assert (await stage.result("X"))["context_lost"] is True
    assert [frame[-1] for frame in stage.frames] == ["A", "X"]
    assert stage.bed.sandbox(1).gone.is_set()
    await stage.close()
    stage.bed = (await Stage.make()).bed
    stage.bed.provider.manners.update(LOADS)
    await stage.active()
    await stage.finish(1)
    await stage.result("A")
    await stage.send("B")
    await stage.model(2)
    await stage.send("X", on_busy="steer")
    await asyncio.sleep(11)
    await stage.finish(1, agent=2)
    result = await stage.result("X")
    assert ("context_lost" in result, result["start"]) == (False, "resumed")
    await stage.check(["A"], ["B"], ["X"], idles=2, A="done", B="aborted", X="done")
