"""Reads back what an agent without memory must be told: the newest records that fit (DESIGN 3.5)."""

from __future__ import annotations

import logging
from typing import Final

import orjson

from runner.errors import RunnerError
from runner.rules.transcript import LIMIT_BYTES, READ, preface, turns
from runner.session.history import pages
from runner.session.session import Session
from runner.store.port import RecordRow, Store

log = logging.getLogger("runner.session")
EPOCHS: Final = 8


async def rebuilt(store: Store, session: Session, but: str) -> str | None:
    """The text block that tells a new agent of the session, turn ``but`` left out; None when there is nothing to tell.

    A store that cannot be used costs the memory, not the turn: the text then says that something is missing.
    """
    told: list[str] = []
    upper, width, missing = session.head.epoch + 1, EPOCHS, False
    try:
        await session.outbox.flush()
        # From the newest epochs backwards: a long session is not read to its begin.
        while upper > 1 and sum(map(len, told)) < LIMIT_BYTES:
            lower = max(1, upper - width)
            told = await _told(store, session, lower, upper, but) + told
            upper, width = lower, 2 * width
    except RunnerError as error:
        log.warning("session %s is told incompletely: %s", session.session_id, error)
        missing = True
    if not (told or missing):
        return None
    return preface(told, left_out=upper > 1 and not missing, missing=missing)


async def _told(store: Store, session: Session, lower: int, upper: int, but: str) -> list[str]:
    found: list[RecordRow] = []
    async for rows in pages(store, session.key, (lower, 0)):
        found += [row for row in rows if row.epoch < upper and row.type in READ and row.turn_id not in (but, None)]
        if rows[-1].epoch >= upper:
            break
    return turns((row.turn_id, row.type, orjson.loads(row.data)) for row in found)
