"""What a follower's replica has of a session's live log, and what it is sent next (DESIGN 3.9).

The session's owner numbers the chunks of its log; a series of them begins with a cursor behind which it holds
everything. The replica that follows knows the series and the chunk that it needs next: its place.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Send = Literal["go on", "rewind", "begin"]


class Place(NamedTuple):
    """The chunk that is needed next, by series; ``lost``: what was sent since did not arrive."""

    series: str
    at: int
    lost: bool = False


def sent_next(wanted: Place, series: str, oldest: int) -> Send:
    """What the owner does about a place that a follower's replica tells.

    Args:
        wanted: where that replica is.
        series: what is being sent to it.
        oldest: the first chunk that is still kept.
    """
    if wanted.series != series:
        return "begin"
    if not wanted.lost:
        return "go on"
    return "rewind" if wanted.at >= oldest else "begin"


def known_of(needed: int, first: int, count: int) -> int | None:
    """How many of ``count`` chunks from ``first`` on are known already; None: there is a gap before them."""
    if first > needed:
        return None
    return min(needed - first, count)
