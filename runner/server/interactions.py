"""Questions to humans: the inbox, a session's questions, and their answers (DESIGN 3.8)."""

from __future__ import annotations

from aiohttp import web

from runner.errors import RunnerError
from runner.server.context import CALLER, CONTEXT, json_answer, path_id, query, read_body, reply_answer, unhurried
from runner.terms import InteractionStatus
from runner.wire.models import parse_answer


async def list_inbox(request: web.Request) -> web.Response:
    """``GET /v1/interactions?status=``: of every session of the project."""
    status = _status(query(request, "status").get("status"))
    return json_answer(await request.app[CONTEXT].sessions.interactions(request[CALLER], None, status))


async def list_of_session(request: web.Request) -> web.Response:
    """``GET /v1/sessions/{session_id}/interactions?status=``."""
    status = _status(query(request, "status").get("status"))
    session_id = path_id(request, "session_id")
    return json_answer(await request.app[CONTEXT].sessions.interactions(request[CALLER], session_id, status))


async def post_answer(request: web.Request) -> web.Response:
    """``POST /v1/sessions/{session_id}/interactions/{interaction_id}/answer``."""
    session_id = path_id(request, "session_id")
    interaction_id = path_id(request, "interaction_id")
    answer = parse_answer(await read_body(request))
    work = request.app[CONTEXT].sessions.answer(request[CALLER], session_id, interaction_id, answer)
    return reply_answer(await unhurried(request, "answer", work))


def _status(text: str | None) -> str | None:
    if text is not None and text not in set(InteractionStatus):
        names = ", ".join(InteractionStatus)
        raise RunnerError("invalid_request", f"status: must be one of {names}.", field="status")
    return text
