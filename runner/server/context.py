"""What every handler needs, and how answers are made."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from aiohttp import web
from aiohttp.web_exceptions import HTTPRequestEntityTooLarge

from runner.clock import Clock
from runner.config import Server
from runner.errors import RunnerError
from runner.ids import valid_id
from runner.metrics import Metrics
from runner.server.auth import Gate
from runner.session.port import Caller, Reply, Sessions
from runner.tasks import Tasks
from runner.wire import problems
from runner.wire.codec import to_json

T = TypeVar("T")
BODY_SECONDS: Final = 60.0
MAX_LIMIT: Final = 1000
DEFAULT_LIMIT: Final = 200
CAPACITY_RETRY_SECONDS: Final = 1
SAFE_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Server": "acp-runner",
}
_JSON_HEADERS: Final = {**SAFE_HEADERS, "Content-Type": "application/json"}
_PROBLEM_HEADERS: Final = {**SAFE_HEADERS, "Content-Type": problems.CONTENT_TYPE}


@dataclass(slots=True)
class Context:
    """The server's parts, shared by its handlers."""

    sessions: Sessions
    server: Server
    gate: Gate
    clock: Clock
    metrics: Metrics
    tasks: Tasks = field(default_factory=lambda: Tasks("server"))
    streams: set[asyncio.Task[Any]] = field(default_factory=set)
    closing: bool = False
    description: bytes | None = None


CONTEXT: Final = web.AppKey("context", Context)
CALLER: Final = web.RequestKey("caller", Caller)


def json_answer(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """``body`` as JSON."""
    return web.Response(body=to_json(body), status=status, headers={**_JSON_HEADERS, **(headers or {})})


def reply_answer(reply: Reply) -> web.Response:
    """The sessions' own status and body."""
    return json_answer(reply.body, reply.status)


def problem_answer(
    error: RunnerError, status: int | None = None, headers: Mapping[str, str] | None = None
) -> web.Response:
    """``error`` as a problem document; ``status`` overrides the code's own."""
    own = {**_PROBLEM_HEADERS, **(headers or {})}
    after = problems.retry_after(error)
    if after is not None:
        own["Retry-After"] = after
    if error.code == "unauthorized":
        own["WWW-Authenticate"] = "Bearer"
    return web.Response(body=problems.problem_bytes(error), status=status or error.status, headers=own)


async def read_body(request: web.Request) -> bytes:
    """The request's body, bounded in size and time.

    Raises:
        RunnerError: ``too_large`` (413), or ``invalid_request`` when it does not arrive whole within 60 s.
    """
    bound = request.app[CONTEXT].server.max_body_bytes
    if (request.content_length or 0) > bound:
        raise _too_large(bound)
    try:
        if request.content.is_eof():
            return await request.read()
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except HTTPRequestEntityTooLarge:
        raise _too_large(bound) from None
    except TimeoutError:
        message = f"The body did not arrive within {BODY_SECONDS:.0f} s."
        raise RunnerError("invalid_request", message, field="body") from None
    except web.RequestPayloadError:
        raise RunnerError("invalid_request", "The body is not encoded as its headers say.", field="body") from None


async def no_body(request: web.Request) -> None:
    """Nothing, or an empty object.

    Raises:
        RunnerError: ``invalid_request``.
    """
    if (await read_body(request)).strip() not in (b"", b"{}"):
        raise RunnerError("invalid_request", "This request takes no body.", field="body")


def check_capacity(request: web.Request) -> None:
    """Refuse another turn before its body is read (DESIGN 3.1.9).

    Raises:
        RunnerError: ``runner_at_capacity``.
    """
    context = request.app[CONTEXT]
    if not context.sessions.has_capacity():
        message = f"This server already runs as many turns as it may ({context.server.max_turns}); try again shortly."
        raise RunnerError("runner_at_capacity", message, retry_after=CAPACITY_RETRY_SECONDS)


def _too_large(bound: int) -> RunnerError:
    return RunnerError("too_large", f"The body is larger than {bound} bytes ([server] max_body_bytes).")


def path_id(request: web.Request, name: str) -> str:
    """A validated id of the path.

    Raises:
        RunnerError: ``invalid_request`` naming it.
    """
    text = request.match_info[name]
    if not valid_id(text):
        raise RunnerError("invalid_request", f"{name}: must match [A-Za-z0-9_-]{{1,128}}.", field=name)
    return text


def query(request: web.Request, *known: str) -> dict[str, str]:
    """The query's parameters, each at most once.

    Raises:
        RunnerError: ``invalid_request`` naming an unknown or repeated one.
    """
    found: dict[str, str] = {}
    for name, value in request.query.items():
        shown = name[:100]
        if name not in known:
            raise RunnerError("invalid_request", f"{shown}: unknown query parameter.", field=shown)
        if name in found:
            raise RunnerError("invalid_request", f"{shown}: given more than once.", field=shown)
        found[name] = value
    return found


def limit_of(parameters: Mapping[str, str]) -> int:
    """``limit`` of a list: 1 to 1000, 200 when left out."""
    text = parameters.get("limit")
    if text is None:
        return DEFAULT_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= MAX_LIMIT):
        raise RunnerError("invalid_request", f"limit: must be a whole number from 1 to {MAX_LIMIT}.", field="limit")
    return int(text)


async def unhurried(request: web.Request, name: str, work: Coroutine[Any, Any, T]) -> T:
    """Run a command to its end even when the client goes away meanwhile (case H8).

    Raises:
        RunnerError: what the command was refused with; it is an answer, not a failure of the task.
    """
    done = await asyncio.shield(request.app[CONTEXT].tasks.spawn(name, _settled(work)))
    if isinstance(done, RunnerError):
        raise done
    return done


async def _settled(work: Coroutine[Any, Any, T]) -> T | RunnerError:
    try:
        return await work
    except RunnerError as error:
        return error
