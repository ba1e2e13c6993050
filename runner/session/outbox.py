"""What a session has shown or decided and the store does not have yet: one ordered way to durability (DESIGN 3.9)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from runner.errors import RunnerError
from runner.store.one_by_one import one_by_one
from runner.store.port import Appended, Ending, InteractionRow, PromptRow, RecordRow, Store
from runner.store.replay import ENDED_OTHERWISE, same_ending
from runner.store.rows import REFUSED
from runner.tasks import Tasks

log = logging.getLogger("runner.session")
FLUSH_SECONDS: Final = 0.25
RETRY_SECONDS: Final = 1.0
FULL_BATCH: Final = 500


@dataclass(slots=True)
class Batch:
    """Rows that are written in one transaction."""

    records: list[RecordRow] = field(default_factory=list)
    questions: dict[str, InteractionRow] = field(default_factory=dict)
    prompts: dict[str, PromptRow] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.records or self.questions or self.prompts)

    def before(self, newer: Batch) -> Batch:
        """This batch with everything of a newer one behind it."""
        return Batch(
            [*self.records, *newer.records], {**self.questions, **newer.questions}, {**self.prompts, **newer.prompts}
        )


async def end_again(store: Store, ending: Ending) -> bool:
    """Whether the turn's one ending is this one; the try before may have been written although its answer was lost.

    Raises:
        RunnerError: ``store_unavailable``: it may have been written, try again.
    """
    if await store.end(ending):
        return True
    turn = ending.turn
    return same_ending(await store.turn(turn.project, turn.session_id, turn.turn_id), turn)


class Outbox:
    """Rows on their way to the store.

    Whoever writes rows of the session holds ``writing``: nobody then reads a past in which those rows are missing.
    An ending that could not be written is owed: it goes first, and no newer turn is admitted before it.
    """

    def __init__(self, name: str, store: Store, tasks: Tasks) -> None:
        self.writing = asyncio.Lock()
        self._name = name
        self._store = store
        self._tasks = tasks
        self._batch = Batch()
        self._endings: list[Ending] = []
        self._timer: asyncio.TimerHandle | None = None
        self._flushing: asyncio.Task[None] | None = None
        self.on_stale: Callable[[], None] | None = None
        """Called when the store says that somebody else writes the session now."""
        self.on_written: Callable[[], None] = lambda: None
        """Called when what was queued is durable."""

    @property
    def empty(self) -> bool:
        """Whether the store has everything."""
        return self.nothing_waits and not self.writing.locked()

    @property
    def nothing_waits(self) -> bool:
        """Whether nothing is queued; the caller, who holds ``writing``, may be making something durable."""
        return not self._batch and not self._endings

    @property
    def owes_endings(self) -> bool:
        """Whether a turn ended whose ending is not durable yet."""
        return bool(self._endings)

    @property
    def owes_questions(self) -> bool:
        """Whether the store does not know every question as it is now."""
        return bool(self._batch.questions) or self.owes_endings

    # -- what comes in -----------------------------------------------------------------------------------------------

    def record(self, row: RecordRow) -> None:
        """Queue a record; it is flushed soon, or with the ending of its turn."""
        self._batch.records.append(row)
        if len(self._batch.records) == FULL_BATCH:
            self.flush_soon()
        else:
            self._arm(FLUSH_SECONDS)

    def questions(self, rows: Sequence[InteractionRow]) -> None:
        """Queue questions as they are now."""
        self._batch.questions.update({row.interaction_id: row for row in rows})
        self._arm(FLUSH_SECONDS)

    def prompt(self, row: PromptRow) -> None:
        """Queue a prompt as it is now."""
        self._batch.prompts[row.prompt_id] = row
        self._arm(FLUSH_SECONDS)

    def owe(self, ending: Ending) -> None:
        """Keep an ending that the store could not take."""
        self._endings.append(ending)
        self._arm(RETRY_SECONDS)

    def take(self) -> Batch:
        """Everything queued but endings; the caller now has to make it durable, or give it back."""
        batch, self._batch = self._batch, Batch()
        return batch

    def give_back(self, batch: Batch) -> None:
        """Queue a batch again, before what is newer."""
        self._batch = batch.before(self._batch)
        if self._batch:
            self._arm(RETRY_SECONDS)

    # -- what goes out -----------------------------------------------------------------------------------------------

    def _arm(self, seconds: float) -> None:
        if self._timer is None and self._flushing is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.flush_soon)

    def flush_soon(self) -> None:
        """Flush in the background; what fails is tried again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (self._batch or self._endings) and self._flushing is None:
            self._flushing = self._tasks.spawn(f"flush {self._name}", self._in_background())

    async def prompts_first(self) -> None:
        """Make prompts durable that ended, with what was told of them; for whoever holds ``writing``.

        Raises:
            RunnerError: ``store_unavailable``; what could not be written stays queued.
        """
        while self._batch.prompts:
            await self._write_batch()

    async def add_ending(self, make: Callable[[], RecordRow]) -> bool:
        """Write the ending that a turn's history lacks, behind all that was shown before; see ``Store.add_ending``.

        ``make`` gives the record its cursor; it is called once nothing older waits.

        Raises:
            RunnerError: ``store_unavailable``.
        """
        async with self.writing:
            while self._batch:
                await self._write_batch()
            return await self._store.add_ending(make())

    async def written(self, seconds: float) -> None:
        """Wait until what is queued or being written now is durable, at most ``seconds``; what fails is tried again."""
        try:
            async with asyncio.timeout(seconds):
                await self.flush()
        except (RunnerError, TimeoutError) as error:
            log.warning("what %s acknowledges is not durable yet: %s", self._name, str(error) or "the store is slow")

    async def _in_background(self) -> None:
        seconds = FLUSH_SECONDS
        try:
            await self.flush()
        except RunnerError as error:
            log.warning("records of %s are kept back: %s", self._name, error)
            seconds = RETRY_SECONDS
        finally:
            self._flushing = None
            if self._batch or self._endings:
                self._arm(seconds)

    async def flush(self) -> None:
        """Make everything queued durable now.

        Raises:
            RunnerError: ``store_unavailable``; what could not be written stays queued.
        """
        async with self.writing:
            while self._endings:
                await self._write_ending(self._endings[0])
                del self._endings[0]
            if self._batch:
                await self._write_batch()
            self.on_written()

    async def _write_ending(self, ending: Ending) -> None:
        try:
            written = await end_again(self._store, ending)
        except RunnerError as error:
            if error.code != "internal":
                raise
            written = await end_again(self._store, replace(ending, records=()))
            if written:
                await self._one_by_one(ending.records)
        if not written:
            await self.set_aside(ending)

    async def set_aside(self, ending: Ending) -> None:
        """Somebody else wrote the turn's one ending: these records are kept where no reader sees them (DESIGN 3.9)."""
        log.error("turn %s had already ended; its ending was dropped", ending.turn.turn_id)
        await self._quarantine(ending.records, ENDED_OTHERWISE, ending.turn.ended_at or 0)

    async def _quarantine(self, records: Sequence[RecordRow], reason: str, at: int) -> None:
        try:
            await self._store.quarantine(records, reason, at)
        except Exception as error:
            log.error("%d records of %s are lost: %s", len(records), self._name, error)

    async def _write_batch(self) -> None:
        """All that is queued; what cannot be written is queued again."""
        batch = self.take()
        try:
            await self._append(batch)
        except BaseException:
            self.give_back(batch)
            raise

    async def _append(self, batch: Batch) -> None:
        questions, prompts = list(batch.questions.values()), list(batch.prompts.values())
        try:
            self.told(await self._store.append(batch.records, questions, prompts))
        except RunnerError as error:
            if error.code != "internal":
                raise
            await self._store.append([], questions, prompts)
            await self._one_by_one(batch.records)

    def told(self, appended: Appended) -> None:
        """What the store made of rows of this session: where any came too late, another replica writes it now."""
        if late := appended.quarantined + appended.dropped:
            log.error("%d records or questions of %s came too late", late, self._name)
            if self.on_stale is not None:
                self.on_stale()

    async def _one_by_one(self, records: Sequence[RecordRow]) -> None:
        await one_by_one(records, self._store.append, lambda row: self._quarantine([row], REFUSED, row.at))
