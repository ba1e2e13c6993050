"""Sessions, turns, prompts, interactions and records."""

from __future__ import annotations

from runner.store.migrations.revising import run

revision = "0001"
down_revision: str | None = None
branch_labels = None
depends_on = None

FORTH = """
CREATE TABLE meta (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;

CREATE TABLE sessions (
    project TEXT NOT NULL,
    session_id TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    ended_at INTEGER,
    head_epoch INTEGER NOT NULL,
    head_n INTEGER NOT NULL,
    config TEXT NOT NULL,
    agent_state TEXT NOT NULL,
    usage TEXT NOT NULL,
    PRIMARY KEY (project, session_id)
);
CREATE INDEX sessions_newest ON sessions (project, updated_at, session_id);

CREATE TABLE turns (
    project TEXT NOT NULL,
    session_id TEXT NOT NULL,
    turn_id TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    replica_id TEXT NOT NULL,
    prompt_id TEXT,
    started_at INTEGER NOT NULL,
    resumes TEXT,
    outcome TEXT,
    stop_reason TEXT,
    ended_at INTEGER,
    result TEXT,
    PRIMARY KEY (project, session_id, epoch)
);
CREATE UNIQUE INDEX turns_id ON turns (project, turn_id);
CREATE INDEX turns_open ON turns (project) WHERE outcome IS NULL;

CREATE TABLE prompts (
    project TEXT NOT NULL,
    session_id TEXT NOT NULL,
    prompt_id TEXT NOT NULL,
    digest TEXT NOT NULL,
    state TEXT NOT NULL,
    turn_id TEXT,
    created_at INTEGER NOT NULL,
    content TEXT NOT NULL,
    result TEXT,
    PRIMARY KEY (project, session_id, prompt_id)
);

CREATE TABLE interactions (
    seq INTEGER PRIMARY KEY,
    project TEXT NOT NULL,
    session_id TEXT NOT NULL,
    interaction_id TEXT NOT NULL,
    turn_id TEXT NOT NULL,
    status TEXT NOT NULL,
    kind TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    request TEXT NOT NULL,
    answer TEXT,
    UNIQUE (project, interaction_id)
);
CREATE INDEX interactions_created ON interactions (project, session_id, created_at);

CREATE TABLE records (
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
    PRIMARY KEY (project, session_id, epoch, n)
);
CREATE UNIQUE INDEX records_id ON records (project, record_id);
"""
BACK = """
DROP TABLE records;
DROP TABLE interactions;
DROP TABLE prompts;
DROP TABLE turns;
DROP TABLE sessions;
DROP TABLE meta;
"""
LOSES = (
    ("everything", "SELECT 1 FROM sessions LIMIT 1"),
    ("every turn", "SELECT 1 FROM turns LIMIT 1"),
)


def upgrade() -> None:
    """Create the first tables."""
    run(FORTH)


def downgrade() -> None:
    """Leave an empty database."""
    run(BACK)
