"""Scenarios 46 and P1 to P3: an agent that asks, and chains that wait for a human."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.errors import RunnerError
from tests.session.bed import CALLER, types
from tests.session.prompt_abort.stage import Stage, scenario


async def question(stage: Stage) -> str:
    """The one open question."""
    [asked] = (await stage.bed.sessions.view(CALLER, "s"))["open_interactions"]
    return str(asked)


async def paused(stage: Stage) -> str:
    """A waits for a human; its question."""
    await stage.active()
    (await stage.agent()).ask(7)
    assert (await stage.result("A"))["outcome"] == "paused"
    await stage.calm()
    return await question(stage)


async def outcomes(stage: Stage) -> list[str]:
    """How the turns ended."""
    return [event["data"]["outcome"] for event in await stage.events() if event["type"] == "done"]


@scenario("46")
async def aborted_while_it_asks(stage: Stage) -> None:
    await stage.active()
    agent = await stage.agent()
    agent.say("a1*")
    asking = asyncio.create_task(agent.answered(7))
    agent.ask(7)
    while not (await stage.bed.sessions.view(CALLER, "s"))["open_interactions"]:
        await asyncio.sleep(0)
    asked = await question(stage)
    assert stage.abort("A") is True
    assert (await asking)["result"] == {"outcome": {"outcome": "cancelled"}}
    await agent.heard("session/cancel")
    agent.answer(await agent.prompt(), "cancelled")
    await stage.result("A")
    assert "interaction_closed" in types(await stage.events())
    with pytest.raises(RunnerError) as late:
        await stage.bed.answer(asked, decision="allow")
    assert late.value.code == "interaction_closed"
    await stage.check(["A"], A="aborted")
    assert await stage.texts() == ["a1*"]


@scenario("P1")
async def a_paused_one_is_aborted(stage: Stage) -> None:
    await paused(stage)
    assert await stage.idles() == 0
    assert stage.abort("A") is True
    assert stage.abort("A") is False
    await stage.yields(1)
    await stage.check(["A"], A="aborted")
    assert await outcomes(stage) == ["paused", "cancelled"]
    assert "interaction_closed" in types(await stage.events())


@scenario("P2")
async def a_prompt_withdraws_the_questions(stage: Stage) -> None:
    await paused(stage)
    agent = await stage.agent()
    await stage.send("X", on_busy="reject")
    await agent.heard("session/cancel")
    assert stage.frames == [["A"]], "the old frame settles first"
    agent.answer(await agent.prompt(), "cancelled")
    await stage.finish(2)
    await stage.check(["A"], ["X"], A="aborted", X="done")
    closed = [event["data"] for event in await stage.events() if event["type"] == "interaction_closed"]
    assert [data["status"] for data in closed] == ["cancelled"]


async def raced(stage: Stage, first: Any, second: Any) -> list[Any]:
    """Both at once, in this order."""
    tasks = [asyncio.create_task(first), asyncio.create_task(second)]
    stage.tasks += tasks
    agent = await stage.agent()
    await stage.calm()
    if agent.all("session/cancel"):
        agent.answer(await agent.prompt(), "cancelled")
        await stage.finish(2)
    else:
        assert await agent.answered(7)
        await stage.finish(1)
        await stage.calm()
        if len(agent.all("session/prompt")) == 2:
            await stage.finish(2)
    return list(await asyncio.gather(*tasks, return_exceptions=True))


@scenario("P3")
async def an_answer_and_a_prompt_at_once(stage: Stage) -> None:
    asked = await paused(stage)
    answered, handle = await raced(stage, stage.bed.answer(asked, decision="allow"), stage.send("X", on_busy="reject"))
    await stage.calm()
    assert one_won(answered, handle, (await outcomes(stage))[1:]), (answered, handle)
    await stage.close()
    again = stage.bed = (await Stage.make()).bed
    asked = await paused(stage)
    handle, answered = await raced(stage, stage.send("X", on_busy="reject"), stage.bed.answer(asked, decision="allow"))
    await stage.calm()
    assert one_won(answered, handle, (await outcomes(stage))[1:]), (answered, handle)
    assert again is stage.bed


def one_won(answered: Any, handle: Any, ended: list[str]) -> bool:
    """Either the chain went on and the prompt was refused, or it was withdrawn and the answer came too late."""
    if isinstance(answered, RunnerError):
        return handle.refused is None and ended == ["completed"]
    return answered.status in (200, 202) and handle.refused is not None and ended == ["completed"]
