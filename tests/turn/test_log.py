"""The live log: bounded, in order, and no reader is any other reader's business (DESIGN 3.9)."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from runner.turn.log import READ_BYTES, Chunk, LogCut, LogReader, SessionLog


def line(epoch: int, n: int, text: str = "") -> bytes:
    return json.dumps({"cursor": f"{epoch}.{n}", "text": text}).encode() + b"\n"


def chunk(first: int, count: int = 1, *, epoch: int = 1, prompt: str | None = "p1", size: int = 0) -> Chunk:
    lines = b"".join(line(epoch, n, "x" * size) for n in range(first, first + count))
    return Chunk(epoch, first, first + count - 1, prompt, lines)


def cursors(lines: bytes | None) -> list[str]:
    assert lines is not None
    return [json.loads(one)["cursor"] for one in lines.splitlines()]


def filled(*chunks: Chunk, ring: int = 10**6, buffer: int = 10**6) -> SessionLog:
    log = SessionLog(ring, buffer)
    for one in chunks:
        log.append(one)
    return log


SIZE = len(chunk(10, size=100).lines)


def test_a_reader_gets_what_is_kept_and_then_what_comes():
    log = filled(chunk(1), chunk(2, 2))
    reader = log.reader()
    assert cursors(reader.take()) == ["1.1", "1.2", "1.3"]
    assert reader.take() == b""
    log.append(chunk(4))
    assert cursors(reader.take()) == ["1.4"]


def test_a_reader_may_begin_anywhere():
    log = filled(chunk(1), chunk(2))
    at_end = log.reader(at=log.end)
    assert at_end.take() == b""
    log.append(chunk(3))
    assert cursors(at_end.take()) == ["1.3"]


def test_a_readers_bytes_are_the_writers_bytes():
    one = chunk(1)
    assert filled(one).reader().take() is one.lines


def test_a_reader_of_one_prompt_gets_only_its_events():
    log = filled(chunk(1, prompt=None), chunk(2, prompt="p1"), chunk(3, prompt="p2"), chunk(4, prompt="p1"))
    assert cursors(log.reader(prompt_id="p1").take()) == ["1.2", "1.4"]
    assert cursors(log.reader().take()) == ["1.1", "1.2", "1.3", "1.4"]


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ((0, 0), ["1.1", "1.2", "1.3", "1.4", "2.1", "2.2"]),
        ((1, 1), ["1.2", "1.3", "1.4", "2.1", "2.2"]),
        ((1, 2), ["1.3", "1.4", "2.1", "2.2"]),
        ((1, 3), ["1.4", "2.1", "2.2"]),
        ((1, 4), ["2.1", "2.2"]),
        ((1, 99), ["2.1", "2.2"]),
        ((2, 0), ["2.1", "2.2"]),
        ((2, 1), ["2.2"]),
        ((2, 2), []),
        ((3, 0), []),
    ],
)
def test_a_reader_skips_to_a_cursor_also_inside_a_chunk(after: tuple[int, int], expected: list[str]):
    log = filled(chunk(1), chunk(2, 3), chunk(1, 2, epoch=2))
    reader = log.reader()
    reader.skip_to(after)
    assert cursors(reader.take()) == expected


def test_the_ring_keeps_the_newest():
    log = filled(*[chunk(n, size=100) for n in range(1, 11)], ring=3 * SIZE)
    assert cursors(log.reader().take()) == ["1.8", "1.9", "1.10"]
    assert (log.start, log.end, log.base_cursor) == (7, 10, (1, 8))


def test_one_event_larger_than_the_ring_is_kept_all_the_same():
    log = filled(chunk(1), chunk(2, size=5000), ring=100, buffer=100)
    assert cursors(log.reader().take()) == ["1.2"]


def test_a_slow_reader_is_waited_for_up_to_the_buffer_then_cut():
    log = SessionLog(2 * SIZE, 4 * SIZE)
    slow = log.reader()
    for n in range(11, 15):
        log.append(chunk(n, size=100))
    assert log.start == 0
    log.append(chunk(15, size=100))
    with pytest.raises(LogCut):
        slow.take()


def test_a_reader_is_not_cut_by_one_event_larger_than_its_buffer_case_e1():
    """A large text comes as a frame and again as its record: the reader may be behind both, not behind more."""
    large = 40 * SIZE
    log = SessionLog(SIZE, 2 * SIZE)
    reader = log.reader()
    for n in (11, 12):
        log.append(chunk(n, size=large))
    log.append(chunk(13, size=100))
    assert cursors(reader.take() + reader.take()) == ["1.11", "1.12", "1.13"]
    log.append(chunk(14, size=100))
    assert (log.start, log.end) == (3, 4), "what a large event allowed goes with it"
    for n in (15, 16, 17):
        log.append(chunk(n, size=100))
    with pytest.raises(LogCut):
        reader.take()


def test_others_do_not_notice_that_one_is_cut():
    log = SessionLog(2 * SIZE, 3 * SIZE)
    slow, fast = log.reader(), log.reader()
    seen: list[str] = []
    for n in range(1, 21):
        log.append(chunk(n, size=100))
        seen += cursors(fast.take())
    assert seen == [f"1.{n}" for n in range(1, 21)]
    with pytest.raises(LogCut):
        slow.take()


def test_a_cut_reader_keeps_nothing():
    log = SessionLog(2 * SIZE, 4 * SIZE)
    log.reader()
    for n in range(1, 12):
        log.append(chunk(n, size=100))
    assert log.end - log.start == 2


def test_what_everybody_read_is_kept_only_as_far_as_the_ring():
    log = SessionLog(2 * SIZE, 4 * SIZE)
    reader = log.reader()
    for n in range(1, 9):
        log.append(chunk(n, size=100))
        reader.take()
    log.append(chunk(9, size=100))
    assert log.end - log.start == 2


def test_a_detached_reader_holds_nothing_back():
    log = SessionLog(2 * SIZE, 100 * SIZE)
    slow = log.reader()
    slow.close()
    slow.close()
    for n in range(1, 9):
        log.append(chunk(n, size=100))
    assert log.end - log.start == 2


def test_a_read_is_bounded():
    log = filled(*[chunk(n, size=100_000) for n in range(1, 11)], ring=10**7, buffer=10**7)
    reader = log.reader()
    parts = []
    while part := reader.take():
        assert len(part) < READ_BYTES + 110_000
        parts.append(part)
    assert cursors(b"".join(parts)) == [f"1.{n}" for n in range(1, 11)]


def test_a_shrunk_log_gives_its_positions_on():
    log = filled(chunk(1), chunk(2))
    reader = log.reader()
    log.shrink()
    assert cursors(reader.take()) == ["1.1", "1.2"]
    reader.close()
    log.shrink()
    assert (log.start, log.end, log.base_cursor) == (2, 2, None)
    later = log.reader(at=2)
    log.append(chunk(3))
    assert cursors(later.take()) == ["1.3"]


def test_a_shrunk_log_counts_anew_and_knows_that_something_is_gone():
    log = SessionLog(3 * SIZE, 3 * SIZE)
    log.shrink()
    assert log.covers((0, 0), (0, 0))
    for n in range(11, 14):
        log.append(chunk(n, size=100))
    log.shrink()
    for n in range(14, 17):
        log.append(chunk(n, size=100))
    assert cursors(log.reader().take()) == ["1.14", "1.15", "1.16"]
    assert not log.covers((0, 0), (0, 0))
    assert log.covers((1, 13), (0, 0))


@pytest.mark.parametrize(
    ("after", "since", "covered"),
    [
        ((0, 0), (0, 0), True),
        ((1, 4), (0, 0), True),
        ((3, 0), (3, 0), True),
        ((2, 9), (3, 0), False),
        ((3, 5), (3, 0), True),
    ],
)
def test_an_unbroken_ring_covers_what_came_behind_its_beginning(
    after: tuple[int, int], since: tuple[int, int], covered: bool
):
    assert SessionLog(100, 100).covers(after, since) is covered


def test_a_ring_that_dropped_covers_only_from_its_oldest_event():
    log = filled(*[chunk(n, size=100) for n in range(1, 11)], ring=3 * SIZE)
    assert log.base_cursor == (1, 8)
    assert [log.covers((1, n), (0, 0)) for n in (5, 6, 7, 8, 10)] == [False, False, True, True, True]
    assert not log.covers((0, 99), (0, 0))
    log.shrink()
    assert not log.covers((1, 10), (0, 0))


@given(
    st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=12),
    st.integers(1, 800),
    st.integers(0, 40),
)
def test_covered_means_nothing_is_missing(shape: list[tuple[int, bool]], ring: int, after_n: int):
    """Chunks of some lengths, some beginning a new epoch; wherever ``covers`` says yes, the ring has all the rest."""
    log, written, epoch, n = SessionLog(ring, ring), [], 1, 0
    for count, fresh in shape:
        epoch, n = (epoch + 1, 0) if fresh else (epoch, n)
        log.append(chunk(n + 1, count, epoch=epoch))
        written += [(epoch, n + step) for step in range(1, count + 1)]
        n += count
    after = written[min(after_n, len(written) - 1)]
    if log.covers(after, (0, 0)):
        reader = log.reader()
        reader.skip_to(after)
        assert cursors(reader.take()) == [f"{e}.{i}" for e, i in written if (e, i) > after]


class Readers(RuleBasedStateMachine):
    """Readers of every pace: each gets every event once and in order, or is told that it was cut."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0
        self.readers: list[tuple[LogReader, str | None, list[int]]] = []
        self.written: list[tuple[int, str]] = []

    @initialize(ring=st.integers(1, 400), extra=st.integers(0, 800))
    def log_of(self, ring: int, extra: int) -> None:
        self.log = SessionLog(ring, ring + extra)
        self.ring, self.buffer = ring, ring + extra

    @rule(count=st.integers(1, 3), prompt=st.sampled_from(["p1", "p2"]), size=st.integers(0, 60))
    def write(self, count: int, prompt: str, size: int) -> None:
        one = chunk(self.n + 1, count, prompt=prompt, size=size)
        self.written += [(self.n + step, prompt) for step in range(1, count + 1)]
        self.n += count
        self.log.append(one)

    @rule(prompt=st.sampled_from(["p1", "p2", None]))
    def come(self, prompt: str | None) -> None:
        kept = self.log.base_cursor
        first = kept[1] if kept else self.n + 1
        self.readers.append((self.log.reader(prompt_id=prompt), prompt, [first]))

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        if not self.readers:
            return
        reader, prompt, seen = place = data.draw(st.sampled_from(self.readers))
        try:
            got = [int(text.split(".")[1]) for text in cursors(reader.take())]
        except LogCut:
            reader.close()
            self.readers.remove(place)
            return
        due = [n for n, owner in self.written if n >= seen[0] and prompt in (None, owner)]
        assert got == due
        seen[0] = self.n + 1

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.readers:
            place = data.draw(st.sampled_from(self.readers))
            place[0].close()
            self.readers.remove(place)

    @invariant()
    def memory_is_bounded(self) -> None:
        if not hasattr(self, "log"):
            return
        kept = [self.log.chunk(position) for position in range(self.log.start, self.log.end)]
        sizes = [len(one.lines) for one in kept if one]
        assert sum(sizes) <= max(self.buffer, 3 * max(sizes, default=0))
        assert all(one.last + 1 == two.first for one, two in pairwise(kept) if one and two)


TestReaders = Readers.TestCase


def test_a_reader_that_keeps_up_is_not_cut_by_one_event_above_the_buffer():
    """Case E1: a large text comes as a frame, as its record, and is followed by the end of its turn."""
    log = SessionLog(SIZE, 2 * SIZE)
    reader = log.reader()
    log.append(chunk(1, size=100 * SIZE))
    log.append(chunk(2, size=100 * SIZE))
    log.append(chunk(3))
    assert cursors(reader.take()) == ["1.1", "1.2", "1.3"]
    log.append(chunk(4))
    assert log.start == 2
