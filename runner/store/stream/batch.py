"""One batch of entries on its way into the store: what is written, what is dropped, what waits (DESIGN 3.9)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from runner.clock import Clock
from runner.errors import RunnerError
from runner.rules.delivery import Delivery, EntryId, Move, Quota, move
from runner.store.port import Appended, RecordRow
from runner.store.rows import UNDELIVERABLE, meant
from runner.store.stream.codec import Unreadable, decode
from runner.store.stream.port import Entry, QuotaPort, RecordSink, text_of
from runner.store.stream.undeliverable import stand_in

log = logging.getLogger("runner.store.worker")

Insert = Callable[[list[RecordRow]], Awaitable[Appended]]


@dataclass(slots=True)
class Counts:
    """What a worker did since it started; each is a number of entries, but ``groups_made`` and ``outages``."""

    read: int = 0
    written: int = 0
    set_aside: int = 0
    of_deleted: int = 0
    over_quota: int = 0
    undeliverable: int = 0
    lost: int = 0
    reclaimed: int = 0
    groups_made: int = 0
    outages: int = 0


class Item(NamedTuple):
    """An entry and its record; None where there is no body, or nobody can read it."""

    entry: Entry
    row: RecordRow | None


class Settled(NamedTuple):
    """What a batch came to: entries to acknowledge, and whether others wait for another delivery."""

    done: list[EntryId]
    waits: bool


def opened(entries: Sequence[Entry]) -> list[Item]:
    """A batch as it was read, with its records."""
    return [Item(entry, _row(entry)) for entry in entries]


def _row(entry: Entry) -> RecordRow | None:
    try:
        return decode(entry.payload, entry.version) if entry.payload is not None else None
    except Unreadable as error:
        log.error("entry %s cannot be read: %s", text_of(entry.entry_id), error)
        return None


class Batches:
    """Brings batches to their end; which of their entries were refused before, and when, is remembered.

    Args:
        sink: takes what is set aside.
        clock: tells when that was.
        quota: asked for each project of a batch.
        max_deliveries: after so many a refused row is given up, if others can be written.
        counts: counted up here.
        insert: writes rows to the sink in one transaction, and waits while that is away.
    """

    def __init__(
        self, sink: RecordSink, clock: Clock, quota: QuotaPort, max_deliveries: int, counts: Counts, insert: Insert
    ) -> None:
        self._sink = sink
        self._clock = clock
        self._quota = quota
        self._max_deliveries = max_deliveries
        self._counts = counts
        self._insert = insert
        self._refused_since: dict[EntryId, int] = {}

    async def settle(self, items: Sequence[Item]) -> Settled:
        """Bring a batch to its end, as far as that is possible now.

        Raises:
            RunnerError: ``store_unavailable``: the store stays away; nothing of the batch may be acknowledged.
        """
        committed = self._counts.written
        allowed = await self._allowed([item.row for item in items if item.row is not None])
        rows = [item.row for item in items if item.row is not None and allowed[item.row.project] is Move.WRITE]
        refused = await self._write(meant(rows)) if rows else set()
        done: list[EntryId] = []
        for entry, row in items:
            if entry.payload is None:
                chosen = move(Delivery(body=False), self._max_deliveries)
            elif row is None:
                chosen = await self._refused(entry, stand_in(entry, self._clock.now_ms()), committed)
            elif (row.project, row.record_id) in refused:
                chosen = await self._refused(entry, row, committed)
            else:
                chosen = allowed[row.project]
            if chosen is not Move.DEFER:
                done.append(entry.entry_id)
        self.lose([item.entry.entry_id for item in items if item.entry.payload is None])
        if self._refused_since:
            for one in done:
                self._refused_since.pop(one, None)
        return Settled(done, len(done) < len(items))

    def lose(self, gone: Sequence[EntryId]) -> None:
        """Count entries whose bodies are gone (case G7)."""
        if gone:
            self._counts.lost += len(gone)
            log.error("%d entries lost their bodies before they were stored: %s", len(gone), text_of(gone[0]))

    async def _allowed(self, rows: Sequence[RecordRow]) -> dict[str, Move]:
        """The move of each project: write, drop or defer."""
        sizes: dict[str, list[int]] = {}
        for row in rows:
            size = sizes.setdefault(row.project, [0, 0])
            size[0] += 1
            size[1] += len(row.data)
        moves: dict[str, Move] = {}
        for project, (count, size_of_all) in sizes.items():
            try:
                quota = await self._quota.verdict(project, count, size_of_all)
            except Exception as error:
                log.warning("nobody can say whether project %s may store more: %s", project, error)
                quota = Quota.UNKNOWN
            moves[project] = move(Delivery(quota=quota), self._max_deliveries)
            if moves[project] is Move.DROP:
                self._counts.over_quota += count
                log.error("project %s is over its quota: %d records are dropped", project, count)
        return moves

    async def _write(self, rows: list[RecordRow]) -> set[tuple[str, str]]:
        """Write a batch, or row by row what the store refuses as a batch; which rows it refuses alone too.

        Raises:
            RunnerError: ``store_unavailable``.
        """
        try:
            self._wrote(rows, await self._insert(rows))
            return set()
        except RunnerError as error:
            if error.code == "store_unavailable":
                raise
            if len(rows) == 1:
                log.error("record %s is refused: %s", rows[0].record_id, error.message)
                return {(rows[0].project, rows[0].record_id)}
            log.warning("a batch of %d is refused, its rows are written one by one: %s", len(rows), error.message)
        refused: set[tuple[str, str]] = set()
        for row in rows:
            refused |= await self._write([row])
        return refused

    def _wrote(self, rows: Sequence[RecordRow], done: Appended) -> None:
        self._counts.written += len(rows) - done.quarantined - done.dropped
        self._counts.set_aside += done.quarantined
        self._counts.of_deleted += done.dropped
        if done.quarantined:
            log.error("%d records came too late and are in quarantine", done.quarantined)
        if done.dropped:
            log.warning("%d records of deleted sessions are dropped", done.dropped)

    async def _refused(self, entry: Entry, row: RecordRow, committed: int) -> Move:
        """Give a refused entry up, or leave it for another delivery."""
        since = self._refused_since.setdefault(entry.entry_id, committed)
        others = self._counts.written > since
        delivery = Delivery(deliveries=entry.deliveries, refused=True, others_commit=others)
        chosen = move(delivery, self._max_deliveries)
        if chosen is Move.DEFER:
            return chosen
        try:
            await self._set_aside(entry, row)
        except RunnerError as error:
            log.error("entry %s cannot be set aside yet: %s", text_of(entry.entry_id), error.message)
            return Move.DEFER
        self._counts.undeliverable += 1
        log.error(
            "record %s of project %s, session %s, turn %s is given up after %d deliveries; it is in quarantine",
            row.record_id,
            row.project,
            row.session_id,
            row.turn_id,
            entry.deliveries,
        )
        return chosen

    async def _set_aside(self, entry: Entry, row: RecordRow) -> None:
        try:
            await self._sink.quarantine([row], UNDELIVERABLE, self._clock.now_ms())
        except RunnerError as error:
            if error.code == "store_unavailable":
                raise
            await self._sink.quarantine([stand_in(entry, row.at)], UNDELIVERABLE, self._clock.now_ms())
