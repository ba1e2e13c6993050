"""The store in one SQLite file, for the processes of one machine."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from runner.clock import Clock, SystemClock
from runner.errors import RunnerError
from runner.ids import Ids, Key
from runner.store import rows, sqlite_file
from runner.store.inline import InlineWriter
from runner.store.log import Log
from runner.store.sql import PLACED
from runner.store.sql_store import Row, SqlStore
from runner.store.threads import Query, Reader, Transaction, Writer, resolve
from runner.store.writes import Work


class SqliteStore(SqlStore):
    """``Store`` over SQLite in WAL mode: durable against kill -9, not against a power cut (``synchronous=NORMAL``).

    Make it with ``open`` and use it from that event loop only. Other processes of this machine may have the same file
    open: one writes at a time, the others wait in their threads. ``busy`` counts calls that wait for a thread.
    """

    def __init__(self, store_id: str, connections: Sequence[sqlite3.Connection], clock: Clock) -> None:
        loop = asyncio.get_running_loop()
        write, read, copy, inline = connections
        self.store_id = store_id
        self._clock = clock
        self.busy = 0
        self._loop = loop
        self._connections = connections
        self._reader = Reader("reader", loop, read)
        self._copier = Reader("copier", loop, copy)
        wal = Log(self._copier.run)
        self._writer = Writer(loop, write, wal, sqlite_file.BUSY_SECONDS)
        self._inline = InlineWriter(loop, inline, self._writer, wal)
        self._closed = False
        self._tick: list[Transaction] = []
        for thread in (self._reader, self._copier, self._writer):
            thread.start()

    @classmethod
    async def open(
        cls,
        path: Path,
        mint: Callable[[str], str] | None = None,
        clock: Clock | None = None,
        *,
        upgrade: bool = False,
    ) -> Self:
        """Open or create the database; a new one gets mode 0600 and a ``store_id`` from ``mint("store")``.

        ``clock`` tells when a late record was set aside. ``upgrade``: a file of an earlier schema version is brought to
        this one; without it the file is refused, since other processes may be using it.

        Raises:
            RunnerError: ``store_unavailable``: the file cannot be used, or has another schema version.
        """
        opened = await asyncio.to_thread(sqlite_file.open_file, path, mint or Ids().mint, upgrade=upgrade)
        return cls(*opened, clock or SystemClock())

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._hand_over()
            self._inline.close()
            self._writer.put(None)
            await asyncio.to_thread(self._shut)

    def _shut(self) -> None:
        self._writer.join()
        for reader in (self._reader, self._copier):
            reader.put(None)
            reader.join()
        for connection in reversed(self._connections):
            connection.close()

    async def _write(self, of: Sequence[Key], work: Work[Row], count: int) -> Row:
        self._usable()
        future: asyncio.Future[Row] = self._loop.create_future()
        if not self._tick:
            self._loop.call_soon(self._hand_over)
        self._tick.append(Transaction(future, work, count))
        return await self._answer(future)

    def _hand_over(self) -> None:
        """All that one tick of the loop wrote shares one commit: here while that is quick, else in the thread."""
        tick, self._tick = self._tick, []
        if not tick:
            return
        answers = self._inline.write(tick)
        if answers is None:
            self._writer.put(tick)
        else:
            resolve(answers)

    async def _all(self, name: str, make: Callable[[rows.Parameters], Row], *parameters: Any) -> list[Row]:
        def work(connection: sqlite3.Connection) -> list[Row]:
            statement = PLACED[name]
            found = connection.execute(statement.text, statement.place(parameters)).fetchall()
            return [make(columns) for columns in found]

        return await self._read(work)

    async def _read(self, work: Callable[[sqlite3.Connection], Row]) -> Row:
        self._usable()
        future: asyncio.Future[Row] = self._loop.create_future()
        self._reader.put(Query(future, work))
        return await self._answer(future)

    async def _answer(self, future: asyncio.Future[Row]) -> Row:
        self.busy += 1
        try:
            return await future
        finally:
            self.busy -= 1

    def _usable(self) -> None:
        if self._closed:
            raise RunnerError("store_unavailable", "The store is closed.")
