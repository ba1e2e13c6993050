"""What SQLite's errors mean; the border where they become ours."""

from __future__ import annotations

import sqlite3

from runner.errors import RunnerError


def translated(error: Exception) -> RunnerError:
    """A database that cannot be used is ``store_unavailable``; a row that it refuses is a fault of ours."""
    refusals = (sqlite3.IntegrityError, sqlite3.DataError, sqlite3.ProgrammingError, sqlite3.InterfaceError)
    if isinstance(error, sqlite3.Error) and not isinstance(error, refusals):
        return RunnerError("store_unavailable", f"The store cannot be used: {error}.")
    return RunnerError("internal", f"The store refused a row: {type(error).__name__}: {error}.")


def is_busy(error: BaseException) -> bool:
    """Whether another connection holds a lock that is needed: it passes."""
    return isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
