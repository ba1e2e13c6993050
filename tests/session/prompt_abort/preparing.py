"""Scenarios 20 to 24: prompts that are not admitted yet."""

from __future__ import annotations

import pytest

from runner.errors import RunnerError
from tests.session.prompt_abort.stage import Stage, scenario


@scenario("20")
async def aborted_before_anything(stage: Stage) -> None:
    prep = stage.hold("PREP", "B")
    sending = stage.sending("B")
    await prep.reached.wait()
    assert stage.abort("B") is True
    assert stage.session.queue.rules.tokens == {}
    prep.open()
    assert (await (await sending).result())["outcome"] == "cancelled"
    await stage.calm()
    del stage.store.holds["PREP", "B"]
    assert (stage.frames, await stage.store.prompt("p", "s", "B"), stage.bed.provider.sandboxes) == ([], None, [])


@scenario("21")
async def aborted_while_another_runs(stage: Stage) -> None:
    await stage.active()
    prep = stage.hold("PREP", "B")
    sending = stage.sending("B")
    await prep.reached.wait()
    assert stage.abort("B") is True
    prep.open()
    await sending
    assert (await stage.result("B"))["outcome"] == "cancelled"
    await stage.finish(1)
    await stage.check(["A"], A="done")


@scenario("22")
async def aborted_behind_its_row(stage: Stage) -> None:
    persisted = stage.hold("PERSISTED", "B")
    sending = stage.sending("B")
    await persisted.reached.wait()
    assert stage.abort("B") is True
    persisted.open()
    await sending
    assert (await stage.result("B"))["outcome"] == "cancelled"
    await stage.calm()
    await stage.send("D")
    await stage.finish(1)
    await stage.check(["D"], idles=2, B="cancelled", D="done")


@scenario("22b")
async def its_row_is_born_cancelled(stage: Stage) -> None:
    await stage.active()
    async with stage.session.outbox.writing:
        sending = stage.sending("B")
        await stage.calm()
        assert stage.abort("B") is True
        assert (await stage.store.prompt("p", "s", "B")) is None
    await sending
    row = await stage.store.prompt("p", "s", "B")
    assert (row.state, row.result["outcome"]) == ("cancelled", "cancelled")
    await stage.send("C")
    assert stage.abort("A") is True
    await stage.yields(1)
    await stage.finish(2)
    await stage.check(["A"], ["C"], A="aborted", B="cancelled", C="done")


@scenario("23")
async def admitted_too_late(stage: Stage) -> None:
    await stage.active("C")
    persisted = stage.hold("PERSISTED", "B")
    sending = stage.sending("B")
    await persisted.reached.wait()
    assert (stage.abort("B"), stage.abort("A")) == (True, True)
    await stage.yields(1)
    persisted.open()
    await stage.finish(2)
    await sending
    await stage.check(["A"], ["C"], A="aborted", B="cancelled", C="done")


@scenario("24")
async def its_preparation_fails(stage: Stage) -> None:
    await stage.active()
    stage.store.refused.add("B")
    with pytest.raises(RunnerError) as failed:
        await stage.send("B")
    assert failed.value.code == "store_unavailable"
    assert stage.abort("B") is False
    await stage.finish(1)
    assert (await stage.result("A"))["text"] == "a1"
    await stage.check(["A"], A="done", B="failed")
