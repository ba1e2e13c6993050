"""The write-ahead log of one SQLite file: copied back behind the writers, so that it can start over."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from typing import Final, NamedTuple

log = logging.getLogger("runner.store")

COPY_BACK_CHANGES: Final = 5000
LONG_FRAMES: Final = 8192
RESTART_MS: Final = 50


class Checkpoint(NamedTuple):
    """What one copying back came to: ``busy`` when somebody was in its way, and then counts may be -1."""

    busy: bool
    frames: int
    copied: int


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

    @property
    def long(self) -> bool:
        """Whether a writer should copy the rest."""
        return self._frames > LONG_FRAMES

    def call_for_rest(self) -> None:
        """A writer should copy the rest, however long the log is."""
        self._frames = LONG_FRAMES + 1

    def copy_back(self) -> None:
        """Begin to copy it back, in the thread."""
        self._run(self._copy)

    def _copy(self, connection: sqlite3.Connection) -> None:
        done = checkpoint(connection)
        if done.frames >= 0:
            self._frames = done.frames

    def copy_rest(self, connection: sqlite3.Connection) -> None:
        """Copy what is left, by a writer that writes nothing meanwhile; never raises.

        Other processes do go on writing: a log that grew long all the same holds them up once, for a moment. A rest
        that somebody else is copying just now is looked at again behind the next group.
        """
        try:
            done = checkpoint(connection)
            if done.frames > LONG_FRAMES and done.copied < done.frames:
                done = _restart(connection)
            self._frames = 0 if 0 <= done.frames <= done.copied else LONG_FRAMES + 1
        except sqlite3.Error:
            self._frames = 0
            log.exception("copying the log back failed")


def _restart(connection: sqlite3.Connection) -> Checkpoint:
    (patience,) = connection.execute("PRAGMA busy_timeout").fetchone()
    connection.execute(f"PRAGMA busy_timeout = {RESTART_MS}").fetchall()
    try:
        return checkpoint(connection, "RESTART")
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
