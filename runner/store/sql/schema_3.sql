ALTER TABLE prompts ADD COLUMN kind TEXT NOT NULL DEFAULT 'prompt';
ALTER TABLE prompts ADD COLUMN seq INTEGER NOT NULL DEFAULT 0;
ALTER TABLE prompts ADD COLUMN options TEXT NOT NULL DEFAULT '{}';
CREATE INDEX prompts_waiting ON prompts (project, session_id, seq) WHERE state = 'queued';
CREATE INDEX prompts_context ON prompts (project, session_id, seq) WHERE kind <> 'prompt';
