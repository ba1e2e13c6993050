"""The prompts of a session: what waits, abort of one; and the turns that no prompt owns: resume and shell."""

from __future__ import annotations

from aiohttp import web

from runner.server.context import (
    CALLER,
    CONTEXT,
    check_capacity,
    json_answer,
    no_body,
    path_id,
    query,
    read_body,
    unhurried,
)
from runner.wire.models import parse_shell


async def list_prompts(request: web.Request) -> web.Response:
    """``GET …/prompts``: what waits, in the order in which it will run."""
    query(request)
    session_id = path_id(request, "session_id")
    return json_answer(await request.app[CONTEXT].sessions.prompts(request[CALLER], session_id))


async def abort_prompt(request: web.Request) -> web.Response:
    """``POST …/prompts/{prompt_id}/abort``: ``{"aborted": bool}`` at once; never behind the turn (DESIGN 3.1.9)."""
    session_id, prompt_id = path_id(request, "session_id"), path_id(request, "prompt_id")
    await no_body(request)
    work = request.app[CONTEXT].sessions.abort_prompt(request[CALLER], session_id, prompt_id)
    return json_answer({"aborted": await unhurried(request, "abort", work)})


async def post_resume(request: web.Request) -> web.Response:
    """``POST …/resume``: the turn that goes on, null when nothing is unanswered."""
    check_capacity(request)
    session_id = path_id(request, "session_id")
    await no_body(request)
    work = request.app[CONTEXT].sessions.resume(request[CALLER], session_id)
    return json_answer({"turn_id": await unhurried(request, "resume", work)})


async def post_shell(request: web.Request) -> web.Response:
    """``POST …/shell``: waits for the command's end; a client that goes away ends nothing."""
    check_capacity(request)
    session_id = path_id(request, "session_id")
    command = parse_shell(await read_body(request))
    return json_answer(await request.app[CONTEXT].sessions.shell(request[CALLER], session_id, command))
