"""Migrates an SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from runner.errors import RunnerError
from runner.store.faults import is_busy
from runner.store.migrations.chain import Step, steps, would_lose
from runner.store.sqlite_file import BUSY_SECONDS, PAGE_BYTES, own, version_of


def perform(cursor: sqlite3.Cursor, planned: Sequence[Step], *, discard: bool = False) -> None:
    """Execute steps inside the caller's transaction.

    Raises:
        RunnerError: ``invalid_request``: a step would lose something and ``discard`` does not allow it.
    """
    for step in planned:
        for what, query in step.loses:
            if not discard and cursor.execute(query).fetchone() is not None:
                raise would_lose(step, what)
        for statement in step.statements:
            cursor.execute(statement)


def migrate(
    path: Path, target: int, mint: Callable[[str], str], *, discard: bool = False, dry: bool = False
) -> list[Step]:
    """Bring a file to a version, whole or not at all; the steps. ``dry``: only say them. Blocks; for a thread.

    Raises:
        RunnerError: ``store_unavailable``: the file cannot be used, is another program's, or somebody has it open;
            ``invalid_request``: no such version, or something would be lost.
    """
    if dry and not path.exists():
        return steps("sqlite", 0, target, mint)
    try:
        own(path)
        with (
            closing(sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)) as connection,
            closing(connection.cursor()) as cursor,
        ):
            if not dry:
                cursor.execute(f"PRAGMA page_size = {PAGE_BYTES}")
                # SQLite leaves this mode only while nobody else has the file open; the next runner takes it again.
                cursor.execute("PRAGMA journal_mode = DELETE").fetchall()
            cursor.execute("BEGIN IMMEDIATE")
            try:
                planned = steps("sqlite", version_of(cursor, str(path)), target, mint)
                if not dry:
                    perform(cursor, planned, discard=discard)
            except BaseException:
                cursor.execute("ROLLBACK")
                raise
            cursor.execute("COMMIT")
            return planned
    except (OSError, sqlite3.Error) as error:
        hint = " Stop the runners that use it first." if is_busy(error) else ""
        raise RunnerError("store_unavailable", f"The store {path} cannot be migrated: {error}.{hint}") from error
