"""A reader that waits: for lines, for the silence to be told, for the end (DESIGN 3.9, case H7)."""

from __future__ import annotations

import asyncio

import pytest

from runner.turn.log import LogCut, LogEnded, SessionLog
from tests.turn.test_log import SIZE, chunk, cursors, filled

pytestmark = pytest.mark.virtual_time


async def test_it_wakes_for_a_new_event():
    log = SessionLog(1000, 1000)
    reader = log.reader()
    asyncio.get_running_loop().call_later(3, log.append, chunk(1))
    assert cursors(await reader.next(10)) == ["1.1"]
    assert asyncio.get_running_loop().time() == pytest.approx(3)


async def test_it_says_so_after_the_silence():
    reader = SessionLog(1000, 1000).reader()
    assert await reader.next(10) is None
    assert asyncio.get_running_loop().time() == pytest.approx(10)
    assert await reader.next(10) is None


async def test_the_silence_of_one_prompt_is_not_broken_by_anothers_events():
    log = SessionLog(10**6, 10**6)
    reader = log.reader(prompt_id="p1")
    loop = asyncio.get_running_loop()
    for n in range(1, 30):
        loop.call_later(n, log.append, chunk(n, prompt="p2"))
    assert await reader.next(10) is None
    assert loop.time() == pytest.approx(10)


async def test_it_ends_behind_the_last_event():
    log = filled(chunk(1), chunk(2))
    reader = log.reader()
    over: list[bool] = []
    reader.end_when(lambda: bool(over))
    assert cursors(await reader.next(1)) == ["1.1", "1.2"]
    log.append(chunk(3))
    over.append(True)
    assert cursors(await reader.next(1)) == ["1.3"]
    with pytest.raises(LogEnded):
        await reader.next(1)


async def test_a_waiting_reader_is_woken_by_the_end():
    reader = SessionLog(1000, 1000).reader()
    waiting = asyncio.create_task(reader.next(60))
    await asyncio.sleep(1)
    reader.end_when(lambda: True)
    with pytest.raises(LogEnded):
        await waiting
    assert asyncio.get_running_loop().time() == pytest.approx(1)


async def test_a_waiting_reader_is_not_cut_by_what_comes_at_once_case_e1():
    """However many events it is: it had no chance to read any of them. One that comes back too late is cut."""
    log = SessionLog(SIZE, 2 * SIZE)
    reader = log.reader()
    waiting = asyncio.create_task(reader.next(60))
    await asyncio.sleep(1)
    for n in range(1, 31):
        log.append(chunk(n, size=SIZE // 2))
    assert cursors(await waiting) == [f"1.{n}" for n in range(1, 31)]
    for n in range(31, 61):
        log.append(chunk(n, size=SIZE // 2))
    for n in range(61, 91):
        log.append(chunk(n, size=SIZE // 2))
    with pytest.raises(LogCut):
        await reader.next(60)


async def test_a_cancelled_wait_leaves_the_reader_usable():
    log = SessionLog(1000, 1000)
    reader = log.reader()
    waiting = asyncio.create_task(reader.next(60))
    await asyncio.sleep(1)
    waiting.cancel()
    await asyncio.wait([waiting])
    log.append(chunk(1))
    assert cursors(await reader.next(1)) == ["1.1"]


async def test_a_lingering_reader_gathers_a_moment_behind_the_first_event():
    log = SessionLog(10**6, 10**6)
    reader = log.reader(linger_seconds=0.5)
    loop = asyncio.get_running_loop()
    for n, at in enumerate((1.0, 1.2, 1.4, 1.6), start=1):
        loop.call_later(at, log.append, chunk(n))
    assert cursors(await reader.next(60)) == ["1.1", "1.2", "1.3"]
    assert loop.time() == pytest.approx(1.5)
    assert cursors(await reader.next(60)) == ["1.4"]
    assert await reader.next(10) is None


async def test_it_does_not_linger_behind_the_last_event():
    log = SessionLog(10**6, 10**6)
    reader = log.reader(linger_seconds=0.5)
    over: list[bool] = []
    reader.end_when(lambda: bool(over))
    log.append(chunk(1))

    def end() -> None:
        over.append(True)
        reader.wake()

    asyncio.get_running_loop().call_later(0.1, end)
    assert cursors(await reader.next(60)) == ["1.1"]
    assert asyncio.get_running_loop().time() == pytest.approx(0.1)
    with pytest.raises(LogEnded):
        await reader.next(60)
