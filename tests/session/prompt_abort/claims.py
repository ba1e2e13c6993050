"""Scenarios 16 to 19, 36 and 37: between the batch and its frame, and between the ending and idle."""

from __future__ import annotations

from tests.session.prompt_abort.stage import Stage, scenario


@scenario("16")
async def the_only_one_is_aborted_behind_the_read(stage: Stage) -> None:
    await stage.active("B")
    read = stage.hold_store("admit")
    await stage.finish(1)
    await read.reached.wait()
    assert stage.abort("B") is True
    stage.release("admit")
    await stage.check(["A"], A="done", B="cancelled")
    assert (await stage.result("B"))["outcome"] == "cancelled"


@scenario("17")
async def one_of_two_is_aborted_behind_the_read(stage: Stage) -> None:
    await stage.active("B", "C")
    read = stage.hold_store("admit")
    await stage.finish(1)
    await read.reached.wait()
    assert stage.abort("B") is True
    stage.release("admit")
    await stage.finish(2)
    assert (await stage.result("C"))["prompt_ids"] == ["C"]
    await stage.check(["A"], ["C"], A="done", B="cancelled", C="done")
    await stage.close()
    stage.bed = (await Stage.make()).bed
    await the_newest_is_aborted_behind_the_read(stage)


async def the_newest_is_aborted_behind_the_read(stage: Stage) -> None:
    """The other half of 17: the one that would have owned the turn."""
    await stage.active("B", "C")
    read = stage.hold_beat("running")
    await stage.finish(1)
    await read.reached.wait()
    assert stage.abort("C") is True
    read.open()
    await stage.finish(2)
    assert (await stage.result("B"))["prompt_ids"] == ["B"]
    await stage.check(["A"], ["B"], A="done", B="done", C="cancelled")


@scenario("18")
async def only_the_owner_can_be_aborted(stage: Stage) -> None:
    await stage.active("B", "C")
    await stage.finish(1)
    await stage.model(2)
    assert stage.abort("B") is False
    await stage.calm()
    assert stage.cancels == 0
    assert stage.abort("C") is True
    await stage.yields(2)
    assert (await stage.result("C"))["text"] == "a2*"
    await stage.check(["A"], ["B", "C"], A="done", B="absorbed", C="aborted")


@scenario("19")
async def what_comes_behind_the_read_waits(stage: Stage) -> None:
    read = stage.hold_store("admit")
    sending = stage.sending("A")
    await read.reached.wait()
    waiting = stage.sending("B")
    await stage.calm()
    stage.release("admit")
    await sending
    await stage.model(1)
    await waiting
    await stage.finish(1)
    await stage.finish(2)
    await stage.check(["A"], ["B"], A="done", B="done")


async def decided(stage: Stage) -> None:
    """A is over and the decision to finish was taken; B is admitted before the session is idle."""
    await stage.active()
    final = stage.hold_beat("parked")
    await stage.finish(1)
    await final.reached.wait()
    await stage.send("B")


@scenario("36")
async def admitted_in_the_final_window(stage: Stage) -> None:
    await decided(stage)
    stage.hold_beat("parked").open()
    await stage.finish(2)
    await stage.check(["A"], ["B"], A="done", B="done")


@scenario("37")
async def aborted_in_the_final_window(stage: Stage) -> None:
    await decided(stage)
    assert stage.abort("B") is True
    stage.hold_beat("parked").open()
    await stage.check(["A"], A="done", B="cancelled")
