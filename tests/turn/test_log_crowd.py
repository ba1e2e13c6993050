"""Many readers of one session: they are woken together, share their bytes, and none of them is cut for it."""

from __future__ import annotations

import asyncio

import pytest

from runner.turn.log import CROWD, GATHER_SECONDS, Chunk, LogCut, LogReader, SessionLog

pytestmark = pytest.mark.virtual_time


def chunk(n: int, size: int = 10, prompt: str | None = None) -> Chunk:
    return Chunk(1, n, n, prompt, b"%d %b\n" % (n, b"x" * size), b"%d whole\n" % n if n % 3 == 0 else b"")


async def read(reader: LogReader, until: int, into: list[bytes]) -> None:
    while sum(map(len, into)) < until:
        lines = await reader.next(60)
        assert lines is not None
        into.append(lines)


def crowd(log: SessionLog, count: int = 100) -> tuple[list[LogReader], list[list[bytes]]]:
    return [log.reader() for _ in range(count)], [[] for _ in range(count)]


async def test_a_crowd_gets_everything_in_few_deliveries_of_the_same_bytes() -> None:
    log = SessionLog(10**6, 10**6)
    readers, got = crowd(log)
    chunks = [chunk(n) for n in range(1, 501)]
    whole = b"".join(one.lines for one in chunks)
    tasks = [asyncio.ensure_future(read(r, len(whole), into)) for r, into in zip(readers, got, strict=True)]
    await asyncio.sleep(0)
    begun = asyncio.get_running_loop().time()
    for one in chunks:
        log.append(one)
        await asyncio.sleep(0.01)
    await asyncio.gather(*tasks)
    assert all(b"".join(into) == whole for into in got)
    rounds = (asyncio.get_running_loop().time() - begun) / 0.2
    assert all(len(into) <= rounds + 2 for into in got)
    assert all(mine is first for into in got for mine, first in zip(into, got[0], strict=True))


async def test_a_crowd_waits_for_an_event_at_most_a_moment() -> None:
    log = SessionLog(10**6, 10**6)
    readers, _ = crowd(log, 1000)
    waiting = [asyncio.ensure_future(reader.next(60)) for reader in readers]
    await asyncio.sleep(0)
    begun = asyncio.get_running_loop().time()
    log.append(chunk(1))
    await asyncio.gather(*waiting)
    assert asyncio.get_running_loop().time() - begun <= GATHER_SECONDS


async def test_whoever_dispatched_the_prompt_is_not_of_the_crowd() -> None:
    log = SessionLog(10**6, 10**6)
    crowd(log)
    own = log.reader(prompt_id="p")
    waiting = asyncio.ensure_future(own.next(60))
    await asyncio.sleep(0)
    begun = asyncio.get_running_loop().time()
    log.append(chunk(1, prompt="p"))
    assert await waiting == chunk(1, prompt="p").lines
    assert asyncio.get_running_loop().time() == begun


async def test_few_readers_wait_for_nothing() -> None:
    log = SessionLog(10**6, 10**6)
    readers, _ = crowd(log, CROWD)
    waiting = [asyncio.ensure_future(reader.next(60)) for reader in readers]
    await asyncio.sleep(0)
    begun = asyncio.get_running_loop().time()
    log.append(chunk(1))
    await asyncio.gather(*waiting)
    assert asyncio.get_running_loop().time() == begun


async def test_a_flood_wakes_the_crowd_before_it_is_cut() -> None:
    log = SessionLog(2000, 4000)
    readers, got = crowd(log)
    chunks = [chunk(n, 100) for n in range(1, 400)]
    size = sum(len(one.lines) for one in chunks)
    tasks = [asyncio.ensure_future(read(r, size, into)) for r, into in zip(readers, got, strict=True)]
    await asyncio.sleep(0)
    for one in chunks:
        log.append(one)
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert all(b"".join(into) == b"".join(one.lines for one in chunks) for into in got)


async def test_readers_of_records_and_of_frames_share_no_bytes() -> None:
    log = SessionLog(10**6, 10**6)
    plain, _ = crowd(log, 20)
    for n in range(1, 10):
        log.append(chunk(n))
    whole = [log.reader(whole=True) for _ in range(20)]
    late = log.reader()
    late.skip_to((1, 4))
    lines = {reader.take() for reader in plain}
    assert lines == {b"".join(chunk(n).lines for n in range(1, 10))}
    assert {reader.take() for reader in whole} == {b"".join(chunk(n).whole or chunk(n).lines for n in range(1, 10))}
    assert late.take() == b"".join(chunk(n).lines for n in range(5, 10))


async def test_a_restart_cuts_a_crowd_too() -> None:
    log = SessionLog(10**6, 10**6)
    readers, _ = crowd(log, 20)
    log.append(chunk(1))
    assert readers[0].take() == chunk(1).lines
    log.restart()
    for reader in readers[1:]:
        with pytest.raises(LogCut):
            reader.take()
