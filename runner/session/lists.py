"""Lists of a project: its sessions and its questions, of this replica's memory and of the store (DESIGN 4)."""

from __future__ import annotations

from typing import Any

from runner.errors import RunnerError
from runner.ids import valid_id
from runner.interactions import desk
from runner.rules.interaction import open_for
from runner.session import views
from runner.session.registry import Registry
from runner.session.services import Services
from runner.terms import InteractionStatus, Outcome


async def sessions(
    services: Services, registry: Registry, project: str, limit: int, cursor: str | None
) -> dict[str, Any]:
    """See ``session.port.Sessions.sessions``."""
    store, clock = services.store, services.clock
    before = _page_cursor(cursor)
    rows = await store.sessions(project, limit + 1, before)
    items = []
    for row in rows[:limit]:
        session = registry.known((row.project, row.session_id))
        if session is not None and session.ended_at is None:
            items.append(views.live_view(session, services.pool, clock.monotonic(), clock.now_ms()))
        else:
            last = await store.last_turn(row.project, row.session_id)
            paused = last is not None and last.outcome == Outcome.PAUSED
            asked = await store.interactions(row.project, row.session_id, "pending") if paused else []
            items.append(views.stored_view(row, last, asked))
    more = f"{rows[limit - 1].updated_at}~{rows[limit - 1].session_id}" if len(rows) > limit else None
    return {"items": items, "next_cursor": more}


async def interactions(
    services: Services, registry: Registry, project: str, session_id: str | None, status: str | None
) -> dict[str, Any]:
    """See ``session.port.Sessions.interactions``: pending ones are those that can still be answered."""
    for session in registry.all():
        if session.project == project and session.outbox.owes_questions:
            await session.outbox.flush()
    rows = await services.store.interactions(project, session_id, status)
    now_ms = services.clock.now_ms()
    if status == InteractionStatus.PENDING:
        rows = [row for row in rows if open_for(InteractionStatus(row.status), row.expires_at, now_ms)]
    return {"items": [desk.view(row) for row in rows], "next_cursor": None}


def _page_cursor(cursor: str | None) -> tuple[int, str] | None:
    if cursor is None:
        return None
    stamp, _, session_id = cursor.partition("~")
    if not stamp.isdigit() or len(stamp) > 16 or not valid_id(session_id):
        raise RunnerError("invalid_request", "cursor: not one that this list gave out.", field="cursor")
    return int(stamp), session_id
