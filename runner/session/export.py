"""A session's whole history as JSON lines: the session, its records, and an end that says whether that was all."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from runner.errors import RunnerError
from runner.ids import format_cursor
from runner.rules.history import Wholeness
from runner.session.history import PAGE, record_head
from runner.session.port import ReaderEnded
from runner.session.services import Services
from runner.session.session import Session
from runner.store.port import RecordRow
from runner.wire.codec import to_json

SESSION: Final = "session"
RECORD: Final = "record"
END: Final = "end"


class Export:
    """A ``session.port.Reader`` of the records up to the session's head as it was when this was made.

    It reads page by page, as fast as its client takes them; a store that fails raises ``RunnerError``, and then there
    is no end line.

    Args:
        services: of the replica.
        session: whose history; everything that it has shown is in the store.
        view: what the first line says of it.
    """

    def __init__(self, services: Services, session: Session, view: dict[str, Any]) -> None:
        self._services = services
        self._session = session
        self._until = session.head.cursor
        running = session.current.turn_id if session.current is not None else None
        self._running = running or (session.unfinished.turn_id if session.unfinished is not None else None)
        self._lines = [to_json({"kind": SESSION, "session": view}) + b"\n"]
        self._seen = Wholeness()
        self._count = 0
        self._reading: asyncio.Task[RunnerError | None] | None = None
        self._ended = False

    async def begin(self) -> None:
        """Bring everything that was shown into the store, and read the first page.

        Raises:
            RunnerError: ``store_unavailable``; nothing was sent yet.
        """
        store, key = self._services.store, self._session.key
        await self._session.hand_over()
        self._seen.pruned_to = await store.pruned_to(*key)
        failed = await self._read()
        if failed is not None:
            raise failed

    async def next(self, seconds: float) -> bytes | None:
        """See ``session.port.Reader``.

        Raises:
            RunnerError: ``store_unavailable``; ``session_ended``: it was deleted meanwhile.
        """
        if not self._lines:
            if self._ended:
                raise ReaderEnded
            if self._reading is None:
                name = f"export {self._session.session_id}"
                self._reading = self._services.tasks.spawn(name, self._read())
            await asyncio.wait({self._reading}, timeout=seconds)
            if not self._reading.done():
                return None
            failed, self._reading = self._reading.result(), None
            if failed is not None:
                raise failed
        lines, self._lines = b"".join(self._lines), []
        return lines

    @property
    def ended(self) -> bool:
        """See ``session.port.Reader``."""
        return self._ended and not self._lines

    def close(self, *, cut: bool = False) -> None:
        """See ``session.port.Reader``."""
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self) -> RunnerError | None:
        """The next page, and behind the last one the end; a failure is a value: only ``next`` is told of it."""
        try:
            rows = await self._services.store.records(*self._session.key, self._seen.newest, PAGE)
            due = [row for row in rows if row.cursor <= self._until]
            for row in due:
                self._seen.see(row.epoch, row.n, row.turn_id, row.type)
            self._lines += map(_line, due)
            self._count += len(due)
            if len(due) < PAGE:
                self._lines.append(await self._end())
                self._ended = True
        except RunnerError as error:
            return error
        return None

    async def _end(self) -> bytes:
        store, key = self._services.store, self._session.key
        row = await store.session(*key)
        if row is None or row.ended_at is not None:
            raise RunnerError("session_ended", f"Session {key[1]} has ended.")
        self._seen.pruned_to = await store.pruned_to(*key) or self._seen.pruned_to
        self._seen.lost(await store.unstorable(*key), self._until)
        missing = self._seen.missing([self._running])
        end: dict[str, Any] = {
            "kind": END,
            "records": self._count,
            "head": format_cursor(*self._until),
            "running_turn": self._running,
            "complete": not missing,
        }
        return to_json({**end, **({"missing": missing} if missing else {})}) + b"\n"


def _line(row: RecordRow) -> bytes:
    head = to_json({"kind": RECORD, **record_head(row)})
    return head[:-1] + b',"data":' + row.data + b"}\n"
