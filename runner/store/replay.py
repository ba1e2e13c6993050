"""What waited in a spool, written to its store: again after any crash, with the same result (DESIGN 3.9)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any, Final

from runner.clock import Clock
from runner.errors import RunnerError
from runner.store.codec import decode_parameters
from runner.store.one_by_one import one_by_one
from runner.store.port import Admission, Ending, InteractionRow, PromptRow, RecordRow, Store, TurnRow
from runner.store.rows import REFUSED
from runner.store.spool_file import Entry

log = logging.getLogger("runner.store")

Granted = Callable[[str, str, str], bool | None]
"""``(project, session_id, turn_id)`` of an admission that waits: what the plane said of it, None for nothing yet."""
NOT_ADMITTED: Final = "not_admitted"
ENDED_OTHERWISE: Final = "ended_otherwise"
REFUSALS: Final = ("internal", "too_large")
"""Codes of what a store refuses, and of what no request to it can carry."""


class Replayed(StrEnum):
    """What became of an entry: it counts, its turn was refused, some of it came too late, or no store can take it."""

    WRITTEN = "written"
    REJECTED = "rejected"
    LATE = "late"
    IMPOSSIBLE = "impossible"


class Waits(Exception):
    """The lease plane has not said yet whether this admission counts."""


class Replay:
    """Writes entries to a store.

    Args:
        store: where they were meant to go.
        clock: for the instants of what is set aside.
        granted: whether an admission counts; asked at each try.
    """

    def __init__(self, store: Store, clock: Clock, granted: Granted) -> None:
        self._store = store
        self._clock = clock
        self._granted = granted

    async def write(self, entry: Entry) -> Replayed:
        """Write one entry; repeating it changes nothing.

        Raises:
            RunnerError: ``store_unavailable``: nothing is known, try again.
            Waits: see there.
        """
        try:
            parameters = decode_parameters(entry.call, entry.payload)
        except (RunnerError, AttributeError) as error:
            log.error("a spooled write of session %s cannot be read: %s", entry.session_id, error)
            return Replayed.IMPOSSIBLE
        try:
            return await self._write(entry, parameters)
        except RunnerError as error:
            _known_refusal(error)
            log.error(
                "a spooled %s of session %s was refused and is kept aside: %s", entry.call, entry.session_id, error
            )
            return Replayed.IMPOSSIBLE

    async def _write(self, entry: Entry, parameters: dict[str, Any]) -> Replayed:
        if entry.rejected:
            await self._set_aside(_records(parameters), NOT_ADMITTED)
            return Replayed.LATE
        if "admission" in parameters:
            return await self._admit(parameters["admission"])
        if "ending" in parameters:
            return await self._end(parameters["ending"])
        if entry.call == "append":
            return await self._append(**parameters)
        await getattr(self._store, entry.call)(**parameters)
        return Replayed.WRITTEN

    async def _admit(self, admission: Admission) -> Replayed:
        turn = admission.turn
        granted = self._granted(turn.project, turn.session_id, turn.turn_id)
        if granted is None:
            raise Waits
        if granted and await self._admitted(admission):
            return Replayed.WRITTEN
        await self._set_aside(admission.records, NOT_ADMITTED)
        return Replayed.REJECTED

    async def _admitted(self, admission: Admission) -> bool:
        try:
            written = await self._store.admit(admission)
        except RunnerError as error:
            _known_refusal(error)
            written = await self._store.admit(replace(admission, records=()))
            if written:
                _ = await self._one_by_one(admission.records)
        return written or same_turn(await self._stored(admission.turn), admission.turn)

    async def _end(self, ending: Ending) -> Replayed:
        if await self._store.end(ending) or same_ending(await self._stored(ending.turn), ending.turn):
            return Replayed.WRITTEN
        await self._set_aside(ending.records, ENDED_OTHERWISE)
        return Replayed.REJECTED

    async def _append(
        self,
        records: Sequence[RecordRow],
        interactions: Sequence[InteractionRow] = (),
        prompts: Sequence[PromptRow] = (),
    ) -> Replayed:
        try:
            done = await self._store.append(records, interactions, prompts)
            return Replayed.LATE if done.quarantined or done.dropped else Replayed.WRITTEN
        except RunnerError as error:
            _known_refusal(error)
        late = await self._one_by_one(records)
        if not late:
            _ = await self._store.append([], interactions, prompts)
        return Replayed.LATE if late else Replayed.WRITTEN

    async def _one_by_one(self, records: Sequence[RecordRow]) -> bool:
        """Whether any came too late."""
        done = await one_by_one(records, self._store.append, lambda row: self._set_aside([row], REFUSED), REFUSALS)
        return bool(done.quarantined or done.dropped)

    async def _set_aside(self, records: Sequence[RecordRow], reason: str) -> None:
        if records:
            await self._store.quarantine(records, reason, self._clock.now_ms())

    async def _stored(self, turn: TurnRow) -> TurnRow | None:
        return await self._store.turn(turn.project, turn.session_id, turn.turn_id)


def _known_refusal(error: RunnerError) -> None:
    """Only what is refused is worth another way; all else is raised again."""
    if error.code not in REFUSALS:
        raise error


def same_turn(stored: TurnRow | None, mine: TurnRow) -> bool:
    """Whether the turn that the store has is this one: an earlier try of its admission was written."""
    return stored is not None and (stored.epoch, stored.replica_id, stored.started_at) == (
        mine.epoch,
        mine.replica_id,
        mine.started_at,
    )


def same_ending(stored: TurnRow | None, mine: TurnRow) -> bool:
    """Whether the ending that the store has is this one: an earlier try of it was written."""
    return stored is not None and (stored.epoch, stored.outcome, stored.ended_at, stored.stop_reason) == (
        mine.epoch,
        mine.outcome,
        mine.ended_at,
        mine.stop_reason,
    )


def _records(parameters: dict[str, Any]) -> Sequence[RecordRow]:
    holder = parameters.get("admission") or parameters.get("ending")
    found: Sequence[RecordRow] = holder.records if holder is not None else parameters.get("records", ())
    return found
