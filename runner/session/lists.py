"""Lists of a project: sessions, questions, what was set aside, of this replica's memory and of the store (DESIGN 4)."""

from __future__ import annotations

from typing import Any, Final

from runner.clock import rfc3339
from runner.errors import RunnerError
from runner.ids import valid_id
from runner.interactions import desk
from runner.rules.interaction import open_for
from runner.session import views
from runner.session.history import record_view
from runner.session.reconcile import WAITING
from runner.session.registry import Registry
from runner.session.services import Services
from runner.store.port import Store
from runner.terms import InteractionStatus

CURSOR_DIGITS: Final = 18


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
            paused = last is not None and last.outcome in WAITING
            asked = await store.interactions(row.project, row.session_id, "pending") if paused else []
            items.append(views.stored_view(row, last, asked, services.pool))
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


async def quarantine(store: Store, project: str, limit: int, cursor: str | None) -> dict[str, Any]:
    """See ``session.port.Sessions.quarantine``; a cursor is the number of the last one seen."""
    if cursor is not None and not (cursor.isascii() and cursor.isdigit() and len(cursor) <= CURSOR_DIGITS):
        raise RunnerError("invalid_request", "cursor: not one that this list gave out.", field="cursor")
    found = await store.quarantined(project, limit + 1, int(cursor or 0))
    items = [
        {**record_view(row.record), "reason": row.reason, "set_aside_at": rfc3339(row.at)} for _, row in found[:limit]
    ]
    return {"items": items, "next_cursor": str(found[limit - 1][0]) if len(found) > limit else None}


def _page_cursor(cursor: str | None) -> tuple[int, str] | None:
    if cursor is None:
        return None
    stamp, _, session_id = cursor.partition("~")
    if not stamp.isdigit() or len(stamp) > 16 or not valid_id(session_id):
        raise RunnerError("invalid_request", "cursor: not one that this list gave out.", field="cursor")
    return int(stamp), session_id
