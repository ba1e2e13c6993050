"""A store whose records travel by the stream: a turn's records wait for no transaction, its ending carries the rest."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from runner.errors import RunnerError
from runner.ids import Key
from runner.rules.feed import FED
from runner.store.behind import StoreBehind
from runner.store.port import Admission, Appended, Ending, InteractionRow, PromptRow, RecordRow, Store
from runner.store.stream.codec import Unreadable, decode, encode, session_of
from runner.store.stream.port import Published, RecordStream
from runner.store.stream.unconfirmed import Held, Unconfirmed
from runner.tasks import Tasks

log = logging.getLogger("runner.store")

HELD_BYTES: Final = 32 * 1024 * 1024
LARGE_BYTES: Final = 128 * 1024
PUBLISH_BYTES: Final = 4 * 1024 * 1024
"""One record, and one call, that would keep others from the stream for too long goes to the store."""
WATCH_SECONDS: Final = (1.0, 5.0)
LAST_SECONDS: Final = 2.0
PAGE: Final = 500
SMALLER: Final = 30
OWN_TURNS: Final = 10_000
"""Turns that it remembers to be written here alone; of any other the stream is read before its ending."""


@dataclass(slots=True)
class Sent:
    """Records by the way they took: to the stream, to it once more, or to the store past it."""

    published: int = 0
    republished: int = 0
    bypassed: int = 0


class PipelinedStore(StoreBehind):
    """``Store`` that gives records of running turns to a stream, from where a worker brings them to ``remote``.

    Everything else goes to ``remote`` at once, together with those records of its session that nobody acknowledged
    yet: what a session wrote is never there with a gap, and an ending waits for no worker. Where the stream cannot be
    used, or is full, records go to ``remote`` too, without another try at the stream until that answers again.

    Whether a record came too late is found out by the worker: ``append`` does not tell it.

    Args:
        remote: the store that the worker writes to.
        stream: closed with this store.
        held_bytes: most bytes kept until they are acknowledged; beyond it records go to ``remote``.
    """

    def __init__(self, remote: Store, stream: RecordStream, *, held_bytes: int = HELD_BYTES) -> None:
        super().__init__(remote)
        self._stream = stream
        self._held_bytes = held_bytes
        self._kept = Unconfirmed()
        self._tasks = Tasks("stream")
        self._watching: asyncio.Task[None] | None = None
        self._generation: str | None = None
        self.sent = Sent()
        self.away = False
        """Whether the stream gave no answer lately: then it is left alone."""
        self.full = False
        """Whether it takes no more."""
        self._own_turns: dict[tuple[str, str], None] = {}

    @property
    def unconfirmed(self) -> int:
        """How many records of this process the store may not have yet."""
        return len(self._kept)

    @property
    def unconfirmed_bytes(self) -> int:
        """What those take in memory."""
        return self._kept.bytes

    # -- writes ------------------------------------------------------------------------------------------------------

    async def admit(self, admission: Admission) -> bool:
        admitted = await self._remote.admit(admission)
        if admitted:
            self._own_turns[admission.turn.project, admission.turn.turn_id] = None
            if len(self._own_turns) > OWN_TURNS:
                del self._own_turns[next(iter(self._own_turns))]
        return admitted

    async def append(
        self,
        records: Sequence[RecordRow],
        interactions: Sequence[InteractionRow] = (),
        prompts: Sequence[PromptRow] = (),
    ) -> Appended:
        """As the port says; records alone go to the stream, where they survive kill -9 of this process."""
        payloads = self._payloads(records) if not (interactions or prompts) else None
        if payloads is None:
            self.sent.bypassed += len(records)
            return await self._directly(records, interactions, prompts)
        known = self._kept.knows(records)
        held = self._kept.hold(records, payloads)
        self._watch()
        try:
            if self._took(held, await self._stream.publish(payloads)):
                self.sent.published += len(records)
                return Appended(len(records), on_the_way=True)
        except RunnerError as error:
            self._failed(error)
        self.sent.bypassed += len(records)
        try:
            return await self._directly(records)
        except RunnerError:
            # The caller knows now that they are not written: it has them, and this store has not.
            self._kept.forget(row for row in records if row.record_id not in known)
            raise

    def _payloads(self, records: Sequence[RecordRow]) -> list[bytes] | None:
        """What the stream would get; None where these records go to the store."""
        if self.away or not records:
            return None
        # A record outside of a turn counts only until the next turn begins, and somebody waits for what the feed tells.
        at_once = any(row.turn_id is None or row.type in FED for row in records)
        if at_once or len({row.session_id for row in records}) > 1:
            return None
        try:
            payloads = [encode(row) for row in records]
        except Unreadable:
            return None
        size = sum(map(len, payloads))
        too_large = max(map(len, payloads)) > LARGE_BYTES or size > PUBLISH_BYTES
        return None if too_large or self._kept.bytes + size > self._held_bytes else payloads

    async def _directly(
        self,
        records: Sequence[RecordRow],
        interactions: Sequence[InteractionRow] = (),
        prompts: Sequence[PromptRow] = (),
    ) -> Appended:
        """To the store, with what it does not have of the session yet."""
        first = next((row for rows in (records, interactions, prompts) for row in rows), None)
        if first is None:
            return await self._remote.append(records, interactions, prompts)
        more = self._others((first.project, first.session_id), records)
        if more:
            try:
                done = await self._remote.append([*more, *records], interactions, prompts)
            except RunnerError as error:
                if error.code != "internal":
                    raise
            else:
                self._kept.forget([*more, *records])
                return replace(done, accepted=max(0, done.accepted - len(more)))
        done = await self._remote.append(records, interactions, prompts)
        self._kept.forget(records)
        return done

    async def end(self, ending: Ending) -> bool:
        """As the port says; the records of its session that are on their way are part of it."""
        turn = ending.turn
        key, name = (turn.project, turn.session_id), (turn.project, turn.turn_id)
        if name not in self._own_turns:
            await self.caught_up(*key)
        more = self._others(key, ending.records)
        whole = replace(ending, records=[*more, *ending.records]) if more else ending
        try:
            ended = await self._remote.end(whole)
        except RunnerError as error:
            if error.code != "internal" or not more:
                raise
            await self._hand_over(more)
            more = []
            ended = await self._remote.end(ending)
        if ended:
            self._kept.forget(more)
            self._kept.forget(ending.records)
        else:
            # Ended already: by this very ending, or otherwise, and then nobody may read them.
            with suppress(RunnerError):
                await self._hand_over(more)
        self._own_turns.pop(name, None)
        return ended

    def _others(self, key: Key, records: Sequence[RecordRow]) -> list[RecordRow]:
        given = {row.record_id for row in records}
        return [row for row in self._kept.rows(key) if row.record_id not in given]

    async def delete_session_content(self, project: str, session_id: str) -> None:
        self._kept.forget_session((project, session_id))
        await self._remote.delete_session_content(project, session_id)

    # -- reads -------------------------------------------------------------------------------------------------------

    async def records(
        self, project: str, session_id: str, after: tuple[int, int] | None, limit: int
    ) -> list[RecordRow]:
        """As the port says, with what this process gave to the stream."""
        mine = [row for row in self._kept.rows((project, session_id)) if after is None or row.cursor > after]
        stored = await self._remote.records(project, session_id, after, limit)
        if not mine:
            return stored
        known = {row.record_id for row in stored}
        rows = [*stored, *(row for row in mine if row.record_id not in known)]
        return sorted(rows, key=lambda row: row.cursor)[:limit]

    async def caught_up(self, project: str, session_id: str) -> None:
        """Have the store know what any sender gave to the stream for a session.

        An ended turn needs no look at the stream: its ending carried its records, and others of it do not count.

        Raises:
            RunnerError: ``store_unavailable``: that cannot be said now.
        """
        key = (project, session_id)
        await self._remote.caught_up(project, session_id)
        await self._hand_over(self._kept.rows(key))
        if await self._remote.open_turns(key):
            await self._drain_session(key)

    async def _drain_session(self, key: Key) -> None:
        seen = await self._stream.look()
        after, size = seen.floor, PAGE
        while True:
            try:
                page = await self._stream.scan(after, size)
            except RunnerError:
                if size == 1:
                    raise
                # It may have been more than an answer in time can carry.
                size = max(1, size // SMALLER)
                continue
            if not page:
                return
            after = page[-1].entry_id
            rows = []
            for entry in page:
                if entry.payload is None or session_of(entry.payload) != key:
                    continue
                with suppress(Unreadable):
                    rows.append(decode(entry.payload, entry.version))
            await self._hand_over(rows)

    async def _hand_over(self, rows: Sequence[RecordRow]) -> None:
        """Write records past the stream; one that the store refuses stays for the worker, which sets it aside."""
        if not rows:
            return
        try:
            await self._remote.write_batch(rows)
            self._kept.forget(rows)
        except RunnerError as error:
            if error.code != "internal":
                raise
            if len(rows) > 1:
                for row in rows:
                    await self._hand_over([row])
            else:
                log.error("record %s is refused: %s", rows[0].record_id, error.message)

    # -- the stream --------------------------------------------------------------------------------------------------

    def _took(self, held: Sequence[Held], done: Published) -> bool:
        """Note what the stream answered; False when it is full."""
        self._saw(done.generation)
        self._kept.confirm(done.floor)
        if not done.entry_ids:
            if not self.full:
                log.error("the record stream is full: records go to the store until a worker made room")
            self.full = True
            return False
        self.full = False
        self._kept.published(held, done.entry_ids)
        return True

    def _saw(self, generation: str) -> None:
        if self._generation not in (None, generation):
            log.warning("the record stream began anew: %d records are given to it again", len(self._kept))
            self._kept.begin_anew()
        self._generation = generation

    def _failed(self, error: RunnerError) -> None:
        if not self.away:
            log.error("records go to the store for now: %s", error.message)
        self.away = True

    def _watch(self) -> None:
        """See to what is not acknowledged, in the background, until there is nothing."""
        if self._watching is None or self._watching.done():
            self._watching = self._tasks.spawn("watch", self._watch_on())

    async def _watch_on(self) -> None:
        pause, longest = WATCH_SECONDS
        while self._kept or self.away:
            await asyncio.sleep(pause)
            try:
                await self._look()
                pause = WATCH_SECONDS[0]
            except RunnerError as error:
                self._failed(error)
                pause = min(2 * pause, longest)
                await self._rescue()

    async def _look(self) -> None:
        seen = await self._stream.look()
        if self.away:
            log.warning("the record stream is back")
            self.away = False
        self._saw(seen.generation)
        self._kept.confirm(seen.floor)
        lost = self._kept.unpublished()
        for start in range(0, len(lost), PAGE):
            held = [one for one in lost[start : start + PAGE] if one.entry_id is None]
            done = await self._stream.publish([encode(one.row) for one in held])
            if not self._took(held, done):
                await self._rescue()
                return
            self.sent.republished += len(held)

    async def _rescue(self) -> None:
        """What is in memory alone goes to the store, as far as that is there."""
        held = self._kept.all()
        try:
            for start in range(0, len(held), PAGE):
                await self._hand_over([one.row for one in held[start : start + PAGE]])
        except RunnerError as error:
            log.warning("%d records wait in memory: %s", len(self._kept), error.message)

    async def close(self) -> None:
        """Bring what the stream does not have to the store, bounded; then close both."""
        await self._tasks.close()
        if self.away or self._kept.unpublished():
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_SECONDS):
                    await self._rescue()
        await self._stream.close()
        await self._remote.close()
