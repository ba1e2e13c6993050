"""The write-ahead log of one SQLite file: copied back behind the writers, so that it can start over."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable
from typing import Final, NamedTuple

log = logging.getLogger("runner.store")

COPY_BACK_CHANGES: Final = 5000
LONG_FRAMES: Final = 8192
TOO_LONG_FRAMES: Final = 2 * LONG_FRAMES
RESTART_MS: Final = 100
ASK_AGAIN_SECONDS: Final = 0.001


class Checkpoint(NamedTuple):
    """What one copying back came to: ``busy`` when somebody was in its way, and then counts may be -1."""

    busy: bool
    frames: int
    copied: int

    @property
    def whole(self) -> bool:
        """Whether nothing is left to copy: the next writer starts the log over, if it begins after this."""
        return 0 <= self.frames <= self.copied


def checkpoint(connection: sqlite3.Connection, mode: str = "PASSIVE") -> Checkpoint:
    """Copy the log back: ``PASSIVE`` disturbs nobody, ``RESTART`` also holds up every writer of the file."""
    busy, frames, copied = connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
    return Checkpoint(bool(busy), int(frames), int(copied))


class Log:
    """How long the log is, as this process last saw it, and who copies it back.

    Args:
        run: does work on a connection that nobody waits for, in a thread. Under steady load that thread never catches
            up, so that the log could not start over: a writer then copies the short rest between two of its groups.
    """

    def __init__(self, run: Callable[[Callable[[sqlite3.Connection], None]], None]) -> None:
        self._run = run
        self._frames = 0
        self._called = False

    @property
    def long(self) -> bool:
        """Whether a writer should copy the rest."""
        return self._called or self._frames > LONG_FRAMES

    def call_for_rest(self) -> None:
        """A writer should copy the rest, however long the log is."""
        self._called = True

    def copy_back(self) -> None:
        """Begin to copy it back, in the thread."""
        self._run(self._copy)

    def _copy(self, connection: sqlite3.Connection) -> None:
        self._saw(checkpoint(connection))

    def copy_rest(self, connection: sqlite3.Connection) -> None:
        """Copy what is left, by a writer that writes nothing meanwhile; never raises.

        A rest that somebody else is copying just now is looked at again behind the next group. Where other processes
        write too, even a log that was copied whole goes on: one that grew too long holds them up once, for a moment.
        """
        try:
            done = checkpoint(connection)
            self._saw(done)
            self._called = not done.whole
            if self._frames > TOO_LONG_FRAMES and not _restart(connection).busy:
                self._frames, self._called = 0, False
        except sqlite3.Error:
            self._frames, self._called = 0, False
            log.exception("copying the log back failed")

    def _saw(self, done: Checkpoint) -> None:
        if done.frames >= 0:
            self._frames = done.frames


def _restart(connection: sqlite3.Connection) -> Checkpoint:
    """Every other writer waits meanwhile. SQLite itself does not wait for whoever copies the log back just now."""
    (patience,) = connection.execute("PRAGMA busy_timeout").fetchone()
    connection.execute(f"PRAGMA busy_timeout = {RESTART_MS}").fetchall()
    deadline = time.monotonic() + RESTART_MS / 1000
    try:
        while (done := checkpoint(connection, "RESTART")).frames < 0 and time.monotonic() < deadline:
            time.sleep(ASK_AGAIN_SECONDS)
        return done
    finally:
        connection.execute(f"PRAGMA busy_timeout = {patience}").fetchall()


class Changes:
    """Counts what a connection changed since it was looked at."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._seen = connection.total_changes

    @property
    def count(self) -> int:
        """Rows changed since ``reset``."""
        return self._connection.total_changes - self._seen

    def reset(self) -> None:
        """Count from here."""
        self._seen = self._connection.total_changes
