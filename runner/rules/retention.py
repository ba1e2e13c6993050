"""What may be deleted because it is old (DESIGN 3.9)."""

from __future__ import annotations

from typing import Final

from runner.ids import Cursor
from runner.terms import PromptState

DAY_MS: Final = 24 * 60 * 60 * 1000
GOING_ON: Final = frozenset({PromptState.QUEUED.value, PromptState.ACTIVE.value})
"""States of a prompt that is not over: what was told of it is needed until it is."""


def cutoff(now_ms: int, retention_days: int) -> int | None:
    """The instant before which things are too old, in milliseconds since 1970; None: everything is kept."""
    return now_ms - retention_days * DAY_MS if retention_days > 0 else None


def expired(
    before_ms: int,
    at: int,
    *,
    turn_goes_on: bool,
    turn_ended_at: int | None,
    prompt: str | None,
    outside_of_busy_session: bool,
) -> bool:
    """Whether a record may go.

    A turn goes as a whole, once it is over for long enough: no history begins in the middle of a turn. A prompt that
    waits or is paused keeps all of its turns, however long a human takes, and what tells that the session is busy.

    Args:
        before_ms: what ``cutoff`` said.
        at: the record's instant.
        turn_goes_on: its turn has no ending.
        turn_ended_at: when its turn ended; None when that goes on, or there is none.
        prompt: the state of its prompt, None when it has none.
        outside_of_busy_session: it has neither turn nor prompt, and a turn or a prompt of its session goes on.
    """
    if at >= before_ms or turn_goes_on or outside_of_busy_session or prompt in GOING_ON:
        return False
    return turn_ended_at is None or turn_ended_at < before_ms


def misses(after: Cursor | None, pruned_to: Cursor | None) -> bool:
    """Whether a reader behind a cursor (None: at the very beginning) misses something that retention deleted."""
    return pruned_to is not None and (after or (0, 0)) < pruned_to
