"""What a mirror makes of the entries that arrive, in any order that a bus may bring them in."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.ids import Cursor, Ids
from runner.rules.following import Place
from runner.session.live_entry import Entry, decode, encode
from runner.session.mirror import Mirror
from runner.session.outlets import Wish, note_of, wishes_of
from runner.session.port import ReaderCut
from runner.turn.log import Chunk, LogCut, SessionLog
from tests.virtual_time import LoopClock

pytestmark = pytest.mark.virtual_time

KEY = ("p", "s")


def chunk(n: int, epoch: int = 1) -> Chunk:
    return Chunk(epoch, n, n, "p1", b'{"n":%d}\n' % n, b'{"whole":%d}\n' % n if n % 2 else b"")


def entry(first: int, *numbers: int, since: Cursor | None = None, series: str = "s1", **more: Any) -> Entry:
    return Entry(KEY, "owner", series, first, (1, 100), [chunk(n) for n in numbers], since, **more)


class Told:
    """A mirror, and the wishes that it sends."""

    def __init__(self) -> None:
        self.wishes: list[Wish] = []
        log = SessionLog(100_000, 100_000)
        self.mirror = Mirror(KEY, "owner", log, LoopClock(), Ids(), lambda _, wish: self.wishes.append(wish))
        self.mirror.take(entry(7, 1, 2, since=(1, 0)))
        self.reader = log.reader()

    def seen(self) -> list[int]:
        return [chunk.first for chunk in self.reader.chunks()]


@pytest.mark.parametrize(
    "whole",
    [
        entry(7, 1, 2, since=(1, 0), marks={"m": True}, over=True),
        entry(0),
        Entry(("a:b", "s"), "o", "x", 3, (2, 4), [Chunk(2, 3, 4, None, "ä\n\n".encode(), b"")]),
    ],
)
def test_an_entry_is_what_it_was(whole: Entry) -> None:
    assert decode(encode(whole)) == whole


@pytest.mark.parametrize(
    "cut", [b"", b"{}", b"[]\n", b"[1,2,3]\n", encode(entry(0, 1))[:-1], encode(entry(0, 1)) + b"x"]
)
def test_what_is_no_entry_is_told_so(cut: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        decode(cut)


def test_a_wish_is_what_it_was() -> None:
    wishes = {KEY: Wish(Place("s", 4, lost=True), "m", cut=True), ("q", "t"): Wish(Place("", 0), bye=True)}
    assert dict(wishes_of(note_of("me", wishes))) == wishes


async def test_chunks_that_come_twice_are_there_once() -> None:
    told = Told()
    told.mirror.take(entry(7, 1, 2))
    told.mirror.take(entry(8, 2, 3, 4))
    told.mirror.take(entry(11, 5))
    assert told.seen() == [1, 2, 3, 4, 5]
    assert told.wishes == []


async def test_a_gap_is_told_once_and_ends_with_what_is_missing() -> None:
    told = Told()
    for first in (10, 11):
        told.mirror.take(entry(first, first - 6))
    assert told.wishes == [Wish(Place("s1", 9, lost=True))]
    told.mirror.take(entry(9, 3, 4, 5))
    assert told.seen() == [1, 2, 3, 4, 5]
    assert told.mirror.place == Place("s1", 12)
    told.mirror.take(entry(13, 7))
    assert len(told.wishes) == 2


async def test_another_series_counts_only_from_its_beginning() -> None:
    told = Told()
    told.mirror.take(entry(9, 50, series="s2"))
    assert told.seen() == [1, 2]
    assert told.mirror.place == Place("s1", 9)
    told.mirror.take(entry(40, 60, since=(1, 59), series="s2"))
    with pytest.raises(LogCut):
        told.seen()
    assert [chunk.first for chunk in told.mirror.log.reader().chunks()] == [60]
    assert told.mirror.log_since == (1, 59)


async def test_those_who_wait_share_one_question_and_later_ones_the_next() -> None:
    told = Told()
    first = [asyncio.create_task(told.mirror.settle()) for _ in range(3)]
    await asyncio.sleep(0)
    later = [asyncio.create_task(told.mirror.settle()) for _ in range(3)]
    await asyncio.sleep(0)
    (asked,) = told.wishes
    told.mirror.take(entry(9, marks={asked.mark: True}))
    await asyncio.gather(first[0])
    assert not later[-1].done()
    assert len(told.wishes) == 2
    told.mirror.take(entry(9, marks={told.wishes[1].mark: False}))
    results = await asyncio.gather(*first, *later, return_exceptions=True)
    assert results[0] is None
    assert isinstance(results[-1], ReaderCut)


async def test_a_question_without_an_answer_is_given_up_and_the_next_is_asked() -> None:
    told = Told()
    with pytest.raises(ReaderCut):
        await told.mirror.settle()
    again = asyncio.create_task(told.mirror.settle())
    await asyncio.sleep(0)
    told.mirror.take(entry(9, marks={told.wishes[1].mark: True}))
    await again


async def test_a_closed_mirror_answers_nobody_and_says_nothing() -> None:
    told = Told()
    waiting = asyncio.create_task(told.mirror.settle())
    await asyncio.sleep(0)
    told.mirror.close()
    with pytest.raises(ReaderCut):
        await waiting
    said = len(told.wishes)
    told.mirror.presence.cut()
    told.mirror.take(entry(20, 30))
    assert len(told.wishes) == said
