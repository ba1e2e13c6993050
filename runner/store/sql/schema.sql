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
CREATE INDEX turns_open ON turns (project, session_id) WHERE outcome IS NULL;
CREATE INDEX turns_paused ON turns (project, session_id, epoch) WHERE outcome = 'paused';
CREATE INDEX turns_ended ON turns (ended_at, project, turn_id) WHERE ended_at IS NOT NULL;

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
    kind TEXT NOT NULL DEFAULT 'prompt',
    seq INTEGER NOT NULL DEFAULT 0,
    options TEXT NOT NULL DEFAULT '{}',
    PRIMARY KEY (project, session_id, prompt_id)
);
CREATE INDEX prompts_waiting ON prompts (project, session_id, seq) WHERE state = 'queued';
CREATE INDEX prompts_context ON prompts (project, session_id, seq) WHERE kind <> 'prompt';

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
CREATE INDEX interactions_status ON interactions (status, created_at);

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
CREATE INDEX records_at ON records (at);
CREATE INDEX records_done ON records (project, turn_id) WHERE type = 'done';

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
CREATE INDEX quarantine_at ON quarantine (aside_at);

CREATE TABLE pruned (
    project TEXT NOT NULL,
    session_id TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    n INTEGER NOT NULL,
    PRIMARY KEY (project, session_id)
) WITHOUT ROWID;

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
