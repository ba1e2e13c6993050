"""One entry of the live bus: chunks of a session's log and what else a follower's replica has to know."""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

from runner.ids import Cursor
from runner.rules.pool import Key
from runner.turn.log import Chunk


class Entry(NamedTuple):
    """What an owner tells a replica about one session.

    Attributes:
        key: the session.
        owner: the replica that tells it.
        series, first: which series of chunks, and the place of the first one in it.
        head: the session's newest cursor; nothing above it exists.
        chunks: consecutive ones.
        since: the series begins here: it has everything behind this cursor.
        marks: answers to ``Mirror.settle``: whether the store has every record that was shown before the mark was set.
        over: the session has ended; nothing follows.
    """

    key: Key
    owner: str
    series: str
    first: int
    head: Cursor
    chunks: list[Chunk]
    since: Cursor | None = None
    marks: dict[str, bool] | None = None
    over: bool = False


def encode(entry: Entry) -> bytes:
    """One line of JSON that says what is behind it, and the lines of the chunks."""
    sizes = [
        (chunk.epoch, chunk.first, chunk.last, chunk.prompt_id, len(chunk.lines), len(chunk.whole))
        for chunk in entry.chunks
    ]
    head = orjson.dumps([*entry[:5], sizes, *entry[6:]])
    return b"".join([head, b"\n", *(part for chunk in entry.chunks for part in (chunk.lines, chunk.whole))])


def decode(data: bytes) -> Entry:
    """The entry that ``encode`` made.

    Raises:
        ValueError: it is none.
    """
    end = data.index(b"\n")
    try:
        key, owner, series, first, head, sizes, since, marks, over = orjson.loads(data[:end])
        chunks = list(_chunks(data, end + 1, sizes))
        return Entry(
            (key[0], key[1]), owner, series, first, _cursor(head), chunks, since and _cursor(since), marks, over
        )
    except (TypeError, IndexError) as error:
        raise ValueError("not an entry of the live bus") from error


def _chunks(data: bytes, at: int, sizes: Any) -> Any:
    for epoch, first, last, prompt_id, lines, whole in sizes:
        yield Chunk(epoch, first, last, prompt_id, data[at : at + lines], data[at + lines : at + lines + whole])
        at += lines + whole
    if at != len(data):
        raise ValueError("not as long as it says")


def _cursor(pair: list[int]) -> Cursor:
    return pair[0], pair[1]
