-- name: insert_turn
INSERT INTO turns (project, session_id, turn_id, epoch, replica_id, prompt_id, started_at, resumes, outcome,
                   stop_reason, ended_at, result)
SELECT CAST(?1 AS TEXT), CAST(?2 AS TEXT), CAST(?3 AS TEXT), CAST(?4 AS BIGINT), CAST(?5 AS TEXT), CAST(?6 AS TEXT),
       CAST(?7 AS BIGINT), CAST(?8 AS TEXT), CAST(?9 AS TEXT), CAST(?10 AS TEXT), CAST(?11 AS BIGINT), CAST(?12 AS TEXT)
WHERE NOT EXISTS (SELECT 1 FROM turns WHERE project = ?1 AND session_id = ?2 AND epoch > ?4)
  AND NOT EXISTS (SELECT 1 FROM sessions WHERE project = ?1 AND session_id = ?2
                  AND (head_epoch > ?4 OR ended_at IS NOT NULL))
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
    ended_at = excluded.ended_at,
    head_epoch = excluded.head_epoch,
    head_n = excluded.head_n,
    config = excluded.config,
    agent_state = excluded.agent_state,
    usage = excluded.usage
WHERE sessions.ended_at IS NULL AND (excluded.head_epoch, excluded.head_n) >= (sessions.head_epoch, sessions.head_n);

-- name: create_session
INSERT INTO sessions (project, session_id, created_at, updated_at, ended_at, head_epoch, head_n, config, agent_state,
                      usage)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)
ON CONFLICT DO NOTHING;

-- name: move_head
UPDATE sessions SET head_epoch = ?3, head_n = ?4
WHERE project = ?1 AND session_id = ?2 AND (head_epoch, head_n) < (?3, ?4);

-- name: save_prompt
INSERT INTO prompts (project, session_id, prompt_id, digest, state, turn_id, created_at, content, result, kind, seq,
                     options)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)
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

-- name: set_aside
INSERT INTO quarantine (project, session_id, record_id, turn_id, prompt_id, epoch, n, type, data, at, reason, aside_at)
SELECT CAST(?1 AS TEXT), CAST(?2 AS TEXT), CAST(?3 AS TEXT), CAST(?4 AS TEXT), CAST(?5 AS TEXT), CAST(?6 AS BIGINT),
       CAST(?7 AS BIGINT), CAST(?8 AS TEXT), CAST(?9 AS BLOB), CAST(?10 AS BIGINT), CAST(?11 AS TEXT),
       CAST(?12 AS BIGINT)
WHERE NOT EXISTS (SELECT 1 FROM records WHERE project = ?1 AND record_id = ?3)
  AND NOT EXISTS (
    SELECT 1 FROM sessions
    WHERE project = ?1 AND session_id = ?2 AND ended_at IS NOT NULL
      AND NOT EXISTS (SELECT 1 FROM turns WHERE project = ?1 AND session_id = ?2)
  )
ON CONFLICT DO NOTHING;

-- name: insert_command
INSERT INTO commands (project, session_id, command_id, kind, state, turn_id, arrived_at, idempotency_key, arguments,
                      outcome, claimed_by, claimed_until, deliveries, finished_at)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14);

-- name: insert_command_key
INSERT INTO command_keys (project, session_id, idempotency_key, command_id)
VALUES (?1, ?2, ?3, ?4)
ON CONFLICT DO NOTHING;

-- name: claim_command
UPDATE commands SET state = 'claimed', claimed_by = ?3, claimed_until = ?5, deliveries = deliveries + 1
WHERE project = ?1 AND command_id = ?2 AND deliveries < ?6
  AND (state = 'pending' OR (state = 'claimed' AND claimed_until <= ?4));

-- name: settle_command
UPDATE commands SET state = ?3, outcome = ?4, finished_at = ?5
WHERE project = ?1 AND command_id = ?2
  AND (state IN ('pending', 'claimed') OR (?6 AND state = 'applied' AND finished_at IS NULL));

