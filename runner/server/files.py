"""Files of a workspace: read, probed, written, listed (DESIGN 4)."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Final
from urllib.parse import quote, unquote

from aiohttp import web

from runner.errors import RunnerError
from runner.rules.files import MAX_FILE_BYTES, Content, Precondition, content_type, etags, too_large
from runner.server.context import (
    CALLER,
    CONTEXT,
    SAFE_HEADERS,
    json_answer,
    limit_of,
    path_id,
    problem_answer,
    query,
    read_body,
    unhurried,
)
from runner.server.streams import STALL_SECONDS

PIECE: Final = 256 * 1024
_NEVER_RUN: Final = {**SAFE_HEADERS, "Content-Security-Policy": "default-src 'none'; sandbox"}
"""An agent's file is shown as what it is, and never acts as a page of this server."""


async def list_files(request: web.Request) -> web.Response:
    """``GET …/files``: one folder, page by page."""
    asked = query(request, "path", "limit", "cursor")
    session_id = path_id(request, "session_id")
    files = request.app[CONTEXT].sessions.files
    page = await files.list(request[CALLER], session_id, asked.get("path", ""), limit_of(asked), asked.get("cursor"))
    return json_answer(page)


async def get_file(request: web.Request) -> web.StreamResponse:
    """``GET …/files/{path}``: the bytes as they are."""
    content = await _read(request)
    response = _answer(request, content)
    if response.status == 304:
        return response
    await response.prepare(request)
    try:
        for start in range(0, len(content.data), PIECE):
            async with asyncio.timeout(STALL_SECONDS):
                await response.write(content.data[start : start + PIECE])
        await response.write_eof()
    except (ConnectionError, TimeoutError):
        if request.transport is not None:
            request.transport.abort()
    return response


async def head_file(request: web.Request) -> web.StreamResponse:
    """``HEAD …/files/{path}``: as GET, without them."""
    return _answer(request, await _read(request))


async def put_file(request: web.Request) -> web.Response:
    """``PUT …/files/{path}``: it is written whole or not at all, even when the client goes away meanwhile."""
    query(request)
    session_id, path = path_id(request, "session_id"), _path(request)
    headers = request.headers
    condition = Precondition(
        etags(headers.get("If-Match"), "If-Match"), etags(headers.get("If-None-Match"), "If-None-Match")
    )
    data = await read_body(request)
    if len(data) > MAX_FILE_BYTES:
        raise too_large(path, MAX_FILE_BYTES)
    work = request.app[CONTEXT].sessions.files.write(request[CALLER], session_id, path, data, condition)
    written = await unhurried(request, "write", work)
    if written is None:
        name = "If-Match" if condition.match is not None else "If-None-Match"
        return problem_answer(
            RunnerError("invalid_request", f"{name}: does not hold of what is there.", field=name), 412
        )
    body = {"path": path, "size": written.size, "etag": written.etag, "created": written.created}
    return json_answer(body, 201 if written.created else 200, {"ETag": written.etag})


def _path(request: web.Request) -> str:
    """The path; one that is no UTF-8 would else name another file, with the percent signs in it."""
    try:
        unquote(request.rel_url.raw_path, errors="strict")
    except UnicodeDecodeError:
        raise RunnerError("invalid_request", "path: its percent-encoding is no UTF-8.", field="path") from None
    return request.match_info["path"]


async def _read(request: web.Request) -> Content:
    query(request)
    session_id, path = path_id(request, "session_id"), _path(request)
    return await request.app[CONTEXT].sessions.files.read(request[CALLER], session_id, path)


def _answer(request: web.Request, content: Content) -> web.StreamResponse:
    known = Precondition(none_match=etags(request.headers.get("If-None-Match"), "If-None-Match"))
    headers = {**_NEVER_RUN, "ETag": content.etag}
    if not known.holds(content.etag):
        return web.Response(status=304, headers=headers)
    name = request.match_info["path"].rpartition("/")[2]
    changed = datetime.fromtimestamp(max(0, content.modified_at) / 1000, UTC)
    headers |= {
        "Content-Type": content_type(name, content.data),
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}",
        "Last-Modified": format_datetime(changed, usegmt=True),
    }
    response = web.StreamResponse(headers=headers)
    response.content_length = len(content.data)
    return response
