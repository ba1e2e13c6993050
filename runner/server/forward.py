"""Any replica answers for any session: what another one holds is passed to it, once (DESIGN 3.1.10)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final

from aiohttp import ClientResponse, web

from runner.errors import RunnerError, owned_elsewhere
from runner.ids import valid_id
from runner.server.context import CALLER, CONTEXT, problem_answer, read_body
from runner.server.routes import ROUTES, Handler
from runner.server.streams import STALL_SECONDS
from runner.server.upstream import (
    FORWARDED,
    WATCH_SECONDS,
    Broken,
    Chunks,
    Peers,
    Unreached,
    Whereabouts,
    error_in,
    headers_down,
    headers_up,
    held_by,
    path_of,
    whole,
)
from runner.session.owners import Elsewhere

TRIES: Final = 4
MOVED_SECONDS: Final = 0.05
DEAF_ROUNDS: Final = 2
# Commands are rows of the shared store, and followers outlive a change of the owner (``relay``).
STAYS: Final = frozenset({"cancelTurn", "killSession"})
FOLLOWS: Final = "readEvents"
# What the shared store tells as well, but for the last moments of an owner that does not answer.
STORED: Final = frozenset({"readEvents", "listRecords", "exportSession"})
STORED_SECONDS: Final = 2.0
# They lie with a runner; a remote sandbox may have to be woken for them.
FILES: Final = frozenset({"listFiles", "readFile", "probeFile", "writeFile"})
FILES_SECONDS: Final = 60.0
_NAME_OF: Final = {route.handler: route.name for route in ROUTES}
MAYBE_TAKEN: Final = (
    "The replica that holds this session went away while it worked on this request, which it may have taken. "
    "Try again; a dispatch with the same prompt_id is never run twice."
)
ONCE: Final = "runShell"
MAYBE_RUN: Final = "The replica that holds this session went away while it worked on this command, which may have run."

Place = Callable[[str, str, Collection[str]], Awaitable[Elsewhere]]
"""Chooses a runner for a session that nobody holds: project, session id, replicas that failed already.

Raises ``RunnerError("plane_unavailable")`` when there is none."""


class Forwarder:
    """Passes requests of sessions that another replica holds to it; the rest is answered here.

    Args:
        owners: who holds what.
        peers: connections to the others.
        place: in a gateway, which itself runs nothing: who gets what nobody holds. None runs it here.
    """

    def __init__(self, owners: Whereabouts, peers: Peers, place: Place | None = None) -> None:
        self._owners = owners
        self._peers = peers
        self._place = place

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Inside ``border``: the caller is known, and a ``RunnerError`` becomes a problem document."""
        if not self._owners.shared or not _concerned(request):
            return await handler(request)
        session_id = request.match_info["session_id"]
        project = request[CALLER].project
        if FORWARDED in request.headers:
            owner = await self._owners.elsewhere(project, session_id)
            if owner is not None:
                raise held_by(owner, "Another replica holds this session by now. Try again.")
            if self._runs_nothing(request):
                # A plane holds a session only while it ends a dead owner's turn.
                raise owned_elsewhere("A plane runs no sessions itself. Try again.")
            return await handler(request)
        return await self._answer(request, handler, project, session_id)

    async def _answer(
        self, request: web.Request, handler: Handler, project: str, session_id: str
    ) -> web.StreamResponse:
        failed: dict[str, RunnerError | None] = {}
        for left in reversed(range(TRIES)):
            owner = await self._owners.elsewhere(project, session_id)
            target = owner or await self._placed(request, project, session_id, failed)
            try:
                if target is None:
                    return await handler(request)
                return await self._pass(request, target, project, session_id)
            except Unreached:
                assert target is not None
                if owner is None:
                    failed[target.replica_id] = None
                elif not await self._owners.gone(owner.replica_id):
                    if _is_stored(request):
                        return await handler(request)
                    raise held_by(owner) from None
            except RunnerError as error:
                # Whoever was asked did nothing: it is full, or the session has moved since it was looked for.
                if error.code == "runner_at_capacity" and owner is None and target is not None:
                    failed[target.replica_id] = error
                elif error.code != "owned_elsewhere" or not left:
                    raise
                else:
                    await asyncio.sleep(MOVED_SECONDS)
        raise RunnerError("plane_unavailable", "Owner after owner of this session went away. Try again.", retry_after=1)

    def _runs_nothing(self, request: web.Request) -> bool:
        read = request.method in ("GET", "HEAD") and _name(request) not in FILES
        return self._place is not None and not read

    async def _placed(
        self, request: web.Request, project: str, session_id: str, failed: Mapping[str, RunnerError | None]
    ) -> Elsewhere | None:
        """Who runs what nobody holds; reads are answered from the shared store, runner or not."""
        if self._place is None or not self._runs_nothing(request):
            return None
        try:
            return await self._place(project, session_id, failed.keys())
        except RunnerError as nobody:
            raise next((error for error in failed.values() if error is not None), nobody) from None

    async def _pass(self, request: web.Request, target: Elsewhere, project: str, session_id: str) -> web.StreamResponse:
        async def still() -> bool:
            owner = await self._owners.elsewhere(project, session_id)
            return owner is None or owner.replica_id == target.replica_id

        body = await read_body(request) if request.body_exists else b""
        headers, files = headers_up(request), _name(request) in FILES
        patience = STORED_SECONDS if _is_stored(request) else FILES_SECONDS if files else None
        try:
            asked = await self._peers.ask(
                target, request.method, path_of(request), headers, body=body, still=still, patience=patience
            )
        except Broken:
            once = _name(request) == ONCE
            return problem_answer(RunnerError("delivery_unknown", MAYBE_RUN) if once else _maybe_taken(target))
        if asked.status in (409, 429):
            return await _refusal(asked, target)
        task, streams = asyncio.current_task(), request.app[CONTEXT].streams
        assert task is not None
        streams.add(task)
        try:
            return await _down(request, asked, still)
        finally:
            streams.discard(task)


