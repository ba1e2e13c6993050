"""The project feed: what becomes of sessions, written by triggers in the transactions that cause it."""

from __future__ import annotations

from runner.store.migrations.revising import run

revision = "0005"
down_revision: str | None = "0004"
branch_labels = None
depends_on = None

FORTH = """
CREATE TABLE feed (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    xid INTEGER NOT NULL DEFAULT 0,
    project TEXT NOT NULL,
    session_id TEXT NOT NULL,
    turn_id TEXT,
    type TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    n INTEGER NOT NULL,
    data TEXT NOT NULL,
    at INTEGER NOT NULL
);
CREATE INDEX feed_order ON feed (project, xid, seq);
CREATE INDEX feed_at ON feed (at);
CREATE INDEX feed_session ON feed (project, session_id);

CREATE TABLE feed_floors (
    project TEXT PRIMARY KEY,
    xid INTEGER NOT NULL,
    seq INTEGER NOT NULL
) WITHOUT ROWID;

-- only: sqlite
CREATE TRIGGER feed_of_records AFTER INSERT ON records
WHEN NEW.type IN ('session_busy', 'session_idle', 'interaction_requested', 'interaction_closed')
BEGIN INSERT INTO feed (project, session_id, turn_id, type, epoch, n, data, at) VALUES
    (NEW.project, NEW.session_id, NEW.turn_id, NEW.type, NEW.epoch, NEW.n, CAST(NEW.data AS TEXT), NEW.at); END;

-- only: sqlite
CREATE TRIGGER feed_of_endings AFTER UPDATE OF ended_at ON sessions
WHEN OLD.ended_at IS NULL AND NEW.ended_at IS NOT NULL
BEGIN INSERT INTO feed (project, session_id, turn_id, type, epoch, n, data, at) VALUES
    (NEW.project, NEW.session_id, NULL, 'session_ended', NEW.head_epoch, NEW.head_n, '{}', NEW.ended_at); END;

-- only: sqlite
CREATE TRIGGER feed_of_ended_sessions AFTER INSERT ON sessions
WHEN NEW.ended_at IS NOT NULL
BEGIN INSERT INTO feed (project, session_id, turn_id, type, epoch, n, data, at) VALUES
    (NEW.project, NEW.session_id, NULL, 'session_ended', NEW.head_epoch, NEW.head_n, '{}', NEW.ended_at); END;

-- only: postgresql
ALTER TABLE feed ALTER COLUMN xid SET DEFAULT (pg_current_xact_id()::text::bigint);

-- only: postgresql
CREATE FUNCTION feed_record() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN INSERT INTO feed (project, session_id, turn_id, type, epoch, n, data, at) VALUES
    (NEW.project, NEW.session_id, NEW.turn_id, NEW.type, NEW.epoch, NEW.n, convert_from(NEW.data, 'UTF8'),
    NEW.at); RETURN NULL; END $$;

-- only: postgresql
CREATE FUNCTION feed_ending() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN INSERT INTO feed (project, session_id, turn_id, type, epoch, n, data, at) VALUES
    (NEW.project, NEW.session_id, NULL, 'session_ended', NEW.head_epoch, NEW.head_n, '{}',
    NEW.ended_at); RETURN NULL; END $$;

-- only: postgresql
CREATE TRIGGER feed_of_records AFTER INSERT ON records FOR EACH ROW
WHEN (NEW.type IN ('session_busy', 'session_idle', 'interaction_requested', 'interaction_closed'))
EXECUTE FUNCTION feed_record();

-- only: postgresql
CREATE TRIGGER feed_of_endings AFTER UPDATE OF ended_at ON sessions FOR EACH ROW
WHEN (OLD.ended_at IS NULL AND NEW.ended_at IS NOT NULL)
EXECUTE FUNCTION feed_ending();

-- only: postgresql
CREATE TRIGGER feed_of_ended_sessions AFTER INSERT ON sessions FOR EACH ROW
WHEN (NEW.ended_at IS NOT NULL)
EXECUTE FUNCTION feed_ending();
"""
BACK = """
DROP TABLE feed_floors;
-- only: sqlite
DROP TRIGGER feed_of_ended_sessions;
-- only: sqlite
DROP TRIGGER feed_of_endings;
-- only: sqlite
DROP TRIGGER feed_of_records;
-- only: postgresql
DROP TRIGGER feed_of_ended_sessions ON sessions;
-- only: postgresql
DROP TRIGGER feed_of_endings ON sessions;
-- only: postgresql
DROP TRIGGER feed_of_records ON records;
-- only: postgresql
DROP FUNCTION feed_ending();
-- only: postgresql
DROP FUNCTION feed_record();
DROP TABLE feed;
"""
LOSES = (("the project feed", "SELECT 1 FROM feed LIMIT 1"),)


def upgrade() -> None:
    """It begins here: what happened before is in the records of each session."""
    run(FORTH)


def downgrade() -> None:
    """Records and sessions stay as they are."""
    run(BACK)
