"""The project feed: which events it tells, and where a reader of it begins (DESIGN 4)."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from runner.terms import EventType

Position = tuple[int, int]
"""A place in a project's feed. It grows in the order in which transactions became visible; nothing else is meant."""

SESSION_ENDED: Final = "session_ended"
FED: Final = frozenset(
    {
        EventType.SESSION_BUSY.value,
        EventType.SESSION_IDLE.value,
        EventType.INTERACTION_REQUESTED.value,
        EventType.INTERACTION_CLOSED.value,
    }
)
"""Types of records that the feed tells; a session's end, which is no record, is ``session_ended``."""

POSITION_TEXT: Final = r"^(0|[1-9][0-9]{0,18})-(0|[1-9][0-9]{0,18})$"
_PATTERN: Final = re.compile(POSITION_TEXT.removesuffix("$") + r"\Z")
_LARGEST: Final = 2**63 - 1


class Span(NamedTuple):
    """What a store has of a project's feed: everything behind ``floor`` and up to ``end``; older items are removed."""

    floor: Position
    end: Position


class Start(NamedTuple):
    """Where a reader begins: behind ``after``; ``resync``: what it had seen before no longer leads there."""

    after: Position
    resync: bool = False


def start(after: Position | None, follow: bool, span: Span) -> Start:
    """Where to begin.

    Without a cursor a follower wants what comes, anybody else wants all that is kept. A cursor older than what is kept,
    or one that this store never gave out, gets everything again, and is told so.
    """
    if after is None:
        return Start(span.end if follow else span.floor)
    if after < span.floor or after > span.end:
        return Start(span.floor, True)
    return Start(after)


def format_position(position: Position) -> str:
    """The feed's cursor, opaque for clients."""
    return f"{position[0]}-{position[1]}"


def parse_position(text: str) -> Position | None:
    """The position that a cursor stands for, None when it is not one."""
    if _PATTERN.match(text) is None:
        return None
    first, _, second = text.partition("-")
    position = int(first), int(second)
    return position if max(position) <= _LARGEST else None
