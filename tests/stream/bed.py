"""Rows, streams and stores that the tests of the record stream share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from runner.errors import RunnerError
from runner.ids import record_id
from runner.store.memory import MemoryStore
from runner.store.port import Admission, Appended, Ending, RecordRow, SessionRow, Store, TurnRow

PROJECT, SESSION, TURN = "proj", "sess", "turn_1"


def row(n: int, *, session: str = SESSION, turn: str | None = TURN, epoch: int = 1, text: str = "", project=PROJECT):
    data = b'{"message_id":"m","text":"%s"}' % (text or f"text {n}").encode()
    made = record_id(session, turn or ".1", n)
    return RecordRow(project, session, made, turn, "p1", epoch, n, "message", data, 1_000 + n)


def rows(count: int, **more) -> list[RecordRow]:
    return [row(n, **more) for n in range(1, count + 1)]


def admission(session: str = SESSION, turn: str = TURN, epoch: int = 1) -> Admission:
    session_row = SessionRow(PROJECT, session, 1, 1, head_epoch=epoch)
    return Admission(session_row, TurnRow(PROJECT, session, turn, epoch, "rep_1", None, 1))


def ending(records: Sequence[RecordRow] = (), session: str = SESSION, turn: str = TURN, epoch: int = 1) -> Ending:
    begun = admission(session, turn, epoch)
    turn_row = replace(begun.turn, outcome="completed", stop_reason="end_turn", ended_at=9)
    return Ending(begun.session, turn_row, records=records)


async def stored(store: Store, session: str = SESSION, limit: int = 10_000) -> list[RecordRow]:
    return await store.records(PROJECT, session, None, limit)


async def texts(store: Store, session: str = SESSION) -> list[bytes]:
    return [one.data for one in await stored(store, session)]


async def until(holds: Callable[[], bool] | Callable[[], Awaitable[bool]], seconds: float = 20.0) -> None:
    """Poll until ``holds()``, at most ``seconds`` of the loop's time."""
    async with asyncio.timeout(seconds):
        while True:
            answer = holds()
            if await answer if not isinstance(answer, bool) else answer:
                return
            await asyncio.sleep(0.01)


class PoisonedStore(MemoryStore):
    """Refuses rows whose text says ``poison``, and any batch with one among them; counts its batches."""

    def __init__(self, **more) -> None:
        super().__init__(**more)
        self.batches: list[int] = []
        self.refuses = True
        self.gate: asyncio.Event | None = None

    async def write_batch(self, records: Sequence[RecordRow]) -> Appended:
        if self.gate is not None:
            await self.gate.wait()
        self.batches.append(len(records))
        if self.refuses and any(b"poison" in one.data for one in records):
            raise RunnerError("internal", "The store refused a row.")
        return await super().write_batch(records)
