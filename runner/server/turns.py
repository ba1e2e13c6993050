"""``POST /v1/sessions/{session_id}/turns``: dispatch a prompt and answer in the form the client asked for."""

from __future__ import annotations

from typing import Any, Final

from aiohttp import web

from runner.clock import rfc3339
from runner.errors import RunnerError
from runner.metrics import REFUSALS, Metrics
from runner.server.context import CALLER, CONTEXT, check_capacity, json_answer, path_id, read_body
from runner.server.streams import Form, Stream, accepted_form
from runner.session.port import PromptHandle, ReaderCut, ReaderEnded
from runner.wire.codec import event_line, result_line, to_json
from runner.wire.models import parse_dispatch

STORED: Final = "stored"


async def post_turn(request: web.Request) -> web.StreamResponse:
    """Admit a prompt; the turn belongs to the sessions, this handler only holds a reader of it.

    A client that goes away cancels the handler at any await: the reader is detached and nothing else changes.
    """
    metrics = request.app[CONTEXT].metrics
    try:
        return await _post_turn(request, metrics)
    except RunnerError as error:
        metrics.add(REFUSALS, error.code)
        raise


async def _post_turn(request: web.Request, metrics: Metrics) -> web.StreamResponse:
    context = request.app[CONTEXT]
    check_capacity(request)
    session_id = path_id(request, "session_id")
    caller = request[CALLER]
    dispatch = parse_dispatch(await read_body(request))
    if dispatch.workspace.path is not None and "operate" not in caller.scopes:
        raise RunnerError(
            "forbidden", "workspace.path: needs a token with the scope 'operate'.", field="workspace.path"
        )
    behind = prefers_async(request)
    handle = await context.sessions.dispatch(caller, session_id, dispatch, keep_on_disconnect=behind)
    if dispatch.context_only:
        return json_answer({"prompt_id": handle.prompt_id, "state": STORED})
    form = accepted_form(request.headers.get("Accept", ""))
    if behind or form == "json":
        if handle.refused is not None:
            raise handle.refused
        return _accepted(handle) if behind else json_answer(await _waited(handle, context.server.ping_seconds))
    return await _streamed(request, handle, form, metrics)


def prefers_async(request: web.Request) -> bool:
    """Whether the client said ``Prefer: respond-async`` (RFC 7240)."""
    return any(
        part.partition(";")[0].strip().lower() == "respond-async"
        for header in request.headers.getall("Prefer", ())
        for part in header.split(",")
    )


def _accepted(handle: PromptHandle) -> web.Response:
    body = {"prompt_id": handle.prompt_id, "turn_id": handle.turn_id, "state": handle.state}
    return json_answer(body, 202, {"Preference-Applied": "respond-async"})


async def _waited(handle: PromptHandle, seconds: float) -> dict[str, Any]:
    """The result; a waiting request is a reader (DESIGN 3.4), so it holds one and reads it."""
    reader = handle.reader()
    try:
        while True:
            await reader.next(seconds)
    except (ReaderEnded, ReaderCut):
        return await handle.result()
    finally:
        reader.close()


async def _streamed(request: web.Request, handle: PromptHandle, form: Form, metrics: Metrics) -> web.StreamResponse:
    stream = Stream(request, form, quick=True)
    if handle.refused is not None:
        metrics.add(REFUSALS, handle.refused.code)
        async with stream:
            await stream.finish(await _refusal(request, handle, handle.refused))
        return stream.response
    reader = handle.reader()
    try:
        async with stream:
            last = await stream.relay(reader)
            if last is not None:
                await stream.finish(last + result_line(await handle.result()))
    finally:
        reader.close()
    return stream.response


async def _refusal(request: web.Request, handle: PromptHandle, refused: RunnerError) -> bytes:
    """One error event without a cursor, then the failed result (DESIGN 3.1.3, 4.2)."""
    at = rfc3339(request.app[CONTEXT].clock.now_ms())
    event = event_line(None, None, handle.prompt_id, at, "error", to_json(refused.as_event()))
    return event + result_line(await handle.result())
