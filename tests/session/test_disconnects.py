"""Nothing of a turn depends on who dispatched it: the client goes away at each await (case H8)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.session.port import ReaderEnded
from tests.session.bed import Bed, types
from tests.session.gates import Gate
from tests.session.reading import (
    ended,
    lease,
    presence,
)

pytestmark = pytest.mark.virtual_time


async def client(bed: Bed) -> None:
    """What a request handler does: dispatch, read everything, take the result."""
    handle = await bed.dispatch(prompt="hello", prompt_id="x")
    reader = handle.reader()
    try:
        while True:
            await reader.next(10)
    except ReaderEnded:
        await handle.result()
    finally:
        reader.close()


async def check_turn_without_reader(bed: Bed, *, admitted: bool) -> None:
    """The turn of a client that went away runs to its end and leaves nothing."""
    if admitted:
        agent = await bed.agent()
        frame = await agent.prompt()
        await asyncio.sleep(11)
        assert presence(bed) == 0
        agent.say("nobody hears this")
        agent.answer(frame)
        async for _ in ended(bed, "x"):
            pass
        await asyncio.sleep(1)
        row = await bed.store.prompt("p", "s", "x")
        assert (row.state, row.result["outcome"], row.result["text"]) == ("done", "completed", "nobody hears this")
        assert types(await bed.history()).count("done") == 1
    else:
        await asyncio.sleep(11)
        assert await bed.store.prompt("p", "s", "x") is None
        assert bed.provider.sandboxes == []
    assert bed.provider.alive == set()
    assert (lease(bed).alive, lease(bed).running) == (None, None)
    assert await bed.store.open_turns() == []
    assert (await bed.turn(agents=len(bed.provider.sandboxes) + 1))["ok"] is True


@pytest.mark.parametrize("call", ["session", "prompt", "admit", "end"])
async def test_a_disconnect_at_a_store_call_case_h8(bed: Bed, call: str) -> None:
    gate = bed.store.gates[call] = Gate()
    gone = asyncio.create_task(client(bed))
    if call == "end":
        await (await bed.agent()).finish()
    await gate.reached.wait()
    gone.cancel()
    await asyncio.wait([gone])
    gate.open()
    if call == "end":
        async for _ in ended(bed, "x"):
            pass
        await asyncio.sleep(0.1)
        assert (lease(bed).alive, lease(bed).running) == (None, None)
        assert (await bed.turn(nth=2))["start"] == "hit", "the reader is gone for less than the grace"
    else:
        await check_turn_without_reader(bed, admitted=call == "admit")


@pytest.mark.parametrize("phase", ["running", "ended"])
async def test_a_disconnect_at_a_beat_case_h8(bed: Bed, phase: str) -> None:
    plane: Any = bed.replica.plane
    gate = Gate()
    if phase == "running":
        plane.gates["running"] = gate
    gone = asyncio.create_task(client(bed))
    if phase == "ended":
        agent = await bed.agent()
        frame = await agent.prompt()
        plane.gates["parked"] = gate
        agent.say("ok")
        agent.answer(frame)
    await gate.reached.wait()
    gone.cancel()
    await asyncio.wait([gone])
    gate.open()
    if phase == "running":
        await check_turn_without_reader(bed, admitted=True)
    else:
        await asyncio.sleep(0.1)
        assert (await bed.turn(nth=2))["start"] == "hit"


@pytest.mark.parametrize("place", ["start", "initialize", "session/new", "mark", "prompt"])
async def test_a_disconnect_while_it_is_prepared_case_h8(bed: Bed, place: str) -> None:
    gate = asyncio.Event()
    if place == "start":
        bed.provider.start_gate = gate
    elif place == "mark":
        bed.provider.mark_gate = gate
    elif place != "prompt":
        bed.provider.manners[f"gate:{place}"] = gate
    gone = asyncio.create_task(client(bed))
    await asyncio.sleep(1)
    gone.cancel()
    await asyncio.wait([gone])
    gate.set()
    await check_turn_without_reader(bed, admitted=True)


async def test_a_disconnect_at_every_step_case_h8() -> None:
    """The client is cancelled after each of its first loop steps: before, at and behind the admission."""
    admitted = set()
    for steps in range(30):
        bed = await Bed.make()
        gone = asyncio.create_task(client(bed))
        for _ in range(steps):
            await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([gone])
        await asyncio.sleep(1)
        admitted.add(bool(bed.provider.sandboxes))
        await check_turn_without_reader(bed, admitted=bool(bed.provider.sandboxes))
        await bed.close()
        assert bed.provider.alive == set()
    assert admitted == {True, False}