-- name: end_command
UPDATE commands SET state = ?3, outcome = ?4, finished_at = ?5, turn_id = COALESCE(turn_id, ?6)
WHERE project = ?1 AND command_id = ?2 AND finished_at IS NULL;

-- name: drop_commands
DELETE FROM commands
WHERE project = ?1 AND session_id = ?2 AND finished_at IS NOT NULL AND seq <= (
    SELECT seq FROM commands WHERE project = ?1 AND session_id = ?2 AND finished_at IS NOT NULL
    ORDER BY seq DESC LIMIT 1 OFFSET ?3
);

-- name: drop_command_keys
DELETE FROM command_keys
WHERE project = ?1 AND session_id = ?2
  AND command_id NOT IN (SELECT command_id FROM commands WHERE project = ?1 AND session_id = ?2);

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

-- name: delete_commands
DELETE FROM commands WHERE project = ?1 AND session_id = ?2;

-- name: delete_command_keys
DELETE FROM command_keys WHERE project = ?1 AND session_id = ?2;

-- name: delete_quarantine
DELETE FROM quarantine WHERE project = ?1 AND session_id = ?2;

-- name: delete_feed
DELETE FROM feed WHERE project = ?1 AND session_id = ?2 AND type <> 'session_ended';

-- name: delete_feed_item
DELETE FROM feed WHERE project = ?1 AND xid = ?2 AND seq = ?3;

-- name: raise_feed_floor
INSERT INTO feed_floors (project, xid, seq) VALUES (?1, ?2, ?3)
ON CONFLICT (project) DO UPDATE SET xid = excluded.xid, seq = excluded.seq
WHERE (excluded.xid, excluded.seq) > (feed_floors.xid, feed_floors.seq);

-- name: expired_feed
SELECT project, xid, seq
FROM feed WHERE at < ?2 AND (CAST(?1 AS TEXT) IS NULL OR project = ?1)
ORDER BY at, xid, seq LIMIT ?3;

-- name: feed
SELECT project, xid, seq, session_id, turn_id, type, epoch, n, data, at
FROM feed WHERE project = ?1 AND (xid, seq) > (?2, ?3)
ORDER BY xid, seq LIMIT ?4;

-- name: feed_span
SELECT COALESCE((SELECT xid FROM feed_floors WHERE project = ?1), 0),
       COALESCE((SELECT seq FROM feed_floors WHERE project = ?1), 0),
       0,
       COALESCE((SELECT seq FROM sqlite_sequence WHERE name = 'feed'), 0);

-- name: delete_pruned
DELETE FROM pruned WHERE project = ?1 AND session_id = ?2;

-- part: of_expired_records
FROM records AS old
WHERE at < ?2 AND (CAST(?1 AS TEXT) IS NULL OR project = ?1)
  AND NOT EXISTS (
    SELECT 1 FROM turns
    WHERE turns.project = old.project AND turns.turn_id = old.turn_id AND (outcome IS NULL OR ended_at >= ?2)
  )
  AND NOT EXISTS (
    SELECT 1 FROM prompts
    WHERE prompts.project = old.project AND prompts.session_id = old.session_id AND prompts.prompt_id = old.prompt_id
      AND state IN ('queued', 'active')
  )
  AND (turn_id IS NOT NULL OR prompt_id IS NOT NULL OR NOT EXISTS (
    SELECT 1 FROM turns
    WHERE turns.project = old.project AND turns.session_id = old.session_id AND outcome IS NULL
  ) AND NOT EXISTS (
    SELECT 1 FROM prompts
    WHERE prompts.project = old.project AND prompts.session_id = old.session_id AND state IN ('queued', 'active')
  ))

-- name: expired_records
SELECT project, record_id
:of_expired_records
ORDER BY at, project, record_id LIMIT ?3;

-- name: count_expired_records
SELECT project || '', COUNT(*)
:of_expired_records
GROUP BY project || '';

-- name: record_place
SELECT session_id, epoch, n FROM records WHERE project = ?1 AND record_id = ?2;

-- name: delete_record
DELETE FROM records WHERE project = ?1 AND record_id = ?2;

