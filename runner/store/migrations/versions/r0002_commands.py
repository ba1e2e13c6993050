"""Commands and the quarantine; turns that are open are found by their session."""

from __future__ import annotations

from runner.store.migrations.revising import run

revision = "0002"
down_revision: str | None = "0001"
branch_labels = None
depends_on = None

FORTH = """
DROP INDEX turns_open;
CREATE INDEX turns_open ON turns (project, session_id) WHERE outcome IS NULL;
CREATE INDEX turns_paused ON turns (project, session_id, epoch) WHERE outcome = 'paused';
CREATE INDEX interactions_status ON interactions (status, created_at);

CREATE TABLE commands (
    seq INTEGER PRIMARY KEY,
    project TEXT NOT NULL,
    session_id TEXT NOT NULL,
    command_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    state TEXT NOT NULL,
    turn_id TEXT,
    arrived_at INTEGER NOT NULL,
    idempotency_key TEXT,
    arguments TEXT NOT NULL,
    outcome TEXT,
    claimed_by TEXT,
    claimed_until INTEGER,
    deliveries INTEGER NOT NULL,
    finished_at INTEGER,
    UNIQUE (project, command_id)
);
CREATE UNIQUE INDEX commands_open ON commands (project, session_id, kind, COALESCE(turn_id, ''))
WHERE state IN ('pending', 'claimed');
CREATE INDEX commands_unfinished ON commands (project, session_id) WHERE finished_at IS NULL;
CREATE INDEX commands_session ON commands (project, session_id, seq);

CREATE TABLE command_keys (
    project TEXT NOT NULL,
    session_id TEXT NOT NULL,
    idempotency_key TEXT NOT NULL,
    command_id TEXT NOT NULL,
    PRIMARY KEY (project, session_id, idempotency_key)
) WITHOUT ROWID;

CREATE TABLE quarantine (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    project TEXT NOT NULL,
    session_id TEXT NOT NULL,
    record_id TEXT NOT NULL,
    turn_id TEXT,
    prompt_id TEXT,
    epoch INTEGER NOT NULL,
    n INTEGER NOT NULL,
    type TEXT NOT NULL,
    data BLOB NOT NULL,
    at INTEGER NOT NULL,
    reason TEXT NOT NULL,
    aside_at INTEGER NOT NULL,
    UNIQUE (project, record_id)
);
CREATE INDEX quarantine_order ON quarantine (project, seq);
CREATE INDEX quarantine_session ON quarantine (project, session_id);
"""
BACK = """
DROP TABLE quarantine;
DROP TABLE command_keys;
DROP TABLE commands;
DROP INDEX interactions_status;
DROP INDEX turns_paused;
DROP INDEX turns_open;
CREATE INDEX turns_open ON turns (project) WHERE outcome IS NULL;
"""
LOSES = (
    ("commands", "SELECT 1 FROM commands LIMIT 1"),
    ("quarantined records", "SELECT 1 FROM quarantine LIMIT 1"),
)


def upgrade() -> None:
    """Add commands, their keys, and the quarantine."""
    run(FORTH)


def downgrade() -> None:
    """Drop them, and what is in them."""
    run(BACK)
