"""Small groups are committed on the loop's own thread while the disk is quick: no thread is woken (docs/decisions)."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from typing import Final

from runner.store.log import COPY_BACK_CHANGES, Changes, Log
from runner.store.threads import IDLE_SECONDS, Answer, Transaction, Writer, commit

ROWS_MAX: Final = 300
SLOW_SECONDS: Final = 0.02
REST_SECONDS: Final = 5.0
CHANGES_MAX: Final = 1000


class InlineWriter:
    """Commits a tick's transactions at once, or says that the thread has to.

    The thread has to when it still has something to do (order), when the group is large, when another process holds
    the file, when the log is long, and for a while after a commit that was slow: a slow disk delays the loop once.

    Args:
        connection: its own, which never waits for a lock.
        writer: the thread that does what is not done here.
        wal: the log, which this writer has copied back too.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, connection: sqlite3.Connection, writer: Writer, wal: Log
    ) -> None:
        self._loop = loop
        self._connection = connection
        self._writer = writer
        self._log = wal
        self._rests_until = 0.0
        self._not_copied, self._in_a_row = Changes(connection), Changes(connection)
        self._timer: asyncio.TimerHandle | None = None

    def write(self, tick: list[Transaction]) -> list[Answer] | None:
        """The answers, or None: nothing was written, the thread has to."""
        if self._writer.waiting or self._log_is_long() or self._loop.time() < self._rests_until:
            return None
        if sum(item.rows for item in tick) > ROWS_MAX:
            return None
        began = time.perf_counter()
        try:
            self._connection.execute("BEGIN IMMEDIATE")
        except sqlite3.Error:
            return None
        answers = commit(self._connection, tick, None)
        if time.perf_counter() - began > SLOW_SECONDS:
            self._rests_until = self._loop.time() + REST_SECONDS
        self._keep_log_short()
        return answers

    def close(self) -> None:
        """No copying back any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _log_is_long(self) -> bool:
        """Now and then the thread writes, and copies the log's rest: the copier need not keep up with a busy loop."""
        if self._in_a_row.count > CHANGES_MAX:
            self._in_a_row.reset()
            self._log.call_for_rest()
        return self._log.long

    def _keep_log_short(self) -> None:
        if self._not_copied.count > COPY_BACK_CHANGES:
            self._copy_back()
        elif self._timer is None:
            self._timer = self._loop.call_later(IDLE_SECONDS, self._copy_back)

    def _copy_back(self) -> None:
        self.close()
        self._not_copied.reset()
        self._log.copy_back()
