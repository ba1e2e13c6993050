"""DELETE and several replicas: a session that ends takes no turn of another replica with it (DESIGN 3.7)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from runner.errors import RunnerError
from tests.session.bed import CALLER, Bed
from tests.session.gates import Gate
from tests.session.several import Several

pytestmark = pytest.mark.virtual_time


async def two(several: Several) -> tuple[Bed, Bed]:
    """Two replicas, and a session that nobody holds any more."""
    a, b = await several.replica("a"), await several.replica("b")
    await a.turn()
    live = a.pool.live(("p", "s"))
    assert live is not None
    a.pool.dismiss(live, "test")
    await asyncio.sleep(1)
    return a, b


async def outcome(work: asyncio.Task[Any]) -> Any:
    """What a request came to: its answer, or the code of its error."""
    await asyncio.wait({work})
    error = work.exception()
    return error.code if isinstance(error, RunnerError) else work.result()


async def assert_goes_on(bed: Bed, handle: Any) -> None:
    """The turn runs to its own end, in a session that is there."""
    await (await bed.agent()).finish()
    assert (await handle.result())["ok"]
    assert await bed.state() == "idle"


@pytest.mark.parametrize("call", ["save_session", "delete_session_content"])
async def test_a_session_that_is_being_deleted_admits_nothing_elsewhere(several: Several, call: str) -> None:
    a, b = await two(several)
    gate = several.store.gates[call] = Gate()
    deleting = asyncio.create_task(a.sessions.delete(CALLER, "s"))
    await gate.reached.wait()
    del several.store.gates[call]
    handle = await outcome(asyncio.create_task(b.dispatch(prompt="two", keep_on_disconnect=True)))
    gate.open()
    assert (await deleting).status == 200
    assert handle == "session_ended" or handle.refused is not None
    assert b.provider.sandboxes == []
    row = await several.store.session("p", "s")
    assert row is not None
    assert row.ended_at is not None


async def test_a_delete_gives_way_to_an_admission_that_is_on_its_way(several: Several) -> None:
    a, b = await two(several)
    gate = several.store.gates["admit"] = Gate()
    dispatching = asyncio.create_task(b.dispatch(prompt="two", keep_on_disconnect=True))
    await gate.reached.wait()
    assert await outcome(asyncio.create_task(a.sessions.delete(CALLER, "s"))) == "owned_elsewhere"
    del several.store.gates["admit"]
    gate.open()
    await assert_goes_on(b, await dispatching)
    assert a.provider.removed == []


async def test_a_replica_that_heard_of_no_end_admits_nothing(several: Several) -> None:
    """The plane is away for it: it would admit without a lease."""
    a, b = await two(several)
    several.sides["b"].open.clear()
    dispatching = asyncio.create_task(b.dispatch(prompt="two", keep_on_disconnect=True))
    await asyncio.sleep(1)
    assert (await a.sessions.delete(CALLER, "s")).status == 200
    assert (await dispatching).refused is not None
    several.sides["b"].open.set()
    assert b.provider.sandboxes == []
    assert await outcome(asyncio.create_task(b.dispatch(prompt="three"))) == "session_ended"


@pytest.mark.parametrize("more", [{"context_only": True}, {"on_busy": "queue"}])
async def test_a_prompt_for_a_session_that_was_deleted_meanwhile_is_not_acknowledged(
    several: Several, more: dict[str, Any]
) -> None:
    """Its row would be the only one of that session: no turn ever takes it."""
    a, _ = await two(several)
    if "on_busy" in more:
        await a.dispatch(prompt="runs", keep_on_disconnect=True)
        await (await a.agent(2)).prompt()
    gate = several.store.gates["append"] = Gate()
    sending = asyncio.create_task(a.dispatch(prompt="two", prompt_id="late", **more))
    await gate.reached.wait()
    del several.store.gates["append"]
    row = await several.store.session("p", "s")
    assert row is not None
    await several.store.save_session(replace(row, head_epoch=row.head_epoch + 1, ended_at=1))
    await several.store.delete_session_content("p", "s")
    gate.open()
    assert await outcome(sending) == "session_ended"
    assert await several.store.prompt("p", "s", "late") is None
