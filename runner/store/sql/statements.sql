-- name: insert_turn
INSERT INTO turns (project, session_id, turn_id, epoch, replica_id, prompt_id, started_at, resumes, outcome,
                   stop_reason, ended_at, result)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)
ON CONFLICT DO NOTHING;

-- name: end_turn
UPDATE turns SET outcome = ?5, stop_reason = ?6, ended_at = ?7, result = ?8
WHERE project = ?1 AND session_id = ?2 AND epoch = ?3 AND turn_id = ?4 AND outcome IS NULL;

-- name: save_session
INSERT INTO sessions (project, session_id, created_at, updated_at, ended_at, head_epoch, head_n, config, agent_state,
                      usage)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)
ON CONFLICT (project, session_id) DO UPDATE SET
    updated_at = excluded.updated_at,
    ended_at = COALESCE(sessions.ended_at, excluded.ended_at),
    head_epoch = excluded.head_epoch,
    head_n = excluded.head_n,
    config = excluded.config,
    agent_state = excluded.agent_state,
    usage = excluded.usage;

-- name: save_prompt
INSERT INTO prompts (project, session_id, prompt_id, digest, state, turn_id, created_at, content, result)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)
ON CONFLICT (project, session_id, prompt_id) DO UPDATE SET
    state = excluded.state,
    turn_id = excluded.turn_id,
    result = excluded.result;

-- name: save_interaction
INSERT INTO interactions (project, session_id, interaction_id, turn_id, status, kind, created_at, expires_at, request,
                          answer)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)
ON CONFLICT (project, interaction_id) DO UPDATE SET
    turn_id = excluded.turn_id,
    status = excluded.status,
    expires_at = excluded.expires_at,
    request = excluded.request,
    answer = excluded.answer
WHERE interactions.status IN ('pending', 'answered');

-- name: answer_interaction
UPDATE interactions SET status = ?4, answer = ?5
WHERE project = ?1 AND interaction_id = ?2 AND status = ?3;

-- name: insert_record
INSERT INTO records (project, session_id, record_id, turn_id, prompt_id, epoch, n, type, data, at)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)
ON CONFLICT (project, record_id) DO NOTHING;

-- name: empty_ended_session
UPDATE sessions SET config = '{}', agent_state = '{}'
WHERE project = ?1 AND session_id = ?2 AND ended_at IS NOT NULL;

-- name: delete_turns
DELETE FROM turns WHERE project = ?1 AND session_id = ?2;

-- name: delete_prompts
DELETE FROM prompts WHERE project = ?1 AND session_id = ?2;

-- name: delete_interactions
DELETE FROM interactions WHERE project = ?1 AND session_id = ?2;

-- name: delete_records
DELETE FROM records WHERE project = ?1 AND session_id = ?2;

-- name: touch
UPDATE meta SET value = ?1 WHERE name = 'store_id';

-- name: session
SELECT project, session_id, created_at, updated_at, ended_at, head_epoch, head_n, config, agent_state, usage
FROM sessions WHERE project = ?1 AND session_id = ?2;

-- name: sessions
SELECT project, session_id, created_at, updated_at, ended_at, head_epoch, head_n, config, agent_state, usage
FROM sessions WHERE project = ?1
ORDER BY updated_at DESC, session_id DESC LIMIT ?2;

-- name: sessions_before
SELECT project, session_id, created_at, updated_at, ended_at, head_epoch, head_n, config, agent_state, usage
FROM sessions WHERE project = ?1 AND (updated_at, session_id) < (?3, ?4)
ORDER BY updated_at DESC, session_id DESC LIMIT ?2;

-- name: prompt
SELECT project, session_id, prompt_id, digest, state, turn_id, created_at, content, result
FROM prompts WHERE project = ?1 AND session_id = ?2 AND prompt_id = ?3;

-- name: turn
SELECT project, session_id, turn_id, epoch, replica_id, prompt_id, started_at, resumes, outcome, stop_reason, ended_at,
       result
FROM turns WHERE project = ?1 AND session_id = ?2 AND turn_id = ?3;

-- name: last_turn
SELECT project, session_id, turn_id, epoch, replica_id, prompt_id, started_at, resumes, outcome, stop_reason, ended_at,
       result
FROM turns WHERE project = ?1 AND session_id = ?2
ORDER BY epoch DESC LIMIT 1;

-- name: open_turns
SELECT project, session_id, turn_id, epoch, replica_id, prompt_id, started_at, resumes, outcome, stop_reason, ended_at,
       result
FROM turns WHERE outcome IS NULL
ORDER BY started_at, project, session_id, epoch;

-- name: records
SELECT project, session_id, record_id, turn_id, prompt_id, epoch, n, type, data, at
FROM records WHERE project = ?1 AND session_id = ?2 AND (epoch, n) > (?3, ?4)
ORDER BY epoch, n LIMIT ?5;

-- name: interaction
SELECT project, session_id, interaction_id, turn_id, status, kind, created_at, expires_at, request, answer
FROM interactions WHERE project = ?1 AND interaction_id = ?2;

-- name: interactions
SELECT project, session_id, interaction_id, turn_id, status, kind, created_at, expires_at, request, answer
FROM interactions WHERE project = ?1 AND (?2 IS NULL OR status = ?2)
ORDER BY created_at DESC, seq DESC LIMIT ?3;

-- name: session_interactions
SELECT project, session_id, interaction_id, turn_id, status, kind, created_at, expires_at, request, answer
FROM interactions WHERE project = ?1 AND session_id = ?4 AND (?2 IS NULL OR status = ?2)
ORDER BY created_at DESC, seq DESC LIMIT ?3;

-- name: open_interactions
SELECT project, session_id, interaction_id, turn_id, status, kind, created_at, expires_at, request, answer
FROM interactions WHERE status = ?1 ORDER BY created_at, seq;
