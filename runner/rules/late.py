"""Whether a record or a question still counts when it arrives (DESIGN 3.9)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Late(StrEnum):
    """Why a record came too late."""

    TURN_ENDED = "turn_ended"
    TURN_UNKNOWN = "turn_unknown"
    STALE_EPOCH = "stale_epoch"
    SESSION_DELETED = "session_deleted"
    """Nobody may see it ever again: such a record is dropped and counted, all others are set aside."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A turn as the store has it: its fencing number, and whether its ending is written and says ``paused``."""

    epoch: int
    ended: bool
    paused: bool = False


def late(
    turn_id: str | None, epoch: int, turn: Standing | None, newest_turn: int, head: int, *, ended: bool = False
) -> Late | None:
    """Why a record that is not stored yet does not count, or None: it counts.

    A turn's record has its turn's epoch, its turn goes on, and no newer turn began. A record outside of a turn has the
    session's newest epoch. A session that has ended and has no turn any more was deleted.

    Args:
        turn_id: the turn that the record says it belongs to, None outside of one.
        epoch: the record's.
        turn: that turn as it is stored in the record's session, None when it is not.
        newest_turn: the highest epoch of the session's turns, 0 without one.
        head: the epoch of the session row's head, 0 without a row.
        ended: the session row says that it has ended.
    """
    if ended and newest_turn == 0:
        return Late.SESSION_DELETED
    if turn_id is None:
        return Late.STALE_EPOCH if epoch < max(newest_turn, head) else None
    if turn is None:
        return Late.TURN_UNKNOWN
    if turn.ended:
        return Late.TURN_ENDED
    return Late.STALE_EPOCH if epoch != turn.epoch or epoch < newest_turn else None


def asked_late(turn: Standing | None, newest_turn: int) -> bool:
    """Whether an open question that is not stored yet comes too late: nobody would ever close it (DESIGN 3.8).

    It is asked by the session's newest turn, while that goes on or is paused. A turn is stored before it asks, so one
    that is not known was refused, or deleted with its session.
    """
    return turn is None or (turn.ended and not turn.paused) or turn.epoch < newest_turn
