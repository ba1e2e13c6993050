"""The stream's worker: reads records, writes them in batches, and acknowledges what is committed (DESIGN 3.9)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

from runner.clock import Clock
from runner.errors import RunnerError
from runner.rules.delivery import START, Delivery, EntryId, Fault, Move, Quota, move
from runner.store.port import Appended, RecordRow
from runner.store.rows import UNDELIVERABLE, meant
from runner.store.stream.codec import Unreadable, decode
from runner.store.stream.port import Entry, GroupGone, QuotaPort, RecordSink, RecordStream, Unlimited, text_of
from runner.store.stream.undeliverable import stand_in

log = logging.getLogger("runner.store.worker")

BATCH_RECORDS: Final = 500
WAIT_SECONDS: Final = 1.0
GATHER_SECONDS: Final = 0.02
RETRY_SECONDS: Final = 2.0
PAUSE_SECONDS: Final = (0.1, 5.0)
TEND_SECONDS: Final = 30.0
FORGET_SECONDS: Final = 3600.0


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


class _Item(NamedTuple):
    """A readable entry that is being worked on."""

    entry: Entry
    row: RecordRow


class Worker:
    """Moves records from a stream to a sink until it is told to stop.

    An entry is acknowledged only after its row is committed, or when it is dropped on purpose; whatever happens before
    that, it is delivered again, and a row that is known already changes nothing.

    Args:
        stream: what is read.
        sink: what is written.
        clock: for pauses between rounds and instants of what is set aside.
        name: of the consumer: the same over restarts, and nobody else's.
        quota: asked for each project of a batch.
        batch: most entries of one transaction.
        max_deliveries: after so many a refused row is given up, if others can be written.
        reclaim_idle_seconds: take over what others hold that long without acknowledging it; None: never.
        forget_seconds: a reclaiming worker deletes consumers that are silent so long and hold nothing.
    """

    def __init__(
        self,
        stream: RecordStream,
        sink: RecordSink,
        clock: Clock,
        name: str,
        *,
        quota: QuotaPort | None = None,
        batch: int = BATCH_RECORDS,
        max_deliveries: int = 5,
        reclaim_idle_seconds: float | None = None,
        forget_seconds: float = FORGET_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self.counts = Counts()
        self._stream = stream
        self._sink = sink
        self._clock = clock
        self._name = name
        self._quota = quota or Unlimited()
        self._batch = batch
        self._max_deliveries = max_deliveries
        self._reclaim_idle = reclaim_idle_seconds
        self._forget_seconds = forget_seconds
        self._retry_seconds = retry_seconds
        self._stop = asyncio.Event()
        self._again_at: float | None = 0.0
        self._reclaim_at = 0.0
        self._tend_at = 0.0
        self._pause = PAUSE_SECONDS[0]
        self._away = False
        self._refused_since: dict[EntryId, int] = {}
        self._told = asdict(self.counts)

    def stop(self) -> None:
        """Finish the batch in hand and end."""
        self._stop.set()

    async def run(self) -> None:
        """Work until ``stop``; what it holds and could not write then stays its own for the next start."""
        while not self._stop.is_set():
            try:
                await self._round()
            except GroupGone:
                self.counts.groups_made += 1
                log.error("the record stream or its group was gone; the group begins at 0 again")
                self._again_soon()
                await self._rest()
            except RunnerError as error:
                self._failed(error)
                await self._rest()
            except Exception:
                log.exception("a round of the worker failed")
                self._again_soon()
                await self._rest()

    async def _round(self) -> None:
        now = self._clock.monotonic()
        if self._again_at is not None and now >= self._again_at:
            await self._own_pending()
        if self._reclaim_idle is not None and now >= self._reclaim_at:
            await self._reclaim(self._reclaim_idle)
        if now >= self._tend_at:
            await self._tend()
        entries = await self._stream.read(self._name, self._batch, self._patience())
        if entries and len(entries) < self._batch:
            entries += await self._stream.read(self._name, self._batch - len(entries), GATHER_SECONDS)
        self.counts.read += len(entries)
        if entries:
            await self._settle(entries)
        else:
            self._reached()

    def _patience(self) -> float:
        """How long a read may wait: until something else is due."""
        due = [self._again_at] if self._again_at is not None else []
        if self._reclaim_idle is not None:
            due.append(self._reclaim_at)
        return min([WAIT_SECONDS, *(max(0.001, at - self._clock.monotonic()) for at in due)])

    async def _own_pending(self) -> None:
        """What this name holds: of an earlier run, of a round that failed, or deferred."""
        after, self._again_at = START, None
        while not self._stop.is_set():
            entries = await self._stream.again(self._name, after, self._batch)
            if not entries:
                return
            after = entries[-1].entry_id
            await self._settle(entries)

    async def _reclaim(self, idle_seconds: float) -> None:
        """What others hold for too long (opt-in)."""
        self._reclaim_at = self._clock.monotonic() + idle_seconds / 2
        while not self._stop.is_set():
            found = await self._stream.reclaim(self._name, idle_seconds, self._batch)
            self._lose(found.gone)
            self.counts.reclaimed += len(found.entries)
            if found.entries:
                await self._settle(found.entries)
            if len(found.entries) < self._batch:
                break
        for name in await self._stream.forget_consumers(self._name, self._forget_seconds):
            log.warning("worker %s held nothing and was silent: it is forgotten", name)

    async def _tend(self) -> None:
        self._tend_at = self._clock.monotonic() + TEND_SECONDS
        told, self._told = self._told, asdict(self.counts)
        if told != self._told:
            seen = await self._stream.look()
            log.info("worker %s: %s; %d wait, %d of them delivered", self._name, self.counts, seen.length, seen.pending)

    # -- one batch ---------------------------------------------------------------------------------------------------

    async def _settle(self, entries: Sequence[Entry]) -> None:
        """Bring a batch to its end, as far as that is possible now."""
        done: list[EntryId] = []
        committed = self.counts.written
        items = await self._items(entries, done)
        refused = await self._write(meant([item.row for item in items])) if items else set()
        for entry, row in items:
            if (row.project, row.record_id) in refused:
                await self._refused(entry, row, committed, done)
            else:
                done.append(entry.entry_id)
        if not done:
            await self._rest()
            return
        await self._stream.acknowledge(done)
        for one in done:
            self._refused_since.pop(one, None)
        self._reached()

    async def _items(self, entries: Sequence[Entry], done: list[EntryId]) -> list[_Item]:
        """Those to write; what is dropped right away is added to ``done``, what waits is left where it is."""
        items: list[_Item] = []
        gone = [entry.entry_id for entry in entries if entry.payload is None]
        self._lose(gone)
        done.extend(gone)
        for entry in entries:
            if entry.payload is None:
                continue
            try:
                items.append(_Item(entry, decode(entry.payload, entry.version)))
            except Unreadable as error:
                log.error("entry %s cannot be read: %s", text_of(entry.entry_id), error)
                await self._refused(entry, stand_in(entry, self._clock.now_ms()), self.counts.written, done)
        allowed: list[_Item] = []
        quotas = await self._quotas(items)
        for item in items:
            chosen = move(Delivery(quota=quotas[item.row.project]), self._max_deliveries)
            if chosen is Move.WRITE:
                allowed.append(item)
            elif chosen is Move.DROP:
                self.counts.over_quota += 1
                done.append(item.entry.entry_id)
            else:
                self._later()
        return allowed

    async def _quotas(self, items: Sequence[_Item]) -> dict[str, Quota]:
        sizes: dict[str, tuple[int, int]] = {}
        for item in items:
            count, size = sizes.get(item.row.project, (0, 0))
            sizes[item.row.project] = count + 1, size + len(item.row.data)
        found: dict[str, Quota] = {}
        for project, (count, size) in sizes.items():
            try:
                found[project] = await self._quota.verdict(project, count, size)
            except Exception as error:
                log.warning("nobody can say whether project %s may store more: %s", project, error)
                found[project] = Quota.UNKNOWN
            if found[project] is Quota.OVER:
                log.error("project %s is over its quota: %d records are dropped", project, count)
        return found

    async def _write(self, rows: list[RecordRow]) -> set[tuple[str, str]]:
        """Write a batch, or row by row what the store refuses as a batch; which rows it refuses alone too.

        Raises:
            RunnerError: ``store_unavailable``: the store stays away, and this worker was told to stop.
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

    async def _insert(self, rows: list[RecordRow]) -> Appended:
        """Write rows; while the store is away try again, until told to stop."""
        while True:
            try:
                done = await self._sink.write_batch(rows)
            except RunnerError as error:
                if error.code != "store_unavailable" or self._stop.is_set():
                    raise
                self._failed(error)
                await self._rest()
            else:
                self._reached()
                return done

    def _wrote(self, rows: Sequence[RecordRow], done: Appended) -> None:
        self.counts.written += len(rows) - done.quarantined - done.dropped
        self.counts.set_aside += done.quarantined
        self.counts.of_deleted += done.dropped
        if done.quarantined:
            log.error("%d records came too late and are in quarantine", done.quarantined)
        if done.dropped:
            log.warning("%d records of deleted sessions are dropped", done.dropped)

    async def _refused(self, entry: Entry, row: RecordRow, committed: int, done: list[EntryId]) -> None:
        """Give a refused entry up, or leave it for later."""
        since = self._refused_since.setdefault(entry.entry_id, committed)
        known = Delivery(deliveries=entry.deliveries, fault=Fault.REFUSED, others_commit=self.counts.written > since)
        if move(known, self._max_deliveries) is Move.DEFER:
            self._later()
            return
        try:
            await self._set_aside(entry, row)
        except RunnerError as error:
            log.error("entry %s cannot be set aside yet: %s", text_of(entry.entry_id), error.message)
            self._later()
            return
        log.error(
            "record %s of session %s, turn %s is given up after %d deliveries; it is in quarantine",
            row.record_id,
            row.session_id,
            row.turn_id,
            entry.deliveries,
        )
        self.counts.undeliverable += 1
        done.append(entry.entry_id)

    async def _set_aside(self, entry: Entry, row: RecordRow) -> None:
        try:
            await self._sink.quarantine([row], UNDELIVERABLE, self._clock.now_ms())
        except RunnerError as error:
            if error.code == "store_unavailable":
                raise
            await self._sink.quarantine([stand_in(entry, row.at)], UNDELIVERABLE, self._clock.now_ms())

    def _lose(self, gone: Sequence[EntryId]) -> None:
        if gone:
            self.counts.lost += len(gone)
            log.error("%d entries lost their bodies before they were stored: %s", len(gone), text_of(gone[0]))

    # -- pauses ------------------------------------------------------------------------------------------------------

    def _later(self) -> None:
        """Look at what this name holds again in a while."""
        if self._again_at is None:
            self._again_at = self._clock.monotonic() + self._retry_seconds

    def _again_soon(self) -> None:
        self._again_at = 0.0

    def _failed(self, error: RunnerError) -> None:
        self._again_soon()
        if not self._away:
            self._away = True
            self.counts.outages += 1
            log.error("records wait: %s", error.message)

    def _reached(self) -> None:
        self._pause = PAUSE_SECONDS[0]
        if self._away:
            self._away = False
            log.warning("records go on")

    async def _rest(self) -> None:
        """Back off, but no longer than until told to stop."""
        pause, self._pause = self._pause, min(2 * self._pause, PAUSE_SECONDS[1])
        try:
            async with asyncio.timeout(pause):
                await self._stop.wait()
        except TimeoutError:
            return