-- name: mark_pruned
INSERT INTO pruned (project, session_id, epoch, n)
VALUES (?1, ?2, ?3, ?4)
ON CONFLICT (project, session_id) DO UPDATE SET epoch = excluded.epoch, n = excluded.n
WHERE (excluded.epoch, excluded.n) > (pruned.epoch, pruned.n);

-- name: unstorable
SELECT epoch, n FROM quarantine
WHERE project = ?1 AND session_id = ?2 AND reason IN ('refused', 'undeliverable')
ORDER BY epoch, n LIMIT ?3;

-- name: pruned_to
SELECT epoch, n FROM pruned WHERE project = ?1 AND session_id = ?2;

-- name: expired_quarantine
SELECT project, record_id FROM quarantine
WHERE aside_at < ?2 AND (CAST(?1 AS TEXT) IS NULL OR project = ?1)
ORDER BY aside_at, seq LIMIT ?3;

-- name: count_expired_quarantine
SELECT project || '', COUNT(*) FROM quarantine
WHERE aside_at < ?2 AND (CAST(?1 AS TEXT) IS NULL OR project = ?1)
GROUP BY project || '';

-- name: aside_exists
SELECT 1 FROM quarantine WHERE project = ?1 AND record_id = ?2;

-- name: delete_aside
DELETE FROM quarantine WHERE project = ?1 AND record_id = ?2;

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
SELECT project, session_id, prompt_id, digest, state, turn_id, created_at, content, result, kind, seq, options
FROM prompts WHERE project = ?1 AND session_id = ?2 AND prompt_id = ?3;

-- name: waiting_prompts
SELECT project, session_id, prompt_id, digest, state, turn_id, created_at, content, result, kind, seq, options
FROM prompts WHERE state = 'queued' ORDER BY seq, prompt_id;

-- name: waiting_prompts_of
SELECT project, session_id, prompt_id, digest, state, turn_id, created_at, content, result, kind, seq, options
FROM prompts WHERE project = ?1 AND session_id = ?2 AND state = 'queued' ORDER BY seq, prompt_id;

-- name: context_prompts
SELECT project, session_id, prompt_id, digest, state, turn_id, created_at, content, result, kind, seq, options
FROM prompts WHERE project = ?1 AND session_id = ?2 AND kind <> 'prompt' ORDER BY seq DESC, prompt_id DESC LIMIT ?3;

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

-- name: session_open_turns
SELECT project, session_id, turn_id, epoch, replica_id, prompt_id, started_at, resumes, outcome, stop_reason, ended_at,
       result
FROM turns WHERE project = ?1 AND session_id = ?2 AND outcome IS NULL
ORDER BY started_at, epoch;

-- name: paused_turns
SELECT project, session_id, turn_id, epoch, replica_id, prompt_id, started_at, resumes, outcome, stop_reason, ended_at,
       result
FROM turns AS paused
WHERE outcome = 'paused'
  AND NOT EXISTS (
    SELECT 1 FROM turns
    WHERE project = paused.project AND session_id = paused.session_id AND epoch > paused.epoch
  )
  AND EXISTS (
    SELECT 1 FROM sessions
    WHERE project = paused.project AND session_id = paused.session_id AND ended_at IS NULL
  )
ORDER BY started_at, project, session_id, epoch;

-- name: ended_turns
SELECT ended_at, project, turn_id, session_id,
       EXISTS (
         SELECT 1 FROM records WHERE project = ended.project AND turn_id = ended.turn_id AND type = 'done'
       ) OR EXISTS (
         SELECT 1 FROM pruned
         WHERE project = ended.project AND session_id = ended.session_id AND epoch >= ended.epoch
       )
FROM turns AS ended
WHERE ended_at IS NOT NULL AND outcome IS NOT NULL AND (ended_at, project, turn_id) > (?2, ?3, ?4)
  AND (CAST(?1 AS TEXT) IS NULL OR project = ?1)
ORDER BY ended_at, project, turn_id LIMIT ?5;

