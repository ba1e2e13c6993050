"""Scenarios 6 to 15 and 25 to 31: what waits, and what is only told."""

from __future__ import annotations

import pytest

from runner.errors import RunnerError
from tests.session.prompt_abort.stage import Stage, scenario


@scenario("6")
async def a_queued_one_is_aborted(stage: Stage) -> None:
    await stage.active("B")
    assert await stage.queue() == ["B"]
    assert stage.abort("B") is True
    assert (await stage.result("B"))["outcome"] == "cancelled"
    assert await stage.queue() == []
    await stage.finish(1)
    await stage.check(["A"], A="done", B="cancelled")


@scenario("7")
async def one_behind_the_other(stage: Stage) -> None:
    await stage.active("B")
    await stage.finish(1)
    await stage.finish(2)
    assert [(await stage.result(name))["text"] for name in "AB"] == ["a1", "a2"]
    await stage.check(["A"], ["B"], A="done", B="done")


async def replaced(stage: Stage) -> None:
    """A is aborted at the model; B, which was queued, starts by itself."""
    await stage.active("B")
    assert stage.abort("A") is True
    await stage.yields(1)
    await stage.model(2)
    assert await stage.idles() == 0


@scenario("8")
async def the_queued_one_starts_by_itself(stage: Stage) -> None:
    await replaced(stage)
    await stage.finish(2)
    assert [(await stage.result(name))["text"] for name in "AB"] == ["a1*", "a2"]
    await stage.check(["A"], ["B"], A="aborted", B="done")


@scenario("9")
async def a_repeated_abort_stops_nothing(stage: Stage) -> None:
    await replaced(stage)
    cancels = stage.cancels
    assert stage.abort("A") is False
    await stage.calm()
    assert stage.cancels == cancels
    await stage.finish(2)
    assert (await stage.result("B"))["text"] == "a2"
    await stage.check(["A"], ["B"], A="aborted", B="done")


@scenario("10")
async def the_middle_one_and_the_running_one(stage: Stage) -> None:
    await stage.active("B", "C")
    assert (stage.abort("B"), stage.abort("A"), stage.abort("B")) == (True, True, False)
    await stage.yields(1)
    await stage.finish(2)
    await stage.check(["A"], ["C"], A="aborted", B="cancelled", C="done")


@scenario("11")
async def an_absorbed_one_owns_nothing(stage: Stage) -> None:
    await stage.active("B", "C")
    await stage.finish(1)
    await stage.model(2)
    assert stage.abort("B") is False
    await stage.finish(2)
    absorbed, owner = await stage.result("B"), await stage.result("C")
    assert (absorbed["outcome"], absorbed["absorbed_by"], absorbed["text"]) == ("absorbed", "C", "")
    assert (owner["text"], owner["prompt_ids"]) == ("a2", ["B", "C"])
    await stage.check(["A"], ["B", "C"], A="done", B="absorbed", C="done")


@scenario("12")
async def the_newest_is_aborted(stage: Stage) -> None:
    await stage.active("B", "C")
    assert stage.abort("C") is True
    await stage.finish(1)
    await stage.finish(2)
    await stage.check(["A"], ["B"], A="done", B="done", C="cancelled")


@scenario("13")
async def all_that_wait_are_aborted(stage: Stage) -> None:
    await stage.active("B", "C")
    assert (stage.abort("B"), stage.abort("C")) == (True, True)
    await stage.finish(1)
    await stage.check(["A"], A="done", B="cancelled", C="cancelled")


async def one_prepares(stage: Stage, *, finishes: bool) -> None:
    """B waits and C is being prepared; B is aborted and A ends: the session stays busy for C."""
    await stage.active("B")
    prep = stage.hold("PREP", "C")
    sending = stage.sending("C")
    await prep.reached.wait()
    assert stage.abort("B") is True
    if finishes:
        await stage.finish(1)
    else:
        assert stage.abort("A") is True
        await stage.yields(1)
    await stage.calm()
    assert (await stage.idles(), stage.frames) == (0, [["A"]])
    prep.open()
    await sending
    await stage.finish(2)


@scenario("14")
async def no_idle_while_one_prepares(stage: Stage) -> None:
    await one_prepares(stage, finishes=False)
    await stage.check(["A"], ["C"], A="aborted", B="cancelled", C="done")


@scenario("15")
async def no_idle_while_one_prepares_behind_a_finish(stage: Stage) -> None:
    await one_prepares(stage, finishes=True)
    await stage.check(["A"], ["C"], A="done", B="cancelled", C="done")


@scenario("25")
async def the_first_admitted_is_the_first_claimed(stage: Stage) -> None:
    prep = stage.hold("PREP", "B")
    sending = stage.sending("B")
    await prep.reached.wait()
    await stage.send("C")
    await stage.model(1)
    prep.open()
    await sending
    assert await stage.queue() == ["B"]
    await stage.finish(1)
    await stage.finish(2)
    await stage.check(["C"], ["B"], B="done", C="done")


@scenario("26")
async def one_id_twice(stage: Stage) -> None:
    await stage.active()
    first = stage.handles["A"]
    again = await stage.send("A")
    with pytest.raises(RunnerError) as refused:
        await stage.bed.dispatch("s", "other", prompt_id="A", on_busy="queue")
    assert refused.value.code == "prompt_conflict"
    await stage.send("B")
    await stage.send("B")
    await stage.finish(1)
    await stage.finish(2)
    assert await first.result() == await again.result()
    await stage.check(["A"], ["B"], A="done", B="done")


@scenario("27")
async def context_on_an_idle_session(stage: Stage) -> None:
    await stage.context("X")
    await stage.calm()
    assert (stage.frames, stage.abort("X"), stage.bed.provider.sandboxes) == ([], False, [])
    assert await stage.events() == []
    await stage.send("A")
    await stage.finish(1)
    await stage.check(["X", "A"], A="done")


@scenario("28")
async def context_beside_a_running_prompt(stage: Stage) -> None:
    await stage.active()
    await stage.context("X")
    await stage.finish(1)
    await stage.check(["A"], A="done")
    await stage.send("B")
    await stage.finish(2)
    await stage.check(["A"], ["X", "B"], idles=2, A="done", B="done")


@scenario("29")
async def an_abort_of_context_stops_nothing(stage: Stage) -> None:
    await stage.active()
    await stage.context("X")
    assert stage.abort("X") is False
    await stage.calm()
    assert stage.cancels == 0
    await stage.finish(1)
    assert (await stage.result("A"))["text"] == "a1"
    await stage.check(["A"], A="done")


@scenario("31")
async def context_outlives_the_prompt_behind_it(stage: Stage) -> None:
    await stage.active()
    await stage.context("X")
    await stage.send("B")
    assert stage.abort("B") is True
    await stage.finish(1)
    await stage.check(["A"], A="done", B="cancelled")
    for nth, name in enumerate("DE", 2):
        await stage.send(name)
        await stage.finish(nth)
        await stage.result(name)
        await stage.calm()
    await stage.check(["A"], ["X", "D"], ["E"], idles=3, A="done", B="cancelled", D="done", E="done")
