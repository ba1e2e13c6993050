"""What PostgreSQL's errors mean, by their SQLSTATE."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

from runner.errors import RunnerError
from runner.store.postgres.faults import gave_way, is_lost, translated


def said(sqlstate: str) -> asyncpg.PostgresError:
    error = asyncpg.PostgresError.new({"C": sqlstate, "M": "whatever it says", "S": "ERROR"})
    assert isinstance(error, asyncpg.PostgresError)
    return error


@pytest.mark.parametrize(
    ("sqlstate", "code", "lost", "again"),
    [
        ("08006", "store_unavailable", True, False),
        ("0A000", "store_unavailable", False, True),
        ("22001", "internal", False, False),
        ("22021", "internal", False, False),
        ("23505", "internal", False, False),
        ("25006", "store_unavailable", True, False),
        ("25P03", "store_unavailable", True, False),
        ("28P01", "store_unavailable", False, False),
        ("3D000", "store_unavailable", False, False),
        ("40001", "store_unavailable", False, True),
        ("40P01", "store_unavailable", False, True),
        ("42P01", "store_unavailable", False, False),
        ("53100", "store_unavailable", False, False),
        ("53300", "store_unavailable", False, False),
        ("54000", "internal", False, False),
        ("55P03", "store_unavailable", False, False),
        ("57014", "store_unavailable", False, False),
        ("57P01", "store_unavailable", True, False),
        ("57P03", "store_unavailable", True, False),
        ("58030", "store_unavailable", False, False),
        ("P0001", "internal", False, False),
        ("XX000", "store_unavailable", False, False),
    ],
)
def test_what_the_server_says(sqlstate: str, code: str, lost: bool, again: bool):
    error = asyncpg.InvalidCachedStatementError("plan") if sqlstate == "0A000" else said(sqlstate)
    assert (translated(error).code, is_lost(error), gave_way(error)) == (code, lost, again)


@pytest.mark.parametrize(
    ("error", "code", "lost"),
    [
        (ConnectionRefusedError(111, "refused"), "store_unavailable", True),
        (TimeoutError(), "store_unavailable", True),
        (asyncpg.InterfaceError("connection is closed"), "store_unavailable", True),
        (asyncpg.InternalClientError("wrong state"), "store_unavailable", True),
        (asyncpg.exceptions._base.DataError("invalid input for query argument $9"), "internal", False),
        (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogate"), "internal", False),
        (OverflowError("too large"), "internal", False),
        (RunnerError("store_unavailable", "another store"), "store_unavailable", False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_what_comes_on_this_side(error: Any, code: str, lost: bool):
    assert (translated(error).code, is_lost(error)) == (code, lost)
    assert not gave_way(error)
