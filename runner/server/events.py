"""``GET /v1/sessions/{session_id}/events``: history behind a cursor, then live events (DESIGN 4)."""

from __future__ import annotations

from aiohttp import web

from runner.errors import RunnerError
from runner.server.context import CALLER, CONTEXT, path_id, query
from runner.server.relay import RELAY
from runner.server.sessions import cursor_of
from runner.server.streams import Form, Stream, accepted_form
from runner.session.feed import position_of
from runner.session.port import Reader


async def get_events(request: web.Request) -> web.StreamResponse:
    """NDJSON, or server-sent events when ``Accept`` prefers them.

    ``Last-Event-ID`` wins over ``after``: a browser that reconnects sends both, and only the header moved on.
    """
    parameters = query(request, "after", "follow")
    session_id = path_id(request, "session_id")
    follow = _follow(parameters.get("follow"))
    after = cursor_of(request.headers.get("Last-Event-ID"), "Last-Event-ID") or cursor_of(
        parameters.get("after"), "after"
    )
    form = accepted_form(request.headers.get("Accept", ""))
    return await streamed(request, await _reader(request, session_id, after, follow), form, follow)


async def get_feed(request: web.Request) -> web.StreamResponse:
    """The project's feed, in the same forms; its cursors are its own."""
    parameters = query(request, "after", "follow")
    follow = _follow(parameters.get("follow"))
    form = accepted_form(request.headers.get("Accept", ""))
    seen, after = request.headers.get("Last-Event-ID"), parameters.get("after")
    position_of(seen, "Last-Event-ID")
    reader = await request.app[CONTEXT].sessions.feed(request[CALLER], seen or after, follow)
    return await streamed(request, reader, form, follow)


async def streamed(request: web.Request, reader: Reader, form: Form, follow: bool) -> web.StreamResponse:
    """What a reader delivers, to its end; ``form`` is NDJSON unless it is server-sent events."""
    try:
        async with Stream(request, "sse" if form == "sse" else "ndjson", quick=not follow) as stream:
            last = await stream.relay(reader)
            if last is not None:
                await stream.finish(last)
    finally:
        reader.close()
    return stream.response


async def _reader(request: web.Request, session_id: str, after: str | None, follow: bool) -> Reader:
    relay = request.app.get(RELAY)
    if follow and relay is not None and relay.owners.shared:
        return await relay.follow(request[CALLER], session_id, after, request.headers)
    return await request.app[CONTEXT].sessions.follow(request[CALLER], session_id, after, follow)


def _follow(text: str | None) -> bool:
    if text in (None, "0", "false"):
        return False
    if text in ("1", "true"):
        return True
    raise RunnerError("invalid_request", "follow: must be 0 or 1.", field="follow")
