"""Deletes what is older than ``[records] retention_days``, a small transaction at a time (DESIGN 3.9)."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from runner.clock import Clock, rfc3339
from runner.errors import RunnerError
from runner.rules.retention import cutoff
from runner.store.port import RecordKey, Store
from runner.store.rows import by_project

log = logging.getLogger("runner.store")

BATCH_ROWS: Final = 500
PAUSE_SECONDS: Final = 0.05
"""Between two transactions: whoever writes meanwhile goes first."""
ROUND_SECONDS: Final = 20.0
EVERY_SECONDS: Final = 3600.0
AGAIN_SECONDS: Final = 60.0

Find = Callable[[str | None, int, int], Awaitable[list[RecordKey]]]
Delete = Callable[[Sequence[RecordKey]], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Deleted:
    """What one run deleted, or a dry one would have; ``cutoff_ms`` is None where everything is kept.

    ``complete``: nothing as old is left. Rows are counted by project.
    """

    dry_run: bool
    cutoff_ms: int | None
    records: dict[str, int]
    quarantined: dict[str, int]
    complete: bool = True

    def as_json(self) -> dict[str, Any]:
        """For people and scripts; the instant is RFC 3339."""
        return {
            "dry_run": self.dry_run,
            "cutoff": None if self.cutoff_ms is None else rfc3339(self.cutoff_ms),
            "records": self.records,
            "quarantined": self.quarantined,
            "complete": self.complete,
        }


async def run_once(
    store: Store, clock: Clock, retention_days: int, dry_run: bool = False, *, seconds: float | None = None
) -> Deleted:
    """Delete records, what was set aside and feed items from before the cutoff, oldest first, in batches of 500.

    Sessions and turns stay: their history begins later. Cancelling it stops behind a whole batch.

    Args:
        store: where; every project of it.
        clock: says what time it is.
        retention_days: 0 keeps everything.
        dry_run: only count.
        seconds: stop after that long, with the rest for the next run; None: go on to the end.

    Raises:
        RunnerError: ``store_unavailable``; what was deleted before stays deleted.
    """
    before = cutoff(clock.now_ms(), retention_days)
    if before is None:
        return Deleted(dry_run, None, {}, {})
    if dry_run:
        found = await store.count_expired(None, before)
        return Deleted(True, before, found.records, found.quarantined)
    until = None if seconds is None else clock.monotonic() + seconds
    records, first = await _delete(store.expired_records, store.delete_records, before, clock, until)
    aside, second = await _delete(store.expired_quarantine, store.delete_quarantined, before, clock, until)
    third = await _trim(store, before, clock, until)
    return Deleted(False, before, records, aside, first and second and third)


async def _trim(store: Store, before_ms: int, clock: Clock, until: float | None) -> bool:
    """Items of project feeds go by their own age; whether that was all."""
    while until is None or clock.monotonic() < until:
        if await store.trim_feed(None, before_ms, BATCH_ROWS) < BATCH_ROWS:
            return True
        await asyncio.sleep(PAUSE_SECONDS)
    return False


async def _delete(
    find: Find, delete: Delete, before_ms: int, clock: Clock, until: float | None
) -> tuple[dict[str, int], bool]:
    """What was deleted by project, and whether that was all."""
    counts: Counter[str] = Counter()
    while until is None or clock.monotonic() < until:
        keys = await find(None, before_ms, BATCH_ROWS)
        went = Counter({project: await delete(own) for project, own in by_project(keys).items()})
        counts += went
        # Nothing of a batch went: another process is at it.
        if len(keys) < BATCH_ROWS or not went.total():
            return dict(counts), True
        await asyncio.sleep(PAUSE_SECONDS)
    return dict(counts), False


class Retention:
    """A job of the sweep: each hour everything that is too old goes, in rounds that leave the other jobs their turn.

    Args:
        store, clock, retention_days: see ``run_once``.
    """

    def __init__(self, store: Store, clock: Clock, retention_days: int) -> None:
        self._store = store
        self._clock = clock
        self._days = retention_days
        self._due = 0.0
        self.deleted: Counter[str] = Counter()
        """Rows that went since the start, ``records`` and ``quarantined``."""

    async def __call__(self) -> None:
        """One round, if it is due; a run that a round did not finish goes on with the next one.

        Raises:
            RunnerError: ``store_unavailable``.
        """
        if self._days <= 0 or self._clock.monotonic() < self._due:
            return
        done = await run_once(self._store, self._clock, self._days, seconds=ROUND_SECONDS)
        self.deleted.update(records=sum(done.records.values()), quarantined=sum(done.quarantined.values()))
        if done.records or done.quarantined:
            log.info("retention deleted records %s, quarantined %s", done.records, done.quarantined)
        if done.complete:
            self._due = self._clock.monotonic() + EVERY_SECONDS

    async def run(self) -> None:
        """Rounds for ever, where no sweep calls for them; one that fails is tried again. Cancelling it ends it."""
        while True:
            try:
                await self()
            except RunnerError as error:
                log.warning("retention waits: %s", error.message)
            await asyncio.sleep(AGAIN_SECONDS)