-- name: turn_told
SELECT 1 FROM records WHERE project = ?1 AND turn_id = ?2 AND type = 'done'
UNION ALL
SELECT 1 FROM turns JOIN pruned ON pruned.project = turns.project AND pruned.session_id = turns.session_id
WHERE turns.project = ?1 AND turns.turn_id = ?2 AND pruned.epoch >= turns.epoch
LIMIT 1;

-- name: standing
SELECT (SELECT MAX(epoch) FROM turns WHERE project = ?1 AND session_id = ?2),
       (SELECT head_epoch FROM sessions WHERE project = ?1 AND session_id = ?2),
       (SELECT epoch FROM turns WHERE project = ?1 AND session_id = ?2 AND turn_id = ?3),
       (SELECT outcome FROM turns WHERE project = ?1 AND session_id = ?2 AND turn_id = ?3),
       (SELECT ended_at FROM sessions WHERE project = ?1 AND session_id = ?2);

-- name: record_exists
SELECT 1 FROM records WHERE project = ?1 AND record_id = ?2;

-- name: quarantined
SELECT seq, project, session_id, record_id, turn_id, prompt_id, epoch, n, type, data, at, reason, aside_at
FROM quarantine WHERE project = ?1 AND seq > ?2
ORDER BY seq LIMIT ?3;

-- name: command
SELECT project, session_id, command_id, kind, state, turn_id, arrived_at, idempotency_key, arguments, outcome,
       claimed_by, claimed_until, deliveries, finished_at
FROM commands WHERE project = ?1 AND command_id = ?2;

-- name: command_of_key
SELECT project, session_id, command_id, kind, state, turn_id, arrived_at, idempotency_key, arguments, outcome,
       claimed_by, claimed_until, deliveries, finished_at
FROM commands WHERE project = ?1 AND command_id = (
    SELECT command_id FROM command_keys WHERE project = ?1 AND session_id = ?2 AND idempotency_key = ?3
);

-- name: same_command
SELECT project, session_id, command_id, kind, state, turn_id, arrived_at, idempotency_key, arguments, outcome,
       claimed_by, claimed_until, deliveries, finished_at
FROM commands
WHERE project = ?1 AND session_id = ?2 AND kind = ?3 AND COALESCE(turn_id, '') = COALESCE(?4, '')
  AND state IN ('pending', 'claimed');

-- name: open_commands
SELECT project, session_id, command_id, kind, state, turn_id, arrived_at, idempotency_key, arguments, outcome,
       claimed_by, claimed_until, deliveries, finished_at
FROM commands WHERE finished_at IS NULL ORDER BY arrived_at, seq;

-- name: session_open_commands
SELECT project, session_id, command_id, kind, state, turn_id, arrived_at, idempotency_key, arguments, outcome,
       claimed_by, claimed_until, deliveries, finished_at
FROM commands WHERE project = ?1 AND session_id = ?2 AND finished_at IS NULL ORDER BY arrived_at, seq;
-- name: records
SELECT project, session_id, record_id, turn_id, prompt_id, epoch, n, type, data, at
FROM records WHERE project = ?1 AND session_id = ?2 AND (epoch, n) > (?3, ?4)
ORDER BY epoch, n LIMIT ?5;

-- name: interaction
SELECT project, session_id, interaction_id, turn_id, status, kind, created_at, expires_at, request, answer
FROM interactions WHERE project = ?1 AND interaction_id = ?2;

-- name: interactions
SELECT project, session_id, interaction_id, turn_id, status, kind, created_at, expires_at, request, answer
FROM interactions WHERE project = ?1 AND (CAST(?2 AS TEXT) IS NULL OR status = ?2)
ORDER BY created_at DESC, seq DESC LIMIT ?3;

-- name: session_interactions
SELECT project, session_id, interaction_id, turn_id, status, kind, created_at, expires_at, request, answer
FROM interactions WHERE project = ?1 AND session_id = ?4 AND (CAST(?2 AS TEXT) IS NULL OR status = ?2)
ORDER BY created_at DESC, seq DESC LIMIT ?3;

-- name: open_interactions
SELECT project, session_id, interaction_id, turn_id, status, kind, created_at, expires_at, request, answer
FROM interactions WHERE status = ?1 ORDER BY created_at, seq;
