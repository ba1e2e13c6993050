"""A new session with another one's history up to a cursor (DESIGN 4, ``fork``)."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from runner.errors import RunnerError
from runner.ids import Cursor, format_cursor, outside_of, parse_cursor, record_id
from runner.rules import fork as rules
from runner.rules.history import Missing, Wholeness
from runner.rules.pool import Key
from runner.session.history import pages
from runner.session.port import Reply
from runner.session.services import Services
from runner.session.session import Session
from runner.store.port import RecordRow, SessionRow
from runner.terms import EventType
from runner.wire.codec import to_json
from runner.wire.models import ForkRequest

log = logging.getLogger("runner.session")
MAX_RECORDS: Final = 100_000
MAX_BYTES: Final = 256 * 1024 * 1024
COPIED: Final = "copied"
SHARED: Final = "shared"
EMPTY: Final = "empty"
_WHY: Final = {
    Missing.BEGIN: "its begin was deleted because of its age",
    Missing.RECORDS: "records in between are missing",
    Missing.ENDING: "a turn lacks its begin or its ending",
}


@dataclass(slots=True)
class _Taken:
    """The records that go over, as the fork has them."""

    to: Key
    source: str
    records: list[RecordRow] = field(default_factory=list)
    size: int = 0
    cut: rules.Cut = field(default_factory=rules.Cut)
    seen: Wholeness = field(default_factory=Wholeness)

    def take(self, row: RecordRow) -> None:
        """Cursors and instants stay, and so do the ids of turns and prompts; the record is the fork's own."""
        data = orjson.loads(row.data)
        self.seen.see(row.epoch, row.n, row.turn_id, row.type)
        self.cut.see(row.turn_id, row.prompt_id, row.type, data)
        if data.get("session_id") == self.source and row.type == EventType.INTERACTION_REQUESTED:
            row = row._replace(data=to_json({**data, "session_id": self.to[1]}))
        name = record_id(self.to[1], outside_of(row.epoch), row.n)
        self.records.append(row._replace(session_id=self.to[1], record_id=name))
        self.size += len(row.data)
        if len(self.records) > MAX_RECORDS or self.size > MAX_BYTES:
            text = f"The history has more than {MAX_RECORDS} records or {MAX_BYTES} bytes: too much for a fork."
            raise RunnerError("too_large", text)

    def close(self, after: Cursor, at: int, notice: dict[str, Any]) -> Cursor:
        """Close what is open at the cut, behind it, and say where all that is from; the fork's head."""
        epoch, n = after
        for closed in (*self.cut.closing(), rules.Closed(None, None, EventType.NOTICE, notice)):
            n += 1
            name, data = record_id(self.to[1], outside_of(epoch), n), to_json(closed.data)
            row = RecordRow(*self.to, name, closed.turn_id, closed.prompt_id, epoch, n, closed.type, data, at)
            self.records.append(row)
        return epoch, n


async def fork(services: Services, session: Session, request: ForkRequest) -> Reply:
    """See ``session.port.Sessions.fork``: the history goes over, with what it leaves open closed at the cut.

    The configuration is the session's own as it is now. The agent of the fork begins cold and is told of the history.
    """
    after = parse_cursor(request.after)
    newest = session.head.cursor
    if after is None or after > newest:
        text = f"after: is above the session's newest cursor, {format_cursor(*newest)}."
        raise RunnerError("invalid_request", text, field="after")
    to = (session.project, request.session_id or services.ids.mint("session"))
    if request.session_id is not None and (known := await services.store.session(*to)) is not None:
        return _again(known, session, request)
    taken, missing = await _history(services, session, to, after, request)
    workspace, reason = await _workspace(services, session, to[1])
    now_ms = services.clock.now_ms()
    head = taken.close(after, now_ms, rules.notice(session.session_id, request.after, workspace, reason))
    made: dict[str, Any] = {
        "session_id": to[1],
        "forked_from": session.session_id,
        "after": request.after,
        "head": format_cursor(*head),
        "records": len(taken.records),
        "complete": not missing,
        "workspace": workspace,
        **({"reason": reason} if reason else {}),
    }
    state = {"has_context": taken.cut.open.context, "unanswered": taken.cut.unanswered, "fork": made}
    config = rules.config_of(session.effective.config)
    row = SessionRow(to[0], to[1], now_ms, now_ms, None, head[0], head[1], config, state)
    if await services.store.create_session(row, taken.records):
        return Reply(201, made)
    known = await services.store.session(*to)
    if known is None:
        raise RunnerError("internal", "The fork was not stored.")
    return _again(known, session, request)


def _again(known: SessionRow, session: Session, request: ForkRequest) -> Reply:
    """The session that has the fork's id: made by this request before, or another one."""
    if known.ended_at is not None:
        raise RunnerError("session_ended", f"Session {known.session_id} has ended.")
    made = rules.origin_of(known.agent_state)
    if made is not None and (made["forked_from"], made["after"]) == (session.session_id, request.after):
        return Reply(200, dict(made))
    text = f"session_id: there is another session {known.session_id}."
    raise RunnerError("invalid_request", text, field="session_id")


async def _history(
    services: Services, session: Session, to: Key, after: Cursor, request: ForkRequest
) -> tuple[_Taken, list[Missing]]:
    """What goes over, and what that lacks."""
    store, taken = services.store, _Taken(to, session.session_id)
    await session.hand_over()
    taken.seen.pruned_to = await store.pruned_to(*session.key)
    async for rows in pages(store, session.key, None):
        due = [row for row in rows if row.cursor <= after]
        for row in due:
            taken.take(row)
        if len(due) < len(rows):
            break
    taken.seen.pruned_to = await store.pruned_to(*session.key) or taken.seen.pruned_to
    taken.seen.lost(await store.unstorable(*session.key), after)
    stored = await store.session(*session.key)
    if stored is None or stored.ended_at is not None:
        raise RunnerError("session_ended", f"Session {session.session_id} has ended.")
    # The turn in which the history is cut needs no ending: it gets one there.
    missing = taken.seen.missing(list(taken.seen.going)[-1:])
    if rules.lacks_begin(session.agent_state) and not missing:
        missing = [Missing.BEGIN]
    if missing and not request.allow_incomplete:
        why = ", ".join(_WHY[item] for item in missing)
        text = f"The history up to {request.after} is not whole: {why}. With allow_incomplete what is left is forked."
        raise RunnerError("invalid_request", text, field="allow_incomplete")
    if not taken.records:
        raise RunnerError("invalid_request", f"after: there is nothing up to {request.after}.", field="after")
    return taken, missing


async def _workspace(services: Services, session: Session, to: str) -> tuple[str, str | None]:
    """What the fork finds in its workspace, and why that is nothing: the files as they are now, not as they were."""
    effective = session.effective
    if effective.workspace_path is not None:
        return SHARED, None
    provider = services.provisioner.providers.get(effective.provider)
    if provider is None:
        return EMPTY, "no_provider"
    try:
        found = await provider.copy_workspace(session.place(effective.provider), (session.project, to))
    except RunnerError as error:
        log.warning("the workspace of %s was not copied into %s: %s", session.session_id, to, error)
        return EMPTY, error.code
    return (found, None) if found == COPIED else (EMPTY, found)
