"""Retention: what is old is found by its instant, and how far a history is gone; endings that nothing tells of."""

from __future__ import annotations

from runner.store.migrations.revising import run

revision = "0004"
down_revision: str | None = "0003"
branch_labels = None
depends_on = None

LOSES = (("how far histories were deleted", "SELECT 1 FROM pruned LIMIT 1"),)


def upgrade() -> None:
    """Add the indexes and the marks."""
    run(
        """
        CREATE INDEX turns_ended ON turns (ended_at, project, turn_id) WHERE ended_at IS NOT NULL;
        CREATE INDEX records_at ON records (at);
        CREATE INDEX records_done ON records (project, turn_id) WHERE type = 'done';
        CREATE INDEX quarantine_at ON quarantine (aside_at);

        CREATE TABLE pruned (
            project TEXT NOT NULL,
            session_id TEXT NOT NULL,
            epoch INTEGER NOT NULL,
            n INTEGER NOT NULL,
            PRIMARY KEY (project, session_id)
        ) WITHOUT ROWID;
        """
    )


def downgrade() -> None:
    """Drop them: a history that begins later looks whole then."""
    run(
        """
        DROP TABLE pruned;
        DROP INDEX quarantine_at;
        DROP INDEX records_done;
        DROP INDEX records_at;
        DROP INDEX turns_ended;
        """
    )
