"""A start that is cancelled at any of its await points leaves nothing (cases C7, D7)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from pathlib import Path
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.sandbox.local import LocalProvider
from tests.sandbox import bed
from tests.sandbox.bed import Talk, spec, until


class CancelledAt:
    """Awaits ``work`` and cancels its own task just as ``work`` suspends for the n-th time."""

    def __init__(self, work: Coroutine[Any, Any, Any], n: int) -> None:
        self._work = work
        self._n = n
        self.suspensions = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        inner = self._work.__await__()
        task = asyncio.current_task()
        assert task is not None
        step: Any = inner.send
        value: Any = None
        while True:
            try:
                waits_for = step(value)
            except StopIteration as end:
                return end.value
            self.suspensions += 1
            if self.suspensions == self._n:
                task.cancel()
            try:
                value = yield waits_for
                step = inner.send
            except BaseException as error:
                step, value = inner.throw, error


async def cancelled_at(work: Coroutine[Any, Any, Any], n: int) -> tuple[Any, int]:
    """The outcome of the work, or the error it ended with, and how often it suspended."""
    wrapped = CancelledAt(work, n)

    async def run() -> Any:
        return await wrapped

    result = (await asyncio.gather(asyncio.ensure_future(run()), return_exceptions=True))[0]
    return result, wrapped.suspensions


async def test_a_start_cancelled_at_every_await_leaves_nothing(provider: LocalProvider, store_id: str) -> None:
    """Case D7."""
    before = bed.descriptors()
    n, met = 0, 0
    while True:
        n += 1
        result, suspensions = await cancelled_at(provider.start(spec(f"seat_{n}")), n)
        if suspensions < n:
            break
        met += 1
        assert isinstance(result, asyncio.CancelledError), result
        assert provider.live == ()
        assert bed.carriers(store_id) == {}
        assert bed.zombies() == []
        assert bed.descriptors() == before
    assert met >= 2
    talk = Talk(result)
    assert (await talk.line()).startswith("ready")


async def test_a_start_cancelled_at_once_never_forks(provider: LocalProvider, store_id: str) -> None:
    """Case D7: between the task's making and its first step."""
    task = asyncio.ensure_future(provider.start(spec()))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert provider.live == ()
    assert bed.carriers(store_id) == {}


async def test_a_start_cancelled_again_while_it_undoes_itself_leaves_nothing(
    provider: LocalProvider, store_id: str
) -> None:
    """Case D7: an impatient caller does not interrupt the teardown."""
    task = asyncio.ensure_future(provider.start(spec()))
    await until(lambda: provider.live, "the fork")
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    assert task.cancelled()
    assert provider.live == ()
    assert bed.carriers(store_id) == {}


async def test_a_start_met_by_close_leaves_nothing(provider: LocalProvider, store_id: str) -> None:
    """Case C7: the provider closes while the agent is being started."""
    task = asyncio.ensure_future(provider.start(spec()))
    await until(lambda: provider.live, "the fork")
    await provider.close()
    with pytest.raises(RunnerError) as refused:
        await task
    assert refused.value.code in {"sandbox_start_failed", "harness_start_failed"}
    assert provider.live == ()
    assert bed.carriers(store_id) == {}


def test_a_loop_that_ends_is_not_held_up(tmp_path: Path, store_id: str) -> None:
    """Case D7: the loop shuts down, and so cancels, in the middle of a start."""
    before = bed.descriptors()

    async def leave_early() -> tuple[LocalProvider, asyncio.Task[Any]]:
        made = bed.local(tmp_path, store_id)
        task = asyncio.ensure_future(made.start(spec()))
        await until(lambda: made.live, "the fork")
        return made, task

    made, task = asyncio.run(leave_early())
    assert task.cancelled()
    assert made.live == ()
    assert bed.carriers(store_id) == {}
    assert bed.zombies() == []
    assert bed.descriptors() == before
