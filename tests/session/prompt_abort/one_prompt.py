"""Scenarios 1 to 5: one prompt."""

from __future__ import annotations

from tests.session.bed import types
from tests.session.prompt_abort.stage import Stage, scenario


@scenario("1")
async def plain(stage: Stage) -> None:
    await stage.active()
    await stage.finish(1)
    assert (await stage.result("A"))["text"] == "a1"
    await stage.check(["A"], A="done")


@scenario("2")
async def aborted_at_the_model(stage: Stage) -> None:
    await stage.active()
    assert stage.abort("A") is True
    await stage.yields(1)
    result = await stage.result("A")
    assert (result["outcome"], result["text"]) == ("cancelled", "a1*")
    await stage.check(["A"], A="aborted")
    assert await stage.texts() == ["a1*"]
    await stage.send("D")
    await stage.finish(2)
    await stage.check(["A"], ["D"], idles=2, A="aborted", D="done")


@scenario("3")
async def nothing_to_abort(stage: Stage) -> None:
    await stage.active()
    await stage.finish(1)
    await stage.result("A")
    await stage.calm()
    before, writes = await stage.events(), stage.store.called["append"]
    assert (stage.abort("A"), stage.abort("unknown")) == (False, False)
    await stage.calm()
    assert (await stage.events(), stage.store.called["append"]) == (before, writes)
    await stage.check(["A"], A="done")


@scenario("4")
async def aborted_again_while_torn_down(stage: Stage) -> None:
    await stage.active()
    teardown = stage.hold_store("end")
    assert stage.abort("A") is True
    await stage.yields(1)
    await teardown.reached.wait()
    assert stage.abort("A") is False
    await stage.calm()
    assert await stage.idles() == 0
    stage.release("end")
    await stage.check(["A"], A="aborted")


@scenario("5")
async def aborted_behind_its_natural_finish(stage: Stage) -> None:
    await stage.active("B")
    read = stage.hold_store("admit")
    await stage.finish(1)
    await read.reached.wait()
    assert stage.abort("A") is False
    stage.release("admit")
    await stage.finish(2)
    assert (await stage.result("A"))["outcome"] == "completed"
    await stage.check(["A"], ["B"], A="done", B="done")
    assert "error" not in types(await stage.events())
