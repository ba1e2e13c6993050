"""What PostgreSQL's and asyncpg's errors mean; the border where they become ours, by class and SQLSTATE."""

from __future__ import annotations

from typing import Final

import asyncpg

from runner.errors import RunnerError

REFUSED: Final = ("22", "23", "54", "P0")
"""SQLSTATE classes of a row's own fault: its data, a constraint, a limit, a trigger that says no."""

BROKEN: Final = ("08", "57P", "25006", "25P03")
"""SQLSTATEs by their beginning of a connection that is of no use any more; also of a primary that is none now."""

AGAIN: Final = ("40001", "40P01")
"""SQLSTATEs of a transaction that gave way to another one: nothing of it was written."""


def translated(error: Exception, where: str = "") -> RunnerError:
    """A database that cannot be used is ``store_unavailable``; a row that it refuses is a fault of ours.

    ``where``: the database for people. Neither asyncpg's nor PostgreSQL's messages hold the password.
    """
    if isinstance(error, RunnerError):
        return error
    if is_refusal(error):
        return RunnerError("internal", f"The store refused a row: {type(error).__name__}: {error}.")
    said = str(error) or type(error).__name__
    named = f"The store {where}" if where else "The store"
    return RunnerError("store_unavailable", f"{named} cannot be used: {said.removesuffix('.')}.")


def is_refusal(error: BaseException) -> bool:
    """Whether the rows are at fault, at the server or already on their way there."""
    if isinstance(error, asyncpg.PostgresError):
        return str(error.sqlstate or "").startswith(REFUSED)
    return isinstance(error, TypeError | ValueError | OverflowError) and not isinstance(
        error, asyncpg.exceptions.ClientConfigurationError
    )


def gave_way(error: BaseException) -> bool:
    """Whether the same again may well work, for nothing of it was written and nothing is wrong with it."""
    if isinstance(error, asyncpg.InvalidCachedStatementError | asyncpg.exceptions.OutdatedSchemaCacheError):
        return True
    return isinstance(error, asyncpg.PostgresError) and error.sqlstate in AGAIN


def is_lost(error: BaseException) -> bool:
    """Whether the connection broke, was found broken, or leads to the wrong server."""
    if isinstance(error, asyncpg.PostgresError):
        return str(error.sqlstate or "").startswith(BROKEN)
    broken = asyncpg.InterfaceError | asyncpg.InternalClientError | OSError
    return isinstance(error, broken) and not is_refusal(error)
