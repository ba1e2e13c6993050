"""The link's rules: order, once, bounds, resumption (``runner.acp.link``)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.acp import link
from runner.acp.link import Link, LinkError


def connected(**bounds: int) -> tuple[Link, Link]:
    one, two = Link(**bounds), Link(**bounds)
    resume(one, two)
    return one, two


def resume(one: Link, two: Link) -> None:
    one.drop()
    two.drop()
    one_took, two_took = one.received, two.received
    one.resume(two_took)
    two.resume(one_took)


def frames(one: Link) -> list[bytes]:
    found = []
    while (frame := one.next_frame()) is not None:
        found.append(frame)
    return found


def carry(one: Link, two: Link) -> list[tuple[bytes, bytes]]:
    """All that ``one`` has to say now reaches ``two``."""
    return [taken for frame in frames(one) if (taken := two.take(frame)) is not None]


def test_nothing_goes_out_without_a_connection() -> None:
    one = Link()
    one.send(link.CONTROL, b"x")
    assert one.next_frame() is None
    assert not one.settled


def test_control_frames_go_ahead_of_the_stream() -> None:
    one, two = connected()
    one.send_stream(b"data")
    one.end_stream()
    one.send(link.CONTROL, b"line")
    assert carry(one, two) == [(link.CONTROL, b"line"), (link.STREAM, b"data"), (link.STREAM_END, b"")]
    carry(two, one)
    assert one.settled
    assert one.unconsumed == 4


def test_the_last_frame_goes_behind_the_stream_whatever_the_window_is() -> None:
    one, two = connected(window_bytes=4)
    one.send_stream(b"d" * (link.CHUNK_BYTES + 1))
    one.send_stream(b"e")
    one.send_behind(link.CONTROL, b"exited")
    one.end_stream()
    kinds = [(kind, len(payload)) for kind, payload in carry(one, two)]
    stream = [(link.STREAM, size) for size in (link.CHUNK_BYTES, 1, 1)]
    assert kinds == [*stream, (link.CONTROL, 6), (link.STREAM_END, 0)]
    assert one.unconsumed == link.CHUNK_BYTES + 2
    two.consume(one.unconsumed)
    carry(two, one)
    assert (one.settled, one.backlog, one.unconsumed) == (True, 0, 0)


def test_a_large_message_travels_in_chunks() -> None:
    one, two = connected()
    one.send_stream(b"x" * (64 << 20))
    got = 0
    while one.unconsumed:
        taken = carry(one, two)
        assert all(len(payload) <= link.CHUNK_BYTES for _, payload in taken)
        assert one.backlog - (one.unconsumed - sum(len(p) for _, p in taken)) <= link.RING_BYTES
        size = sum(len(payload) for _, payload in taken)
        got += size
        two.consume(size)
        carry(two, one)
    assert got == 64 << 20
    assert one.settled


def test_the_window_closes_until_the_stream_is_consumed() -> None:
    one, two = connected(ring_bytes=10_000_000, window_bytes=1_000_000)
    assert one.has_room()
    one.send_stream(b"x" * 3_000_000)
    first = sum(len(payload) for _, payload in carry(one, two))
    assert 1_000_000 <= first < 1_000_000 + link.CHUNK_BYTES
    carry(two, one)
    assert carry(one, two) == []
    assert not one.has_room()
    one.send(link.CONTROL, b"still")
    assert carry(one, two) == [(link.CONTROL, b"still")]
    two.consume(first)
    carry(two, one)
    assert sum(len(payload) for _, payload in carry(one, two)) > 0


def test_what_a_drop_lost_is_sent_again_and_duplicates_are_dropped() -> None:
    one, two = connected()
    one.send(link.CONTROL, b"1")
    one.send(link.CONTROL, b"2")
    sent = frames(one)[1:]
    assert two.take(sent[0]) == (link.CONTROL, b"1")
    resume(one, two)
    again = [taken for frame in frames(one) if (taken := two.take(frame)) is not None]
    assert again == [(link.CONTROL, b"2")]
    assert two.take(sent[0]) is None


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"", "without a number"),
        (b"s1234567", "without a number"),
        (b"s" + (2).to_bytes(8) + b"x", "behind frame 0"),
        (b"a" + (1).to_bytes(8), "wrong size"),
        (b"a" + (1).to_bytes(8) + (0).to_bytes(8), "not sent"),
        (b"a" + (0).to_bytes(8) + (1).to_bytes(8), "not sent"),
    ],
)
def test_what_breaks_the_rules_is_refused(frame: bytes, why: str) -> None:
    _, two = connected()
    with pytest.raises(LinkError, match=why):
        two.take(frame)


def test_a_resumption_behind_what_is_kept_is_refused_and_changes_nothing() -> None:
    one, two = connected()
    one.send(link.CONTROL, b"1")
    carry(one, two)
    carry(two, one)
    one.drop()
    for received in (0, 2):
        with pytest.raises(LinkError, match="cannot go on"):
            one.resume(received)
    assert not one.connected
    one.resume(1)


STEPS = st.one_of(
    st.tuples(st.just("stream"), st.integers(0, 1), st.integers(1, 3000)),
    st.tuples(st.just("control"), st.integers(0, 1), st.integers(0, 300)),
    st.tuples(st.just("carry"), st.integers(0, 1), st.integers(1, 5)),
    st.tuples(st.just("lose"), st.integers(0, 1), st.integers(1, 5)),
    st.tuples(st.just("consume"), st.integers(0, 1), st.integers(1, 3000)),
    st.tuples(st.just("drop"), st.just(0), st.just(0)),
)


@settings(max_examples=150)
@given(st.lists(STEPS, max_size=60))
def test_whatever_happens_each_end_gets_everything_once_in_order(steps: list[tuple[str, int, int]]) -> None:
    ends = connected(ring_bytes=4000, window_bytes=2000)
    said: list[dict[bytes, bytes]] = [{link.STREAM: b"", link.CONTROL: b""} for _ in ends]
    heard: list[dict[bytes, bytes]] = [{link.STREAM: b"", link.CONTROL: b""} for _ in ends]
    held = [0, 0]
    count = 0

    def deliver(sender: int, frame: bytes) -> None:
        taken = ends[1 - sender].take(frame)
        if taken is not None:
            heard[sender][taken[0]] += taken[1]
            if taken[0] == link.STREAM:
                held[1 - sender] += len(taken[1])

    for what, who, size in steps:
        end = ends[who]
        if what in ("stream", "control"):
            count += 1
            data = (b"%06d" % count * (size // 6 + 1))[:size]
            kind = link.STREAM if what == "stream" else link.CONTROL
            end.send_stream(data) if what == "stream" else end.send(kind, data)
            said[who][kind] += data
        elif what in ("carry", "lose"):
            for _ in range(size):
                frame = end.next_frame()
                if frame is None:
                    break
                if what == "carry":
                    deliver(who, frame)
            if what == "lose":
                resume(*ends)
        elif what == "consume":
            taken = min(size, held[who])
            held[who] -= taken
            end.consume(taken)
        else:
            resume(*ends)
    for _ in range(400):
        for who in (0, 1):
            while (frame := ends[who].next_frame()) is not None:
                deliver(who, frame)
            ends[1 - who].consume(held[1 - who])
            held[1 - who] = 0
    assert heard == said
    assert all(end.settled and end.unconsumed == 0 for end in ends)
