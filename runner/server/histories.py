"""A session's history as a whole: ``GET …/export`` and ``POST …/fork`` (DESIGN 4)."""

from __future__ import annotations

from aiohttp import web

from runner.server.context import CALLER, CONTEXT, json_answer, path_id, query, read_body, unhurried
from runner.server.events import streamed
from runner.wire.models import parse_fork


async def get_export(request: web.Request) -> web.StreamResponse:
    """JSON lines, whatever ``Accept`` says; one that fails on its way is cut, and lacks its last line."""
    query(request)
    session_id = path_id(request, "session_id")
    reader = await request.app[CONTEXT].sessions.export(request[CALLER], session_id)
    return await streamed(request, reader, "ndjson", follow=False)


async def post_fork(request: web.Request) -> web.Response:
    """The fork is made whole, even when the client goes away meanwhile; ``Location`` is the new session."""
    session_id = path_id(request, "session_id")
    fork = parse_fork(await read_body(request))
    sessions = request.app[CONTEXT].sessions
    reply = await unhurried(request, "fork", sessions.fork(request[CALLER], session_id, fork))
    return json_answer(reply.body, reply.status, {"Location": f"/v1/sessions/{reply.body['session_id']}"})
