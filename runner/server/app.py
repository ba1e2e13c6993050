"""The application: routes, the one middleware at its border, and how it is served and closed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from runner.clock import Clock, SystemClock
from runner.config import Settings
from runner.errors import RunnerError
from runner.metrics import PROBLEMS, STREAMS_OPEN, Metrics, Sample
from runner.server.auth import AccessToken, Gate
from runner.server.context import CALLER, CONTEXT, Context, problem_answer
from runner.server.coordination import COORDINATION_ROUTES
from runner.server.forward import Forwarder, Place
from runner.server.listening import Listener, most_connections
from runner.server.relay import RELAY, Followed, Relay
from runner.server.routes import ANY, OPEN, ROUTES, Handler
from runner.server.upstream import Peers, Whereabouts
from runner.session.port import Sessions

log = logging.getLogger("runner.server")

KEEPALIVE_SECONDS: Final = 75.0
Application = web.Application
SCOPE_OF: Final = {route.handler: route.scope for route in (*ROUTES, *COORDINATION_ROUTES)}


def build_app(
    sessions: Sessions,
    settings: Settings,
    tokens: Iterable[AccessToken],
    *,
    bind_host: str | None = None,
    clock: Clock | None = None,
    owners: Whereabouts | None = None,
    place: Place | None = None,
    mirrors: Followed | None = None,
    metrics: Metrics | None = None,
) -> web.Application:
    """The HTTP application over ``sessions``.

    Args:
        sessions: what performs; every call carries the caller's project.
        settings: ``[server]`` is read here.
        tokens: who may call; at least one.
        bind_host: where it will listen, when that is not ``[server] host``.
        clock: for instants of lines that the server itself makes.
        owners: who holds which session when there are other replicas; None: this one holds all.
        place: in a gateway, which itself runs nothing: who gets what nobody holds.
        mirrors: followers over a live bus; None: over HTTP.
        metrics: what ``GET /metrics`` shows besides the server's own.
    """
    server = settings.server
    host = server.host if bind_host is None else bind_host
    gate = Gate(tokens, bind_host=host, allowed_hosts=[*server.allowed_hosts, *_advertised(server.advertise_url)])
    app = web.Application(client_max_size=server.max_body_bytes)
    app.middlewares.append(border)
    if owners is not None and owners.shared:
        peers = Peers(owners)
        app.middlewares.append(Forwarder(owners, peers, place).middleware)
        app[RELAY] = Relay(owners, peers, sessions, mirrors)
        app.on_cleanup.append(lambda _: peers.close())
    app[CONTEXT] = Context(sessions, settings.server, gate, clock or SystemClock(), metrics or Metrics())
    app[CONTEXT].metrics.read_by(lambda: [Sample(STREAMS_OPEN, len(app[CONTEXT].streams))])
    for route in ROUTES:
        app.router.add_route(route.method, route.pattern, route.handler, expect_handler=expect)
    app.on_shutdown.append(_end_streams)
    app.on_cleanup.append(_end_commands)
    return app


def _advertised(url: str | None) -> list[str]:
    """The host under which other replicas reach this one."""
    return [host] if url and (host := urlsplit(url).hostname) else []


async def expect(request: web.Request) -> web.Response | None:
    """Ask for the body of a request that waits to be asked; one whose sender has left is not begun (``upstream``)."""
    if request.headers.get("Expect", "").lower() != "100-continue":
        return problem_answer(
            RunnerError("invalid_request", "Expect: only 100-continue is known.", field="Expect"), 417
        )
    if request.transport is None or request.transport.is_closing():
        return problem_answer(RunnerError("invalid_request", "The client has left."))
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0
    return None


@web.middleware
async def border(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let a request in, and turn whatever goes wrong before the first line into a problem document."""
    try:
        scope = SCOPE_OF.get(request.match_info.handler, ANY)
        if scope != OPEN:
            gate = request.app[CONTEXT].gate
            request[CALLER] = gate.admit(request.headers, None if scope == ANY else scope)
        return await handler(request)
    except RunnerError as error:
        if error.status >= 500 and error.code == "internal":
            log.error("%s %s failed: %s", request.method, request.path, error)
        return _problem(request, error)
    except web.HTTPException as error:
        return _http_problem(request, error)
    except Exception:
        if request.transport is not None:
            log.exception("%s %s failed", request.method, request.path)
        failed = RunnerError("internal", "The server failed to handle this request; its log says why.")
        return _problem(request, failed)


def _problem(
    request: web.Request, error: RunnerError, status: int | None = None, headers: Mapping[str, str] | None = None
) -> web.Response:
    request.app[CONTEXT].metrics.add(PROBLEMS, error.code)
    return problem_answer(error, status, headers)


def _http_problem(request: web.Request, error: web.HTTPException) -> web.Response:
    if error.status == 404:
        return _problem(request, RunnerError("not_found", f"There is no route {request.path[:200]}."))
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        detail = RunnerError("invalid_request", f"{request.method} is not allowed here, but {allowed}.")
        return _problem(request, detail, 405, {"Allow": allowed})
    code = "too_large" if error.status == 413 else "invalid_request" if error.status < 500 else "internal"
    return _problem(request, RunnerError(code, error.reason or "The request was refused."), error.status)


async def _end_streams(app: web.Application) -> None:
    context = app[CONTEXT]
    context.closing = True
    for task in list(context.streams):
        task.cancel()


async def _end_commands(app: web.Application) -> None:
    await app[CONTEXT].tasks.close()


async def start_site(
    app: web.Application, host: str, port: int, *, close_seconds: float = 5.0, share: int = 2
) -> tuple[web.AppRunner, str]:
    """Serve ``app``; returns the runner and the URL under which this machine reaches it.

    A client that goes away cancels its handler: the reader it held is detached at once.

    Args:
        app: of ``build_app``.
        host: to bind.
        port: 0 lets the system choose.
        close_seconds: how long ``stop_site`` waits for requests that are being answered.
        share: one in so many of the descriptors of this process are for its connections.

    Raises:
        OSError: the address cannot be bound; nothing is left behind.
    """
    runner = Listener(
        app,
        most_connections(share),
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=KEEPALIVE_SECONDS,
        shutdown_timeout=close_seconds,
    )
    try:
        await runner.setup()
        # So many are taken before the first of them is looked at.
        backlog = min(1024, most_connections(4 * share))
        await web.TCPSite(runner, host, port, backlog=backlog).start()
    except BaseException:
        with suppress(Exception):
            await runner.cleanup()
        raise
    return runner, site_url(host, runner.addresses[0][1])


async def stop_site(runner: web.AppRunner) -> None:
    """Stop listening, end open streams, wait for answers in progress, close connections."""
    await runner.cleanup()


def site_url(host: str, port: int) -> str:
    """``http://…`` under which this machine reaches a bind host."""
    reachable = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
