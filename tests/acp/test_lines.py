"""The splitter against a naive model that holds the whole stream (cases E1, E3)."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from runner.acp.lines import END_BYTES, HEAD_BYTES, Oversized, Splitter


def model(data: bytes, cap: int) -> list[bytes | Oversized]:
    return [
        line if len(line) <= cap else Oversized(line[:HEAD_BYTES], line[-END_BYTES:], len(line))
        for line in data.split(b"\n")[:-1]
    ]


CAPS = [0, 1, 5, END_BYTES, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 1, 2999]
streams = st.lists(
    (
        st.sampled_from([size + near for size in CAPS for near in (-1, 0, 1) if size + near >= 0])
        | st.integers(0, 3000)
    ).flatmap(lambda size: st.sampled_from([bytes(97 + n % 26 for n in range(size)), b"z" * size])),
    max_size=6,
).map(b"\n".join)
caps = st.sampled_from(CAPS)


@settings(max_examples=300)
@given(streams, caps, st.lists(st.integers(0, 20_000), max_size=20))
def test_any_cut_gives_the_lines_of_the_model(data: bytes, cap: int, cuts: list[int]) -> None:
    splitter = Splitter(cap)
    got: list[bytes | Oversized] = []
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(data)}), len(data)]
    for start, end in itertools.pairwise(edges):
        got.extend(splitter.feed(data[start:end]))
    assert got == model(data, cap)
    tail = data.rsplit(b"\n", 1)[-1]
    assert splitter.partial == bool(tail)
    unfinished = splitter.skipping
    assert (unfinished.size if unfinished is not None else 0) == (len(tail) if len(tail) > cap else 0)
    assert got + splitter.feed(b"\n") == model(data + b"\n", cap)
