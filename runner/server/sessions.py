"""Sessions: list, view, records, and the commands cancel, kill and delete."""

from __future__ import annotations

from aiohttp import web

from runner.errors import RunnerError
from runner.ids import parse_cursor
from runner.server.context import (
    CALLER,
    CONTEXT,
    json_answer,
    limit_of,
    no_body,
    path_id,
    query,
    read_body,
    reply_answer,
    unhurried,
)
from runner.wire.models import parse_cancel

MAX_PAGE_CURSOR = 1024


async def list_sessions(request: web.Request) -> web.Response:
    """``GET /v1/sessions?limit=&cursor=``."""
    parameters = query(request, "limit", "cursor")
    cursor = parameters.get("cursor")
    if cursor is not None and not 1 <= len(cursor) <= MAX_PAGE_CURSOR:
        raise RunnerError("invalid_request", "cursor: is not a next_cursor of this list.", field="cursor")
    sessions = request.app[CONTEXT].sessions
    return json_answer(await sessions.sessions(request[CALLER], limit_of(parameters), cursor))


async def view_session(request: web.Request) -> web.Response:
    """``GET /v1/sessions/{session_id}``."""
    query(request)
    session_id = path_id(request, "session_id")
    return json_answer(await request.app[CONTEXT].sessions.view(request[CALLER], session_id))


async def list_records(request: web.Request) -> web.Response:
    """``GET /v1/sessions/{session_id}/records?after=&limit=``."""
    parameters = query(request, "after", "limit")
    session_id = path_id(request, "session_id")
    after = cursor_of(parameters.get("after"), "after")
    sessions = request.app[CONTEXT].sessions
    return json_answer(await sessions.records(request[CALLER], session_id, after, limit_of(parameters)))


def cursor_of(text: str | None, field: str) -> str | None:
    """A cursor ``<epoch>.<n>``; None when left out or empty.

    Raises:
        RunnerError: ``invalid_request`` when it is not one.
    """
    if not text:
        return None
    if parse_cursor(text) is None:
        raise RunnerError("invalid_request", f"{field}: must be a cursor like 3.17.", field=field)
    return text


async def cancel_session(request: web.Request) -> web.Response:
    """``POST /v1/sessions/{session_id}/cancel``: Stop (DESIGN 3.3). A slow body makes it arrive no later."""
    session_id = path_id(request, "session_id")
    arrived_at = request.app[CONTEXT].clock.monotonic()
    command = parse_cancel(await read_body(request))
    work = request.app[CONTEXT].sessions.cancel(request[CALLER], session_id, command, arrived_at=arrived_at)
    return reply_answer(await unhurried(request, "cancel", work))


async def kill_session(request: web.Request) -> web.Response:
    """``POST /v1/sessions/{session_id}/kill``: the seat goes, session and workspace stay."""
    session_id = path_id(request, "session_id")
    await no_body(request)
    sessions = request.app[CONTEXT].sessions
    return reply_answer(await unhurried(request, "kill", sessions.kill(request[CALLER], session_id)))


async def view_command(request: web.Request) -> web.Response:
    """``GET /v1/commands/{command_id}``."""
    query(request)
    command_id = path_id(request, "command_id")
    return json_answer(await request.app[CONTEXT].sessions.command(request[CALLER], command_id))


async def delete_session(request: web.Request) -> web.Response:
    """``DELETE /v1/sessions/{session_id}``: kill and end."""
    session_id = path_id(request, "session_id")
    await no_body(request)
    sessions = request.app[CONTEXT].sessions
    return reply_answer(await unhurried(request, "delete", sessions.delete(request[CALLER], session_id)))
