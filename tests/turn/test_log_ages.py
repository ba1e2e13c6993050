"""The ring is bounded in time: what nobody came back for is let go, and whoever comes later reads the store."""

from __future__ import annotations

import asyncio

import pytest

from runner.turn.log import Chunk, SessionLog

pytestmark = pytest.mark.virtual_time
KEEP = 600.0


def chunk(n: int) -> Chunk:
    return Chunk(1, n, n, None, b"%d\n" % n)


def kept(log: SessionLog) -> int:
    return log.end - log.start


async def test_old_events_are_let_go_without_anybody_asking() -> None:
    log = SessionLog(10**6, 10**6, KEEP)
    log.append(chunk(1))
    await asyncio.sleep(KEEP - 1)
    assert kept(log) == 1
    assert log.covers((0, 0), (0, 0))
    await asyncio.sleep(10)
    assert kept(log) == 0
    assert not log.covers((0, 0), (0, 0))


async def test_younger_events_stay() -> None:
    log = SessionLog(10**6, 10**6, KEEP)
    for n in range(1, 2001):
        log.append(chunk(n))
        await asyncio.sleep(1)
        assert kept(log) <= KEEP * 1.03
        assert log.base_cursor is not None
        assert n - log.base_cursor[1] >= min(n - 1, KEEP * 0.98)
    await asyncio.sleep(2 * KEEP)
    assert kept(log) == 0


async def test_a_reader_keeps_what_it_has_not_read() -> None:
    log = SessionLog(10**6, 10**6, KEEP)
    reader = log.reader()
    log.append(chunk(1))
    log.append(chunk(2))
    await asyncio.sleep(3 * KEEP)
    assert reader.take() == b"1\n2\n"
    log.append(chunk(3))
    await asyncio.sleep(3 * KEEP)
    assert reader.take() == b"3\n"
    await asyncio.sleep(3 * KEEP)
    assert kept(log) == 0
    log.append(chunk(4))
    assert reader.take() == b"4\n"


async def test_an_emptied_ring_is_used_again() -> None:
    log = SessionLog(30, 60, KEEP)
    for n in range(100, 200):
        log.append(chunk(n))
    log.shrink()
    log.append(chunk(200))
    await asyncio.sleep(KEEP / 2)
    log.restart()
    log.append(chunk(201))
    await asyncio.sleep(KEEP * 0.9)
    assert kept(log) == 1
    await asyncio.sleep(KEEP)
    assert kept(log) == 0
