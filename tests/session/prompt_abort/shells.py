"""Scenarios 30, 38 to 44, S5 and D1: commands of the user, and turns that no prompt owns."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.sandbox.port import Ran
from tests.session.bed import CALLER, FakeCommand, types
from tests.session.prompt_abort.stage import Stage, scenario


async def command(stage: Stage) -> FakeCommand:
    """The command that runs."""
    await stage.calm()
    running = stage.bed.sandbox().command
    assert running is not None
    return running


async def shell(stage: Stage) -> asyncio.Task[dict[str, Any]]:
    """A shell that runs."""
    task = asyncio.create_task(stage.bed.shell("make"))
    stage.tasks.append(task)
    (await command(stage)).heard(b"built\n")
    return task


async def shell_ends(stage: Stage) -> None:
    """It ends by itself."""
    (await command(stage)).ended.set_result(Ran(0, None))


async def resumed(stage: Stage) -> None:
    """A was aborted, and an explicit resume is with the model."""
    await stage.active()
    assert stage.abort("A") is True
    await stage.yields(1)
    await stage.result("A")
    await stage.calm()
    assert await stage.bed.sessions.resume(CALLER, "s") is not None
    await stage.model(2)


@scenario("30")
async def an_abort_of_context_leaves_the_shell(stage: Stage) -> None:
    running = await shell(stage)
    await stage.context("X")
    assert stage.abort("X") is False
    await stage.calm()
    assert not running.done()
    await shell_ends(stage)
    reply = await running
    assert (reply["exit_code"], reply["output"]) == (0, "built\n")
    await stage.check()


@scenario("38")
async def a_late_abort_leaves_the_resumed_turn(stage: Stage) -> None:
    await resumed(stage)
    cancels = stage.cancels
    assert stage.abort("A") is False
    await stage.calm()
    assert stage.cancels == cancels
    await stage.finish(2)
    await stage.calm()
    assert await stage.texts() == ["a1*", "a2"]
    await stage.check(["A"], stage.frames[1], idles=2, A="aborted")


@scenario("39")
async def nothing_to_resume(stage: Stage) -> None:
    await stage.active("B")
    assert stage.abort("B") is True
    await stage.finish(1)
    await stage.result("A")
    await stage.calm()
    assert await stage.bed.sessions.resume(CALLER, "s") is None
    await stage.check(["A"], A="done", B="cancelled")


@scenario("40")
async def an_abort_of_what_waits_leaves_the_resumed_turn(stage: Stage) -> None:
    await resumed(stage)
    await stage.send("B")
    cancels = stage.cancels
    assert stage.abort("B") is True
    await stage.calm()
    assert stage.cancels == cancels
    await stage.finish(2)
    await stage.check(["A"], stage.frames[1], idles=2, A="aborted", B="cancelled")


@scenario("41")
async def a_resumed_turn_is_stopped_once(stage: Stage) -> None:
    await resumed(stage)
    reply = await stage.stop()
    assert reply.body["state"] == "stopping"
    await stage.yields(2, cancels=2)
    await stage.check(["A"], stage.frames[1], idles=2, A="aborted")
    outcomes = [event["data"]["outcome"] for event in await stage.events() if event["type"] == "done"]
    assert outcomes == ["cancelled", "cancelled"]


@scenario("42")
async def no_shell_beside_a_prompt(stage: Stage) -> None:
    await stage.active()
    with pytest.raises(RunnerError) as refused:
        await stage.bed.shell("make")
    assert refused.value.code == "session_turn_in_use"
    await stage.finish(1)
    await stage.check(["A"], A="done")


@scenario("43")
async def an_abort_leaves_the_shell(stage: Stage) -> None:
    running = await shell(stage)
    await stage.send("P")
    await stage.send("Q")
    assert stage.abort("P") is True
    await stage.calm()
    assert not running.done()
    await shell_ends(stage)
    await stage.finish(1)
    [[output, last]] = stage.frames
    assert ("built" in output, last) == (True, "Q")
    await stage.check([output, "Q"], P="cancelled", Q="done")
    await stage.close()
    stage.bed = (await Stage.make()).bed
    running = await shell(stage)
    await stage.send("P")
    ending = stage.hold_store("end")
    await shell_ends(stage)
    await ending.reached.wait()
    assert stage.abort("P") is True
    stage.release("end")
    assert (await running)["exit_code"] == 0
    await stage.check(P="cancelled")


@scenario("44")
async def a_stop_kills_the_shell_whole(stage: Stage) -> None:
    running = await shell(stage)
    await stage.send("P")
    teardown = stage.bed.provider.kill_gate = asyncio.Event()
    await stage.stop()
    await stage.calm()
    assert (await stage.result("P"))["outcome"] == "cancelled"
    with pytest.raises(RunnerError) as refused:
        await stage.bed.shell("again")
    assert refused.value.code == "session_turn_in_use"
    assert (await stage.idles(), running.done()) == (0, False)
    teardown.set()
    reply = await running
    assert (reply["output"], reply["aborted"], reply["exit_code"]) == ("built\n", True, None)
    await stage.check(P="cancelled")


@scenario("S5")
async def a_shell_is_not_steered(stage: Stage) -> None:
    running = await shell(stage)
    handle = await stage.send("X", on_busy="steer")
    assert handle.refused is not None and handle.refused.code == "session_turn_in_use"
    assert await stage.store.prompt("p", "s", "X") is None
    assert not running.done()
    await shell_ends(stage)
    await running
    await stage.check()


@scenario("D1")
async def a_turn_without_the_queue_announces_itself(stage: Stage) -> None:
    await resumed(stage)
    (await stage.agent()).exit(3)
    await stage.calm()
    events = types(await stage.events())
    assert events[events.index("error") :] == ["error", "done", "session_idle"]
    await stage.check(["A"], stage.frames[1], errors=1, idles=2, A="aborted")
