"""Threads around SQLite: one writer that commits in groups, and readers on connections of their own (DESIGN 7)."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final

from runner.store.cursor import perform
from runner.store.faults import is_busy, translated
from runner.store.log import COPY_BACK_CHANGES, Changes, Log
from runner.store.writes import Work

log = logging.getLogger("runner.store")

GROUP_MAX: Final = 256
IDLE_SECONDS: Final = 1.0
ASK_AGAIN_SECONDS: Final = 0.002

Answer = tuple["asyncio.Future[Any]", Any, Exception | None]


@dataclass(slots=True)
class Transaction:
    """Work that is done whole or not at all; ``rows`` is how many it writes at most."""

    future: asyncio.Future[Any]
    work: Work[Any]
    rows: int


@dataclass(slots=True)
class Query:
    """Work on a connection, in a thread; ``work`` must finish what it reads. Without a future nobody waits for it."""

    future: asyncio.Future[Any] | None
    work: Callable[[sqlite3.Connection], Any]


class _Thread:
    """A thread with a queue and a connection of its own; answers go to the loop once per round."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop, connection: sqlite3.Connection) -> None:
        self._loop = loop
        self._connection = connection
        self._thread = threading.Thread(target=self._run, name=f"store:{name}", daemon=True)

    def start(self) -> None:
        """Begin to work on what was put."""
        self._thread.start()

    def join(self) -> None:
        """Wait, in another thread, until the end of the queue was reached."""
        self._thread.join()

    def _run(self) -> None:
        raise NotImplementedError

    def _answer(self, answers: list[Answer]) -> None:
        try:
            self._loop.call_soon_threadsafe(resolve, answers)
        except RuntimeError:
            log.warning("%d answers of the store came after the loop had closed", len(answers))


def resolve(answers: list[Answer]) -> None:
    """Hand answers to whoever still waits; on the loop."""
    for future, value, error in answers:
        if future.done():
            continue
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)


class Reader(_Thread):
    """Runs queries, or checkpoints, without holding up the writer."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop, connection: sqlite3.Connection) -> None:
        super().__init__(name, loop, connection)
        self._queue: SimpleQueue[Query | None] = SimpleQueue()
        self.put = self._queue.put

    def run(self, work: Callable[[sqlite3.Connection], None]) -> None:
        """Do some work that nobody waits for."""
        self.put(Query(None, work))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            value, failure = None, None
            try:
                value = item.work(self._connection)
            except Exception as error:
                failure = translated(error)
                log.warning("a query failed: %s", failure.message)
            if item.future is not None:
                self._answer([(item.future, value, failure)])


class Writer(_Thread):
    """Runs transactions: all that are queued share one BEGIN … COMMIT, each in its own savepoint.

    ``waiting`` counts transactions that were put and not answered yet, as the loop knows it. Its connection waits for
    nothing by itself: while another process writes, the thread asks again and again, for ``patience`` seconds.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, connection: sqlite3.Connection, wal: Log, patience: float
    ) -> None:
        super().__init__("writer", loop, connection)
        self._queue: SimpleQueue[list[Transaction] | None] = SimpleQueue()
        self._log = wal
        self._changes = Changes(connection)
        self._patience = patience
        self.waiting = 0

    def put(self, tick: list[Transaction] | None) -> None:
        """Queue transactions; None ends the thread."""
        self.waiting += len(tick) if tick is not None else 0
        self._queue.put(tick)

    def _answer(self, answers: list[Answer]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._answered, answers)
        except RuntimeError:
            log.warning("%d answers of the store came after the loop had closed", len(answers))

    def _answered(self, answers: list[Answer]) -> None:
        self.waiting -= len(answers)
        resolve(answers)

    def _run(self) -> None:
        while self._round(self._connection):
            pass

    def _round(self, connection: sqlite3.Connection) -> bool:
        """One group; False when the end of the queue was reached."""
        try:
            first = self._queue.get(timeout=IDLE_SECONDS if self._changes.count else None)
        except Empty:
            self._copy_back()
            return True
        group, goes_on = self._group(first)
        if group:
            self._answer(commit(connection, group, self._patience))
            if self._changes.count > COPY_BACK_CHANGES:
                self._copy_back()
            if self._log.long:
                self._log.copy_rest(connection)
        return goes_on

    def _copy_back(self) -> None:
        self._changes.reset()
        self._log.copy_back()

    def _group(self, first: list[Transaction] | None) -> tuple[list[Transaction], bool]:
        group: list[Transaction] = []
        item = first
        while item is not None:
            group += item
            if len(group) >= GROUP_MAX:
                return group, True
            try:
                item = self._queue.get_nowait()
            except Empty:
                return group, True
        return group, False


def begin(connection: sqlite3.Connection, patience: float) -> None:
    """Open a transaction that may write; raises when another process still holds the file after ``patience`` seconds.

    SQLite's own waiting backs off to a tenth of a second, which starves who waits beside a busy writer.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            connection.execute("BEGIN IMMEDIATE")
            return
        except sqlite3.Error as error:
            if not is_busy(error) or time.monotonic() > deadline:
                raise
        time.sleep(ASK_AGAIN_SECONDS)


def commit(connection: sqlite3.Connection, group: list[Transaction], patience: float | None) -> list[Answer]:
    """Run a group as one BEGIN … COMMIT; never raises. ``patience`` of None: the transaction is open already."""
    try:
        if patience is not None:
            begin(connection, patience)
        cursor = connection.cursor()
        answers = [_apply(cursor, item, alone=len(group) == 1) for item in group]
        if connection.in_transaction:
            cursor.execute("COMMIT")
        return answers
    except Exception as error:
        log.exception("a group of %d transactions failed", len(group))
        _roll_back(connection)
        return [(item.future, None, translated(error)) for item in group]


def _apply(cursor: sqlite3.Cursor, item: Transaction, *, alone: bool) -> Answer:
    """Run one transaction; its own failure is its answer, a failure of the whole group is raised."""
    if not alone:
        cursor.execute("SAVEPOINT one")
    try:
        written = perform(item.work, cursor)
    except Exception as error:
        failure = translated(error)
        if failure.code == "store_unavailable" or not cursor.connection.in_transaction:
            raise
        log.exception("a transaction was refused")
        cursor.execute("ROLLBACK" if alone else "ROLLBACK TO one")
        if not alone:
            cursor.execute("RELEASE one")
        return item.future, None, failure
    if not alone:
        cursor.execute("RELEASE one")
    return item.future, written, None


def _roll_back(connection: sqlite3.Connection) -> None:
    try:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    except sqlite3.Error:
        log.exception("rolling back failed")
