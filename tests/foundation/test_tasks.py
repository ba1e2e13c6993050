"""Background tasks have an owner; clean-up ends although its caller was cancelled (DESIGN 6)."""

from __future__ import annotations

import asyncio
import logging

import pytest

from runner.errors import RunnerError
from runner.tasks import Tasks, shielded

pytestmark = pytest.mark.virtual_time


async def hang() -> None:
    await asyncio.Event().wait()


async def after(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


async def fail() -> None:
    raise ValueError("the reason")


async def test_a_task_has_a_name_and_an_owner():
    tasks = Tasks("pool")
    task = tasks.spawn("teardown a", after(1))
    other = tasks.spawn("teardown b", after(2))
    assert (len(tasks), tasks.names) == (2, ["pool:teardown a", "pool:teardown b"])
    assert await task == "done"
    assert tasks.names == ["pool:teardown b"]
    await other
    assert len(tasks) == 0


async def test_an_error_is_logged_with_the_tasks_name_and_stops_nobody(caplog: pytest.LogCaptureFixture):
    tasks = Tasks("pool")
    tasks.spawn("doomed", fail())
    survivor = tasks.spawn("survivor", after(1))
    assert await survivor == "done"
    [record] = caplog.records
    assert "pool:doomed" in record.getMessage()
    assert record.exc_info is not None
    assert (record.name, record.levelno) == ("runner.tasks", logging.ERROR)


async def test_an_outage_that_ends_a_task_is_told_without_a_traceback(caplog: pytest.LogCaptureFixture):
    async def refused() -> None:
        raise RunnerError("store_unavailable", "The store is away.")

    tasks = Tasks("sessions")
    tasks.spawn("load s", refused())
    assert await tasks.join(1)
    [record] = caplog.records
    assert record.getMessage() == "task sessions:load s ended: The store is away."
    assert (record.exc_info, record.levelno) == (None, logging.WARNING)


async def test_a_cancelled_task_is_no_error(caplog: pytest.LogCaptureFixture):
    tasks = Tasks("pool")
    task = tasks.spawn("idle", hang())
    await asyncio.sleep(0)
    task.cancel()
    assert await tasks.join(1)
    assert caplog.records == []


async def test_join_is_bounded_and_cancels_nobody():
    tasks = Tasks("pool")
    assert await tasks.join(1) is True
    slow = tasks.spawn("slow", after(10))
    assert await tasks.join(4) is False
    assert not slow.done()
    assert asyncio.get_running_loop().time() == pytest.approx(4)
    assert await tasks.join(10) is True
    assert asyncio.get_running_loop().time() == pytest.approx(10)


async def test_join_waits_for_what_a_task_spawns_before_it_ends():
    tasks = Tasks("pool")

    async def parent() -> None:
        await asyncio.sleep(1)
        tasks.spawn("child", after(5))

    tasks.spawn("parent", parent())
    assert await tasks.join(20) is True
    assert len(tasks) == 0
    assert asyncio.get_running_loop().time() == pytest.approx(6)


async def test_join_gives_up_at_one_deadline_for_all_generations():
    tasks = Tasks("pool")

    async def endless() -> None:
        await asyncio.sleep(1)
        tasks.spawn("again", endless())

    tasks.spawn("first", endless())
    assert await tasks.join(5.5) is False
    assert asyncio.get_running_loop().time() == pytest.approx(5.5)
    await tasks.close()


async def test_close_cancels_and_waits_boundedly():
    tasks = Tasks("pool")
    undone: list[str] = []

    async def undoes() -> None:
        try:
            await hang()
        finally:
            await asyncio.sleep(1)
            undone.append("undone")

    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(100)
                return
            except asyncio.CancelledError:
                continue

    tasks.spawn("undoes", undoes())
    tasks.spawn("stubborn", stubborn())
    await asyncio.sleep(0)
    await tasks.close(3)
    assert undone == ["undone"]
    assert asyncio.get_running_loop().time() == pytest.approx(3)
    assert tasks.names == ["pool:stubborn"]
    assert await tasks.join(200)


async def test_shielded_returns_what_the_work_returns():
    assert await shielded(after(1), 5) == "done"
    with pytest.raises(ValueError, match="the reason"):
        await shielded(fail(), 5)


async def test_shielded_work_is_bounded():
    with pytest.raises(TimeoutError):
        await shielded(hang(), 5)
    assert asyncio.get_running_loop().time() == pytest.approx(5)


@pytest.mark.parametrize("cancels", [1, 3])
async def test_shielded_work_ends_before_the_cancelled_caller_does(cancels: int):
    story: list[str] = []

    async def clean_up() -> None:
        await asyncio.sleep(10)
        story.append("cleaned")

    async def caller() -> None:
        try:
            await shielded(clean_up(), 60)
        finally:
            story.append("caller ended")

    task = asyncio.create_task(caller())
    for _ in range(cancels):
        await asyncio.sleep(1)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert story == ["cleaned", "caller ended"]
    assert task.cancelled()


async def test_shielded_work_of_a_cancelled_caller_is_bounded_all_the_same(caplog: pytest.LogCaptureFixture):
    task = asyncio.create_task(shielded(hang(), 5))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.get_running_loop().time() == pytest.approx(5)
    assert "clean-up failed" in caplog.text


async def test_work_that_is_cancelled_itself_says_so():
    async def cancels_itself() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await shielded(cancels_itself(), 5)
    assert asyncio.get_running_loop().time() == 0


async def test_a_cancel_at_the_very_moment_of_the_end_is_not_lost():
    gate = asyncio.Event()
    task = asyncio.create_task(shielded(gate.wait(), 60))
    await asyncio.sleep(1)
    gate.set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
