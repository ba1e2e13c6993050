"""Scenarios 32 to 35: a session-wide Stop."""

from __future__ import annotations

from tests.session.prompt_abort.stage import Stage, scenario


@scenario("32")
async def a_stop_takes_all(stage: Stage) -> None:
    await stage.active("B")
    prep = stage.hold("PREP", "C")
    sending = stage.sending("C")
    await prep.reached.wait()
    reply = await stage.stop()
    assert (reply.status, reply.body["state"], reply.body["cancelled_prompts"]) == (202, "stopping", ["B", "C"])
    prep.open()
    await stage.yields(1)
    await sending
    assert [(await stage.result(name))["outcome"] for name in "ABC"] == ["cancelled"] * 3
    await stage.check(["A"], A="aborted", B="cancelled")


@scenario("33")
async def a_stop_of_nothing(stage: Stage) -> None:
    await stage.active()
    await stage.finish(1)
    await stage.result("A")
    await stage.calm()
    before = await stage.events()
    reply = await stage.stop()
    assert (reply.status, reply.body["state"], reply.body["outcome"]) == (200, "idle", "not_running")
    await stage.calm()
    assert await stage.events() == before
    await stage.check(["A"], A="done")


@scenario("34")
async def one_comes_behind_the_stop(stage: Stage) -> None:
    await stage.active()
    teardown = stage.hold_store("end")
    await stage.stop()
    await stage.yields(1)
    await teardown.reached.wait()
    await_d = stage.sending("D")
    await stage.calm()
    assert (await stage.idles(), stage.frames) == (0, [["A"]])
    stage.release("end")
    await await_d
    await stage.finish(2)
    await stage.check(["A"], ["D"], A="aborted", D="done")


@scenario("35")
async def a_stop_joins_an_abort(stage: Stage) -> None:
    await stage.active()
    teardown = stage.hold_store("end")
    assert stage.abort("A") is True
    await stage.yields(1)
    await teardown.reached.wait()
    await stage.stop()
    stage.release("end")
    await stage.check(["A"], A="aborted")
    assert await stage.texts() == ["a1*"]
