"""Reads back what an agent without memory must be told: the newest records that fit (DESIGN 3.5)."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Final

import orjson

from runner.errors import RunnerError
from runner.ids import Cursor
from runner.rules.fork import lacks_begin
from runner.rules.history import Missing, Wholeness
from runner.rules.transcript import LIMIT_BYTES, READ, preface, turns
from runner.session.history import pages
from runner.session.session import Session
from runner.store.port import RecordRow, Store
from runner.terms import EventType

log = logging.getLogger("runner.session")
EPOCHS: Final = 8
KEPT_BYTES: Final = 8 * 1024 * 1024
"""Of what is read at once so much is kept: far more than is told."""
MARKS: Final = (EventType.TURN_ADMITTED, EventType.DONE)


async def rebuilt(store: Store, session: Session, but: str) -> str | None:
    """The text block that tells a new agent of the session, turn ``but`` left out; None when there is nothing to tell.

    A store that cannot be used costs the memory, not the turn: the text then says that something is missing. So it
    does where records are known to be missing, or left out because of their age.
    """
    told = _Told(store, session, but)
    upper, width, missing = session.head.epoch + 1, EPOCHS, not await _caught_up(session)
    try:
        # From the newest epochs backwards: a long session is not read to its begin.
        while upper > 1 and sum(map(len, told.texts)) < LIMIT_BYTES:
            lower = max(1, upper - width)
            await told.read(lower, upper)
            upper, width = lower, 2 * width
        lost = await store.unstorable(*session.key)
        lacks = told.lacks(upper, await store.pruned_to(*session.key), lost)
    except RunnerError as error:
        log.warning("session %s is told incompletely: %s", session.session_id, error)
        lacks, missing = [], True
    missing = missing or Missing.RECORDS in lacks or Missing.ENDING in lacks
    left_out = Missing.BEGIN in lacks or told.left_out
    if not (told.texts or missing or left_out):
        return None
    return preface(told.texts, left_out=left_out, missing=missing)


async def _caught_up(session: Session) -> bool:
    """Whether the store has all that is known of the session; what it has is told in any case."""
    try:
        await session.hand_over()
    except RunnerError as error:
        log.warning("records of session %s are still on their way: %s", session.session_id, error)
        return False
    return True


class _Told:
    """What was read so far, from the end backwards."""

    def __init__(self, store: Store, session: Session, but: str) -> None:
        self._store = store
        self._session = session
        self._but = but
        self.texts: list[str] = []
        self.left_out = False
        self._marks: list[tuple[int, int, str | None, str]] = []

    async def read(self, lower: int, upper: int) -> None:
        """The epochs from ``lower`` to below ``upper``."""
        found: deque[RecordRow] = deque()
        marks: list[tuple[int, int, str | None, str]] = []
        size = 0
        async for rows in pages(self._store, self._session.key, (lower, 0)):
            for row in rows:
                if row.epoch >= upper:
                    break
                if row.type in MARKS or not marks or marks[-1][0] != row.epoch:
                    marks.append((row.epoch, row.n, row.turn_id, row.type))
                if row.type in READ and row.turn_id not in (self._but, None):
                    found.append(row)
                    size += len(row.data)
            while size > KEPT_BYTES and len(found) > 1:
                size -= len(found.popleft().data)
                self.left_out = True
            if rows[-1].epoch >= upper:
                break
        self._marks = marks + self._marks
        self.texts = turns((row.turn_id, row.type, orjson.loads(row.data)) for row in found) + self.texts

    def lacks(self, lower: int, pruned_to: Cursor | None, lost: Sequence[Cursor]) -> list[Missing]:
        """What is missing of all epochs from ``lower`` on, and of what is before them."""
        cut = (lower - 1, 0) if lower > 1 or lacks_begin(self._session.agent_state) else None
        seen = Wholeness(pruned_to or cut)
        for mark in self._marks:
            seen.see(*mark)
        head = self._session.head
        seen.lost(lost, head.cursor)
        return seen.missing([self._but])
