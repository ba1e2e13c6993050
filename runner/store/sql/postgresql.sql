-- name: feed
SELECT project, xid, seq, session_id, turn_id, type, epoch, n, data, at
FROM feed
WHERE project = ?1 AND (xid, seq) > (?2, ?3) AND xid < pg_snapshot_xmin(pg_current_snapshot())::text::bigint
ORDER BY xid, seq LIMIT ?4;

-- name: feed_span
SELECT COALESCE((SELECT xid FROM feed_floors WHERE project = ?1), 0),
       COALESCE((SELECT seq FROM feed_floors WHERE project = ?1), 0),
       pg_snapshot_xmin(pg_current_snapshot())::text::bigint - 1,
       9223372036854775807;

-- name: settle_feed
UPDATE feed SET xid = 0 WHERE xid >= pg_snapshot_xmax(pg_current_snapshot())::text::bigint;

-- name: settle_feed_floors
UPDATE feed_floors SET xid = 0 WHERE xid >= pg_snapshot_xmax(pg_current_snapshot())::text::bigint;

-- name: record_place
SELECT session_id, epoch, n FROM records WHERE project = ?1 AND record_id = ?2 FOR UPDATE SKIP LOCKED;

-- name: aside_exists
SELECT 1 FROM quarantine WHERE project = ?1 AND record_id = ?2 FOR UPDATE SKIP LOCKED;

-- name: expired_feed
SELECT project, xid, seq
FROM feed WHERE at < ?2 AND (CAST(?1 AS TEXT) IS NULL OR project = ?1)
ORDER BY at, xid, seq LIMIT ?3 FOR UPDATE SKIP LOCKED;