def _maybe_taken(target: Elsewhere) -> RunnerError:
    return held_by(target, MAYBE_TAKEN)


async def _refusal(asked: ClientResponse, target: Elsewhere) -> web.StreamResponse:
    """A refusal whole; one that another replica may not share is raised."""
    body = await whole(Chunks(asked))
    error = error_in(body, target)
    if error.code in ("owned_elsewhere", "runner_at_capacity"):
        raise error
    return web.Response(status=asked.status, headers=headers_down(asked), body=body)


async def _down(
    request: web.Request, asked: ClientResponse, still: Callable[[], Awaitable[bool]]
) -> web.StreamResponse:
    """Pass an answer on as it arrives; one that breaks off is cut here too, so that it never looks whole."""
    response = web.StreamResponse(status=asked.status, reason=asked.reason, headers=headers_down(asked))
    response.content_length = asked.content_length
    chunks, deaf = Chunks(asked), 0
    try:
        await response.prepare(request)
        while True:
            chunk = await chunks.next(WATCH_SECONDS)
            if chunk:
                deaf = 0
                async with asyncio.timeout(STALL_SECONDS):
                    await response.write(chunk)
            elif chunk is not None:
                await response.write_eof()
                return response
            else:
                deaf = 0 if await still() else deaf + 1
                if deaf >= DEAF_ROUNDS:
                    raise Broken("another replica has taken the session")
    except (Broken, ConnectionError, TimeoutError):
        _abort(request)
        return response
    except asyncio.CancelledError:
        _abort(request)
        raise
    finally:
        chunks.close()


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def _name(request: web.Request) -> str | None:
    return _NAME_OF.get(request.match_info.handler)


def _is_stored(request: web.Request) -> bool:
    return _name(request) in STORED


def _concerned(request: web.Request) -> bool:
    """Whether a request belongs to one session and to whoever holds it."""
    name = _name(request)
    if name is None or name in STAYS or not valid_id(request.match_info.get("session_id", "")):
        return False
    return not (name == FOLLOWS and request.query.get("follow") in ("1", "true"))
