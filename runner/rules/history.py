"""Whether a history that is read is whole (DESIGN 3.9): what is known to be missing is never passed over in silence."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from runner.ids import Cursor
from runner.terms import EventType

NOTHING: Final = (0, 0)


class Missing(StrEnum):
    """What a history lacks."""

    BEGIN = "begin"
    """Its oldest part: retention deleted it."""
    RECORDS = "records"
    """Records that could not be stored, or an epoch's first ones: each epoch's history begins with a record."""
    ENDING = "ending"
    """A turn's ending, or its begin."""


@dataclass(slots=True)
class Wholeness:
    """Sees a session's records in cursor order, from its first one, and says what is missing.

    Frames have cursors too, so a number without a record says nothing by itself.

    Attributes:
        pruned_to: the newest cursor that retention deleted; None: nothing.
        newest: the last record's cursor.
        going: turns that were admitted and have no ending so far, oldest first.
    """

    pruned_to: Cursor | None = None
    newest: Cursor = NOTHING
    going: dict[str, None] = field(default_factory=dict)
    _missing: set[Missing] = field(default_factory=set)

    def see(self, epoch: int, n: int, turn_id: str | None, kind: str) -> None:
        """Take the next record."""
        first, cut = self.newest == NOTHING, self.pruned_to is not None
        if epoch != self.newest[0] and n != 1 and not (first and cut):
            self._missing.add(Missing.BEGIN if first else Missing.RECORDS)
        self.newest = (epoch, n)
        if turn_id is None:
            return
        if kind == EventType.TURN_ADMITTED:
            self.going[turn_id] = None
        elif kind == EventType.DONE:
            if turn_id not in self.going and not cut:
                self._missing.add(Missing.ENDING)
            self.going.pop(turn_id, None)

    def lost(self, cursors: Iterable[Cursor], until: Cursor) -> None:
        """Records that no store could hold; of one without a cursor, (0, 0), nobody knows where it belongs."""
        floor = self.pruned_to or NOTHING
        if any(cursor == NOTHING or floor < cursor <= until for cursor in cursors):
            self._missing.add(Missing.RECORDS)

    def missing(self, running: Collection[str | None] = ()) -> list[Missing]:
        """What is missing, sorted; ``running``: turns that need no ending yet."""
        found = set(self._missing)
        if self.pruned_to is not None:
            found.add(Missing.BEGIN)
        if any(turn_id not in running for turn_id in self.going):
            found.add(Missing.ENDING)
        return sorted(found)


def overshot(after: Cursor, found: Cursor | None, pruned_to: Cursor | None) -> bool:
    """Whether a reader has seen more of an epoch that is over than counts: what came too late was shown before.

    Each epoch's last event is a record, so who saw only what counts saw nothing behind the last record.

    Args:
        after: the last cursor that it has seen, of an epoch before the newest.
        found: the first record at that cursor or behind it.
        pruned_to: the newest cursor that retention deleted; None: nothing.
    """
    kept = found is not None and found[0] == after[0]
    return not kept and (pruned_to is None or after > pruned_to)
