"""Health, readiness, the pool, a session's story and the API description."""

from __future__ import annotations

from aiohttp import web

from runner import __version__
from runner.server.context import CALLER, CONTEXT, SAFE_HEADERS, json_answer, path_id, query


async def get_health(request: web.Request) -> web.Response:
    """Open: status and version; with a known token everything."""
    context = request.app[CONTEXT]
    health = context.sessions.health()
    if context.gate.caller(request.headers.get("Authorization")) is None:
        health = {"status": health.get("status", "ok"), "version": health.get("version", __version__)}
    return json_answer(health)


async def get_ready(request: web.Request) -> web.Response:
    """Open: 200 when turns can be dispatched here, else 503; with a known token the reasons."""
    context = request.app[CONTEXT]
    ready = await context.sessions.ready()
    status = 200 if ready.get("ready") else 503
    if context.gate.caller(request.headers.get("Authorization")) is None:
        ready = {"ready": bool(ready.get("ready")), "version": __version__}
    return json_answer(ready, status)


async def get_pool(request: web.Request) -> web.Response:
    """Seats, spares and verdicts; needs the scope ``operate``."""
    query(request)
    return json_answer(request.app[CONTEXT].sessions.pool(request[CALLER]))


async def get_story(request: web.Request) -> web.Response:
    """``GET /v1/sessions/{session_id}/story``: the machines' recent moves."""
    query(request)
    session_id = path_id(request, "session_id")
    return json_answer(await request.app[CONTEXT].sessions.story(request[CALLER], session_id))


async def get_openapi(request: web.Request) -> web.Response:
    """OpenAPI 3.1, made from the route table and the wire models at its first use."""
    from runner.server.coordination import COORDINATION, COORDINATION_ROUTES
    from runner.server.openapi import describe
    from runner.server.routes import ROUTES

    context = request.app[CONTEXT]
    if context.description is None:
        context.description = describe((*ROUTES, *COORDINATION_ROUTES) if COORDINATION in request.app else ROUTES)
    return web.Response(body=context.description, headers={**SAFE_HEADERS, "Content-Type": "application/json"})
