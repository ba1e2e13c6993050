"""What becomes of an entry of the record stream, and what the stream may forget (DESIGN 3.9)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

EntryId = tuple[int, int]
"""``(milliseconds, number)`` of an entry; ids of one stream only grow."""

START: Final[EntryId] = (0, 0)
LAST_NUMBER: Final = 2**64 - 1


class Quota(StrEnum):
    """Whether a project may store more; ``unknown``: nobody could say."""

    ALLOWED = "allowed"
    OVER = "over"
    UNKNOWN = "unknown"


class Move(StrEnum):
    """What a worker does with an entry: every move but ``write`` and ``defer`` ends in its acknowledgement."""

    WRITE = "write"
    DEFER = "defer"
    QUARANTINE = "quarantine"
    DROP = "drop"
    COUNT_LOST = "count_lost"


@dataclass(frozen=True, slots=True)
class Delivery:
    """What is known of an entry.

    Attributes:
        body: whether its body is still in the stream.
        deliveries: how often it was delivered, this time included.
        quota: of its project.
        refused: the store does not take its row, or nobody can read it.
        others_commit: whether rows of other entries were committed since it was refused first.
    """

    body: bool = True
    deliveries: int = 1
    quota: Quota = Quota.ALLOWED
    refused: bool = False
    others_commit: bool = False


def move(delivery: Delivery, max_deliveries: int) -> Move:
    """The next move.

    A row that is refused while nothing else can be written either says nothing about that row: it waits.
    """
    if not delivery.body:
        return Move.COUNT_LOST
    if delivery.quota is Quota.OVER:
        return Move.DROP
    if delivery.quota is Quota.UNKNOWN:
        return Move.DEFER
    if not delivery.refused:
        return Move.WRITE
    given_up = delivery.deliveries >= max_deliveries and delivery.others_commit
    return Move.QUARANTINE if given_up else Move.DEFER


def entry_id(text: str) -> EntryId:
    """``<milliseconds>-<number>`` as a value that can be compared; ``ValueError`` for anything else."""
    milliseconds, _, number = text.partition("-")
    return int(milliseconds), int(number)


def before(entry: EntryId) -> EntryId:
    """The largest id smaller than this one; ``START`` has none and stays."""
    milliseconds, number = entry
    if number:
        return milliseconds, number - 1
    return (milliseconds - 1, LAST_NUMBER) if milliseconds else START


def floor(last_delivered: EntryId, pending: Iterable[EntryId]) -> EntryId:
    """The acknowledged floor of a group: every entry up to it was delivered and is no longer pending."""
    oldest = min(pending, default=None)
    return last_delivered if oldest is None else before(oldest)


def may_trim(entry: EntryId, acknowledged: EntryId) -> bool:
    """Whether an entry may leave the stream; it is also what its sender need not remember any more."""
    return entry <= acknowledged


def has_room(length: int, more: int, max_entries: int) -> bool:
    """Whether a stream, trimmed to its floor, takes more entries; an empty one takes any number (back-pressure)."""
    return length == 0 or length + more <= max_entries


def may_forget_consumer(pending: int, idle_seconds: float, after_seconds: float) -> bool:
    """Whether a consumer may be deleted: it is silent, and holds nothing that would go with it (case G9)."""
    return pending == 0 and idle_seconds >= after_seconds
