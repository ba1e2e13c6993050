"""What was set aside: records that came too late, or that no store could hold (DESIGN 3.9)."""

from __future__ import annotations

from aiohttp import web

from runner.server.context import CALLER, CONTEXT, json_answer, limit_of, query


async def list_quarantine(request: web.Request) -> web.Response:
    """``GET /v1/quarantine?limit=&cursor=``; needs the scope ``operate``."""
    parameters = query(request, "limit", "cursor")
    sessions = request.app[CONTEXT].sessions
    return json_answer(await sessions.quarantine(request[CALLER], limit_of(parameters), parameters.get("cursor")))
