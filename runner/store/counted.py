"""A store whose calls are counted: what was written, set aside and dropped, and what failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

from runner.errors import RunnerError
from runner.metrics import RECORDS_DROPPED, RECORDS_QUARANTINED, RECORDS_WRITTEN, STORE_ERRORS, Metrics
from runner.store.behind import StoreBehind
from runner.store.port import Admission, Appended, Ending, InteractionRow, PromptRow, RecordRow, SessionRow, Store

LATE: Final = "late"
DELETED: Final = "session_deleted"
OWN_FAULTS: Final = frozenset({"store_unavailable", "internal"})


class CountedStore(StoreBehind):
    """``Store`` by means of ``remote``, counted in ``metrics``; it stands right before the database."""

    def __init__(self, remote: Store, metrics: Metrics) -> None:
        super().__init__(cast("Store", _Watched(remote, metrics)))
        self._metrics = metrics

    async def admit(self, admission: Admission) -> bool:
        admitted = await self._remote.admit(admission)
        self._written(len(admission.records) * admitted)
        return admitted

    async def end(self, ending: Ending) -> bool:
        ended = await self._remote.end(ending)
        self._written(len(ending.records) * ended)
        return ended

    async def append(
        self,
        records: Sequence[RecordRow],
        interactions: Sequence[InteractionRow] = (),
        prompts: Sequence[PromptRow] = (),
    ) -> Appended:
        return self._told(await self._remote.append(records, interactions, prompts))

    async def write_batch(self, records: Sequence[RecordRow]) -> Appended:
        return self._told(await self._remote.write_batch(records))

    async def create_session(self, row: SessionRow, records: Sequence[RecordRow]) -> bool:
        created = await self._remote.create_session(row, records)
        self._written(len(records) * created)
        return created

    async def add_ending(self, record: RecordRow) -> bool:
        added = await self._remote.add_ending(record)
        self._written(int(added))
        return added

    async def quarantine(self, records: Sequence[RecordRow], reason: str, at: int) -> None:
        await self._remote.quarantine(records, reason, at)
        self._metrics.add(RECORDS_QUARANTINED, reason, amount=len(records))

    def _told(self, done: Appended) -> Appended:
        self._written(done.accepted)
        if done.quarantined:
            self._metrics.add(RECORDS_QUARANTINED, LATE, amount=done.quarantined)
        if done.dropped:
            self._metrics.add(RECORDS_DROPPED, DELETED, amount=done.dropped)
        return done

    def _written(self, count: int) -> None:
        if count:
            self._metrics.add(RECORDS_WRITTEN, amount=count)


class _Watched:
    """Passes every call on, whatever its name, and counts those that fail by a fault of the store."""

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self.store_id = store.store_id
        self._store = store
        self._metrics = metrics

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._store, name)

        async def call(*arguments: Any, **named: Any) -> Any:
            try:
                return await member(*arguments, **named)
            except RunnerError as error:
                if error.code in OWN_FAULTS:
                    self._metrics.add(STORE_ERRORS, error.code)
                raise

        setattr(self, name, call)
        return call
