"""The prompt queue: what kind a prompt is, its place, and the options it came with."""

from __future__ import annotations

from runner.store.migrations.revising import run

revision = "0003"
down_revision: str | None = "0002"
branch_labels = None
depends_on = None

FORTH = """
ALTER TABLE prompts ADD COLUMN kind TEXT NOT NULL DEFAULT 'prompt';
ALTER TABLE prompts ADD COLUMN seq INTEGER NOT NULL DEFAULT 0;
ALTER TABLE prompts ADD COLUMN options TEXT NOT NULL DEFAULT '{}';
CREATE INDEX prompts_waiting ON prompts (project, session_id, seq) WHERE state = 'queued';
CREATE INDEX prompts_context ON prompts (project, session_id, seq) WHERE kind <> 'prompt';
"""
BACK = """
DROP INDEX prompts_context;
DROP INDEX prompts_waiting;
ALTER TABLE prompts DROP COLUMN options;
ALTER TABLE prompts DROP COLUMN seq;
ALTER TABLE prompts DROP COLUMN kind;
"""
LOSES = (
    ("prompts that wait", "SELECT 1 FROM prompts WHERE state = 'queued' LIMIT 1"),
    ("context that waits", "SELECT 1 FROM prompts WHERE kind <> 'prompt' LIMIT 1"),
)


def upgrade() -> None:
    """Add the columns and their indexes."""
    run(FORTH)


def downgrade() -> None:
    """Drop them: what waits is a prompt like others then."""
    run(BACK)
