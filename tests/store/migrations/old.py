"""Databases of earlier schema versions with something in each of their tables."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any, Final

from runner.store.migrations.chain import steps

ROWS: Final = {
    1: """
        INSERT INTO sessions VALUES ('p', 's', 1000, 1500, NULL, 1, 1, '{"a":1}', '{}', '{}');
        INSERT INTO turns (project, session_id, turn_id, epoch, replica_id, prompt_id, started_at)
        VALUES ('p', 's', 't1', 1, 'r1', 'p1', 1000);
        INSERT INTO prompts (project, session_id, prompt_id, digest, state, turn_id, created_at, content)
        VALUES ('p', 's', 'p1', 'd1', 'active', 't1', 1000, '[]');
        INSERT INTO interactions (project, session_id, interaction_id, turn_id, status, kind, created_at, expires_at,
                                  request)
        VALUES ('p', 's', 'i1', 't1', 'pending', 'permission', 1000, 9000, '{}');
        INSERT INTO records VALUES ('p', 's', 'rec1', 't1', 'p1', 1, 1, 'message', '{}', 1001);
    """,
    2: """
        INSERT INTO commands (project, session_id, command_id, kind, state, arrived_at, arguments, deliveries)
        VALUES ('p', 's', 'c1', 'cancel', 'pending', 1000, '{}', 0);
        INSERT INTO command_keys VALUES ('p', 's', 'k1', 'c1');
        INSERT INTO quarantine (project, session_id, record_id, epoch, n, type, data, at, reason, aside_at)
        VALUES ('p', 's', 'rec9', 1, 9, 'message', '{}', 1009, 'late', 2000);
    """,
    3: """
        INSERT INTO prompts (project, session_id, prompt_id, digest, state, created_at, content, kind, seq, options)
        VALUES ('p', 's', 'p2', 'd2', 'queued', 1002, '[]', 'prompt', 7, '{"b":2}');
    """,
    4: """
        INSERT INTO pruned VALUES ('p', 's', 1, 1);
    """,
    5: """
        INSERT INTO feed (project, session_id, type, epoch, n, data, at)
        VALUES ('p', 's', 'session_idle', 1, 1, '{}', 1003);
        INSERT INTO feed_floors VALUES ('p', 0, 0);
    """,
}
"""What the code of a version could have written, by the version that made room for it."""


def up_to(version: int) -> list[str]:
    """The rows that a database of this version may have."""
    return [row.strip() for made, rows in ROWS.items() if made <= version for row in rows.split(";\n") if row.strip()]


def old_file(path: Path, version: int, *, rows: bool = True) -> sqlite3.Connection:
    """A store's file of a schema version, its id ``store_old``."""
    connection = sqlite3.connect(path, isolation_level=None)
    for step in steps("sqlite", 0, version, "{}_old".format):
        for statement in step.statements:
            connection.execute(statement)
    for row in up_to(version) if rows else ():
        connection.execute(row)
    return connection


def squeezed(text: Any) -> Any:
    """SQL without what its layout says."""
    return " ".join(text.replace("(", " ( ").replace(")", " ) ").split()) if isinstance(text, str) else text
