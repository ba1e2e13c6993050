"""The switches of the twin in memory, on a clock that jumps."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.acp.memory import MemoryAgent
from runner.acp.transport import ExitInfo
from runner.errors import RunnerError
from runner.sandbox.memory import MemoryProvider
from runner.sandbox.port import SandboxSpec
from tests.sandbox.bed import Talk
from tests.virtual_time import LoopClock

pytestmark = pytest.mark.virtual_time


async def idle(agent: MemoryAgent) -> None:
    await agent.read_frame()


def spec(seat: str = "seat_1", **changes: Any) -> SandboxSpec:
    return SandboxSpec("default", "of_" + seat, seat, ("agent",), {}, **changes)


@pytest.fixture
def provider(clock: LoopClock) -> MemoryProvider:
    return MemoryProvider(idle, clock=clock)


async def test_a_slow_start_meets_its_deadline(provider: MemoryProvider, clock: LoopClock) -> None:
    provider.faults.start_gate = asyncio.Event()
    with pytest.raises(RunnerError) as refused:
        await provider.start(spec(deadline=clock.monotonic() + 30))
    assert refused.value.code == "sandbox_start_failed"
    assert clock.monotonic() == 30
    assert provider.live == ()


async def test_a_start_cancelled_at_its_gate_leaves_nothing(provider: MemoryProvider) -> None:
    """Case D7."""
    provider.faults.start_gate = asyncio.Event()
    task = asyncio.ensure_future(provider.start(spec()))
    await asyncio.sleep(1)
    task.cancel()
    await asyncio.sleep(0)
    assert task.cancelled()
    provider.faults.start_gate.set()
    await provider.start(spec())
    assert provider.live == ("seat_1",)


async def test_a_mark_waits_for_its_gate(provider: MemoryProvider, clock: LoopClock) -> None:
    provider.faults.mark_gate = asyncio.Event()
    sandbox = await provider.start(spec())
    mark = sandbox.mark("turn_1")
    with pytest.raises(RunnerError) as refused:
        await mark.set(3)
    assert refused.value.code == "sandbox_lost"
    assert (clock.monotonic(), sandbox.marks, sandbox.taken) == (3, ["turn_1"], [])
    provider.faults.mark_gate.set()
    await mark.set(3)
    assert sandbox.taken == ["turn_1"]


async def test_a_kill_takes_the_turn_s_processes_and_names_survivors(provider: MemoryProvider) -> None:
    sandbox = await provider.start(spec())
    killed: list[str] = []
    sandbox.on_kill = killed.append
    await sandbox.mark("turn_1").set(1)
    sandbox.processes["turn_1"] = 4
    provider.faults.survivors = (7,)
    reaped = await sandbox.kill_turn("turn_1", 1)
    assert (reaped.killed, reaped.survivors, killed, sandbox.kills) == (4, (7,), ["turn_1"], ["turn_1"])
    assert (await sandbox.kill_turn("turn_1", 1)).killed == 0


async def test_a_loss_wakes_who_waits_for_an_answer(provider: MemoryProvider, clock: LoopClock) -> None:
    """Case A1."""
    sandbox = await provider.start(spec())
    await sandbox.mark("turn_1").set(1)
    provider.faults.kill_gate = asyncio.Event()
    kill = asyncio.ensure_future(sandbox.kill_turn("turn_1", 100))
    await asyncio.sleep(1)
    sandbox.lose()
    with pytest.raises(RunnerError) as refused:
        await kill
    assert refused.value.code == "sandbox_lost"
    assert clock.monotonic() == 1


async def test_an_unproven_teardown_can_be_tried_again(provider: MemoryProvider) -> None:
    """Case D10."""
    provider.faults.unproven = 1
    sandbox = await provider.start(spec())
    gone = await sandbox.destroy()
    assert (gone.proven, gone.survivors) == (False, (sandbox.agent_pid,))
    assert provider.live == ("seat_1",)
    assert (await sandbox.destroy()).proven
    assert provider.live == ()


async def test_an_agent_that_stays_is_killed_after_its_grace(provider: MemoryProvider, clock: LoopClock) -> None:
    """Case D2."""

    async def deaf(agent: MemoryAgent) -> None:
        await asyncio.Event().wait()

    provider.body = deaf
    sandbox = await provider.start(spec())
    talk = Talk(sandbox)
    assert (await sandbox.destroy(2.0)).proven
    assert clock.monotonic() == 2
    assert await talk.ended() == ExitInfo(signal=9)


async def test_an_agent_that_raises_exits_with_one(provider: MemoryProvider, caplog: pytest.LogCaptureFixture) -> None:
    async def broken(agent: MemoryAgent) -> None:
        raise ValueError("broken agent")

    provider.body = broken
    talk = Talk(await provider.start(spec()))
    assert await talk.ended() == ExitInfo(code=1)
    assert "broken agent" in caplog.text


async def test_a_destroy_waits_for_its_gate(provider: MemoryProvider) -> None:
    provider.faults.destroy_gate = asyncio.Event()
    sandbox = await provider.start(spec())
    destroy = asyncio.ensure_future(sandbox.destroy())
    await asyncio.sleep(100)
    assert not destroy.done()
    assert provider.live == ("seat_1",)
    provider.faults.destroy_gate.set()
    assert (await destroy).proven
