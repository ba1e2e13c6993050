"""Scenarios W1 to W12: what is written to the agent, and when."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from runner.harness.spec import STALE_RESULT_AFTER_CANCEL
from tests.session.bed import CALLER, Bed, types
from tests.session.prompt_abort.stage import Stage, scenario
from tests.session.several import Several
from tests.session.test_restart import crash


@scenario("W1")
async def aborted_while_the_answer_is_in_the_pipe(stage: Stage) -> None:
    await stage.active("B")
    agent = await stage.agent()
    agent.say("a1")
    agent.answer(await agent.prompt())
    assert stage.abort("A") is True
    await stage.finish(2)
    assert stage.cancels <= 1
    order = [
        frame.get("method") for frame in agent.frames if frame.get("method") in ("session/prompt", "session/cancel")
    ]
    assert order[-1] == "session/prompt"
    await stage.check(["A"], ["B"], A="aborted", B="done")


@scenario("W2")
async def aborted_behind_the_answer(stage: Stage) -> None:
    await stage.active()
    ending = stage.hold_store("end")
    await stage.finish(1)
    await ending.reached.wait()
    assert stage.abort("A") is False
    stage.release("end")
    await stage.check(["A"], A="done")
    assert stage.cancels == 0


@scenario("W3")
async def the_agent_ignores_the_cancel(stage: Stage) -> None:
    await stage.active("B")
    assert stage.abort("A") is True
    await asyncio.sleep(11)
    await stage.finish(1, agent=2)
    result = await stage.result("B")
    assert (result["context_lost"], result["text"]) == (True, "a1")
    assert stage.bed.sandbox(1).gone.is_set()
    assert [frame[-1] for frame in stage.frames] == ["A", "B"]
    assert (await stage.result("A"))["cancel_settled"] is False
    assert await stage.idles() == 1


@scenario("W4")
async def a_stale_ending_behind_a_cancel(stage: Stage) -> None:
    await stage.active("B")
    agent = await stage.agent()
    assert stage.abort("A") is True
    await stage.yields(1)
    agent.answer(await stage.model(2))
    assert (await stage.result("B"))["error"]["code"] == "empty_turn"
    await stage.check(["A"], ["B"], errors=1, A="aborted", B="failed")
    await stage.close()
    stage.bed = (await Stage.make()).bed
    await stale_with_the_quirk(stage)


async def stale_with_the_quirk(stage: Stage) -> None:
    specs = stage.bed.replica.services.provisioner.catalogue._specs
    specs["demo"] = replace(specs["demo"], quirks=frozenset({STALE_RESULT_AFTER_CANCEL}))
    await stage.active("B")
    agent = await stage.agent()
    assert stage.abort("A") is True
    await stage.yields(1)
    agent.answer(await stage.model(2))
    await stage.finish(3)
    assert (await stage.result("B"))["text"] == "a3"
    await stage.check(["A"], ["B"], ["B"], A="aborted", B="done")
    await stage.send("C")
    agent.answer(await stage.model(4))
    assert (await stage.result("C"))["error"]["code"] == "empty_turn"


@scenario("W5")
async def the_permission_is_answered_before_the_cancel(stage: Stage) -> None:
    await stage.active()
    agent = await stage.agent()
    agent.ask(7)
    while not (await stage.bed.sessions.view(CALLER, "s"))["open_interactions"]:
        await asyncio.sleep(0)
    assert stage.abort("A") is True
    await agent.heard("session/cancel")
    answer, cancel = agent.frames[-2:]
    assert (answer["id"], answer["result"]["outcome"]["outcome"], cancel["method"]) == (
        7,
        "cancelled",
        "session/cancel",
    )
    agent.answer(await agent.prompt(), "cancelled")
    await stage.check(["A"], A="aborted")


@scenario("W6")
async def what_the_old_turn_still_says_is_nobodys(stage: Stage) -> None:
    await stage.active("B")
    mark = stage.hold_mark()
    agent = await stage.agent()
    await stage.finish(1)
    agent.say("late 1")
    await stage.calm()
    agent.say("late 2")
    await stage.calm()
    mark.set()
    await stage.finish(2)
    assert (await stage.result("B"))["text"] == "a2"
    await stage.check(["A"], ["B"], A="done", B="done")
    assert await stage.texts() == ["a1", "a2"]


@scenario("W7")
async def aborted_between_the_batch_and_its_frame(stage: Stage) -> None:
    await stage.active("B", "C")
    mark = stage.hold_mark()
    await stage.finish(1)
    await stage.calm()
    assert stage.abort("C") is True
    mark.set()
    await stage.finish(2)
    assert (await stage.result("B"))["text"] == "a2"
    await stage.check(["A"], ["B"], A="done", B="done", C="cancelled")


@scenario("W8")
async def context_leads_the_next_frame_once(stage: Stage) -> None:
    await stage.active()
    await stage.context("X")
    await stage.send("B")
    mark = stage.hold_mark()
    await stage.finish(1)
    await stage.calm()
    assert stage.abort("B") is True
    mark.set()
    await stage.calm()
    await stage.send("D")
    await stage.finish(2)
    await stage.send("E")
    await stage.finish(3)
    assert stage.frames == [["A"], ["X", "D"], ["E"]]
    assert (await stage.result("B"))["outcome"] == "cancelled"


@scenario("W9")
async def the_agent_dies_mid_turn(stage: Stage) -> None:
    await stage.active("B")
    (await stage.agent()).exit(3)
    await stage.finish(1, agent=2)
    assert (await stage.result("A"))["error"]["code"] == "harness_exited"
    assert (await stage.result("B"))["text"] == "a1"
    assert [frame[-1] for frame in stage.frames] == ["A", "B"]
    assert await stage.idles() == 1


@scenario("W10")
async def stopped_while_the_agent_starts(stage: Stage) -> None:
    gate = stage.bed.provider.manners["gate:session/new"] = asyncio.Event()
    await stage.send("A")
    await (await stage.agent()).heard("session/new")
    await stage.stop()
    gate.set()
    assert (await stage.result("A"))["outcome"] == "cancelled"
    await stage.check(A="cancelled")


@scenario("W11")
async def the_id_of_another_replica(stage: Stage) -> None:
    several = Several()
    one, two = await several.replica("a"), await several.replica("b")
    handle = await one.dispatch("s", "A", prompt_id="A", keep_on_disconnect=True)
    agent = await one.agent()
    frame = await agent.prompt()
    assert await two.sessions.abort_prompt(CALLER, "s", "A") is False
    await stage.calm()
    assert agent.all("session/cancel") == []
    agent.say("a1")
    agent.answer(frame)
    assert (await handle.result())["text"] == "a1"
    for bed in (one, two):
        await bed.close()


@scenario("W12")
async def the_runner_is_restarted(stage: Stage) -> None:
    await stage.active("B", "C")
    await stage.context("X")
    await stage.calm()
    second = await Bed.make(store=await crash(stage.bed), replica_id="rep_2")
    agent = await second.agent()
    frame = await agent.prompt()
    texts = [block["text"] for block in frame["params"]["prompt"]]
    assert texts[-3:] == ["B", "C", "X"] or texts[-3:] == ["X", "B", "C"]
    await aborts_a_new_token(second, agent, frame)
    rows = {name: await second.store.prompt("p", "s", name) for name in "ABC"}
    assert {name: row.state for name, row in rows.items()} == {"A": "failed", "B": "absorbed", "C": "aborted"}
    beats = [kind for kind in types(await second.history()) if kind in ("session_busy", "session_idle")]
    assert beats == ["session_busy", "session_idle"] * (len(beats) // 2)
    await second.close()
    stage.bed.provider.alive.clear()


async def aborts_a_new_token(bed: Bed, agent: Any, frame: dict[str, Any]) -> None:
    aborted = [await bed.sessions.abort_prompt(CALLER, "s", name) for name in "AC"]
    assert aborted == [False, True]
    await agent.heard("session/cancel")
    agent.answer(frame, "cancelled")
    await asyncio.sleep(0.5)
    assert len(agent.all("session/prompt")) == 1
