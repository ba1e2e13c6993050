"""The stream's worker: reads records, writes them in batches, and acknowledges what is committed (DESIGN 3.9)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Final

from runner.clock import Clock
from runner.errors import RunnerError
from runner.rules.delivery import START, EntryId
from runner.store.port import Appended, RecordRow
from runner.store.stream.batch import Batches, Counts, Item, opened
from runner.store.stream.port import GroupGone, QuotaPort, RecordSink, RecordStream, Unlimited

log = logging.getLogger("runner.store.worker")

BATCH_RECORDS: Final = 1000
WAIT_SECONDS: Final = 1.0
GATHER_SECONDS: Final = 0.02
RETRY_SECONDS: Final = 2.0
PAUSE_SECONDS: Final = (0.1, 5.0)
TEND_SECONDS: Final = 30.0
FORGET_SECONDS: Final = 3600.0


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
        self._batch = self._size = batch
        self._reclaim_idle = reclaim_idle_seconds
        self._forget_seconds = forget_seconds
        self._retry_seconds = retry_seconds
        self._stop = asyncio.Event()
        self._again_at: float | None = 0.0
        self._reclaim_at = 0.0
        self._tend_at = 0.0
        self._pause = PAUSE_SECONDS[0]
        self._away = False
        self._ahead: asyncio.Task[list[Item]] | None = None
        self._acknowledging: asyncio.Task[EntryId] | None = None
        self._batches = Batches(sink, clock, quota or Unlimited(), max_deliveries, self.counts, self._insert)
        self._told = asdict(self.counts)

    def stop(self) -> None:
        """Finish the batch in hand and end."""
        self._stop.set()

    async def run(self) -> None:
        """Work until ``stop``; what it holds and could not write then stays its own for the next start."""
        try:
            while not self._stop.is_set() or self._ahead is not None:
                await self._safe_round()
            with suppress(RunnerError):
                await self._acknowledged()
        finally:
            for task in (self._ahead, self._acknowledging):
                if task is not None:
                    task.cancel()

    async def _safe_round(self) -> None:
        try:
            await self._round()
        except GroupGone:
            self.counts.groups_made += 1
            log.error("the record stream or its group was gone; the group begins at 0 again")
            self._again_soon()
            await self._rest()
        except RunnerError as error:
            # It may have been more than an answer in time can carry.
            self._size = max(1, self._size // 2)
            self._failed(error)
            await self._rest()
        except Exception:
            log.exception("a round of the worker failed")
            self._again_soon()
            await self._rest()

    async def _round(self) -> None:
        if self._ahead is None:
            await self._due_now()
        items = await self._next()
        if len(items) >= self._size and self._patience() > 0 and not self._stop.is_set():
            self._ahead = asyncio.create_task(self._read(0))
        self.counts.read += len(items)
        if items:
            await self._settle(items)
        if self._ahead is None:
            await self._acknowledged()
            self._reached()

    async def _due_now(self) -> None:
        await self._acknowledged()
        now = self._clock.monotonic()
        if self._again_at is not None and now >= self._again_at:
            await self._own_pending()
        if self._reclaim_idle is not None and now >= self._reclaim_at:
            await self._reclaim(self._reclaim_idle)
        if now >= self._tend_at:
            await self._tend()

    async def _next(self) -> list[Item]:
        """The next batch; one that was full was read ahead while the one before it was written."""
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            return await ahead
        items = await self._read(max(0.001, self._patience()))
        if items and len(items) < self._size:
            await asyncio.sleep(GATHER_SECONDS)
            items += await self._read(0, len(items))
        return items

    async def _read(self, seconds: float, less: int = 0) -> list[Item]:
        return opened(await self._stream.read(self._name, self._size - less, seconds))

    def _patience(self) -> float:
        """Seconds that a read may wait: until something else is due."""
        due = [self._tend_at, *([self._again_at] if self._again_at is not None else [])]
        if self._reclaim_idle is not None:
            due.append(self._reclaim_at)
        return min(WAIT_SECONDS, *(at - self._clock.monotonic() for at in due))

    async def _own_pending(self) -> None:
        """What this name holds: of an earlier run, of a round that failed, or deferred."""
        after, self._again_at = START, None
        while not self._stop.is_set():
            entries = await self._stream.again(self._name, after, self._size)
            if not entries:
                return
            after = entries[-1].entry_id
            await self._settle(opened(entries))

    async def _reclaim(self, idle_seconds: float) -> None:
        """What others hold for too long (opt-in)."""
        self._reclaim_at = self._clock.monotonic() + idle_seconds / 2
        while not self._stop.is_set():
            found = await self._stream.reclaim(self._name, idle_seconds, self._size)
            self._batches.lose(found.gone)
            self.counts.reclaimed += len(found.entries)
            if not found.entries:
                break
            await self._settle(opened(found.entries))
        for name in await self._stream.forget_consumers(self._name, self._forget_seconds):
            log.warning("worker %s held nothing and was silent: it is forgotten", name)

    async def _tend(self) -> None:
        self._tend_at = self._clock.monotonic() + TEND_SECONDS
        told, self._told = self._told, asdict(self.counts)
        if told != self._told:
            seen = await self._stream.look()
            log.info("worker %s: %s; %d wait, %d of them delivered", self._name, self.counts, seen.length, seen.pending)

    # -- one batch ---------------------------------------------------------------------------------------------------

    async def _settle(self, items: Sequence[Item]) -> None:
        """Bring a batch to its end; its acknowledgement is on its way while the next one is written."""
        done, waits = await self._batches.settle(items)
        if waits:
            self._later()
        await self._acknowledged()
        if done:
            self._size = min(self._batch, 2 * self._size)
            self._acknowledging = asyncio.create_task(self._stream.acknowledge(done))
            self._reached()
        else:
            await self._rest()

    async def _acknowledged(self) -> None:
        """Wait for the last acknowledgement.

        Raises:
            RunnerError: ``store_unavailable``: those entries are delivered again, which changes nothing.
        """
        if self._acknowledging is not None:
            last, self._acknowledging = self._acknowledging, None
            await last

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
