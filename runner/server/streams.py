"""One open stream to a client: NDJSON or server-sent events, with pings, and cut when the client does not read."""

from __future__ import annotations

import asyncio
import logging
from functools import lru_cache
from types import TracebackType
from typing import Final, Literal, cast

from aiohttp import web
from aiohttp.http_writer import StreamWriter

from runner.clock import rfc3339
from runner.metrics import STREAMS_CUT
from runner.server.context import CONTEXT, SAFE_HEADERS
from runner.session.port import Reader, ReaderCut, ReaderEnded
from runner.wire.codec import PING, event_line, last_cursor, to_json, to_sse

log = logging.getLogger("runner.server")

Form = Literal["ndjson", "sse", "json"]
STALL_SECONDS: Final = 60.0
LAST_WORDS_SECONDS: Final = 1.0
_TYPES: Final[dict[str, Form]] = {
    "application/x-ndjson": "ndjson",
    "text/event-stream": "sse",
    "application/json": "json",
}
_HEADERS: Final[dict[Form, dict[str, str]]] = {
    form: {**SAFE_HEADERS, "Content-Type": kind, "X-Accel-Buffering": "no"} for kind, form in _TYPES.items()
}


@lru_cache(maxsize=64)
def accepted_form(accept: str) -> Form:
    """The form that an ``Accept`` header prefers; NDJSON when it names none of ours."""
    best: tuple[float, Form] = (0.0, "ndjson")
    for part in accept.split(","):
        kind, _, parameters = part.partition(";")
        form = _TYPES.get(kind.strip().lower())
        if form is not None and (weight := _weight(parameters)) > best[0]:
            best = (weight, form)
    return best[1]


def _weight(parameters: str) -> float:
    for parameter in parameters.split(";"):
        name, _, value = parameter.strip().partition("=")
        if name.lower() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


class _Response(web.StreamResponse):
    # The head goes out together with the first lines: one segment less for a warm turn.
    _send_headers_immediately = False


class _Frames:
    """The newest lines of each form as chunks of a body: followers of one session send the same bytes."""

    def __init__(self) -> None:
        self._kept: dict[bool, tuple[bytes, bytes]] = {}

    def of(self, lines: bytes, sse: bool) -> bytes:
        kept = self._kept.get(sse)
        if kept is not None and kept[0] is lines:
            return kept[1]
        body = to_sse(lines) if sse else lines
        framed = b"%x\r\n%b\r\n" % (len(body), body)
        self._kept[sse] = (lines, framed)
        return framed


_FRAMES: Final = _Frames()


class Stream:
    """An async context: inside it lines may be sent; leaving it by an error cuts the connection.

    A cut is visible to the client as a chunked body without its end, so half a stream never looks like a whole one.

    Args:
        request: the request that is answered.
        form: ``ndjson`` or ``sse``.
        quick: whether lines follow at once; otherwise the head is sent before them.
    """

    def __init__(self, request: web.Request, form: Form, *, quick: bool) -> None:
        self._request = request
        self._context = request.app[CONTEXT]
        self._sse = form == "sse"
        kind = _Response if quick else web.StreamResponse
        self.response = kind(headers=_HEADERS[form])
        self._cursor: str | None = None
        self._quick = quick

    async def __aenter__(self) -> Stream:
        self._writer = cast("StreamWriter", await self.response.prepare(self._request))
        self._chunked = self._writer.chunked and not self._quick
        self._task = asyncio.current_task()
        if self._task is not None:
            self._context.streams.add(self._task)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._task is not None:
            self._context.streams.discard(self._task)
        if error is None:
            return False
        if isinstance(error, asyncio.CancelledError):
            if self._context.closing and self._task is not None and self._task.cancelling() <= 1:
                self._task.uncancel()
                await self._last_words("the server is shutting down")
                return True
            self._abort()
            return False
        self._abort()
        if isinstance(error, ConnectionError | TimeoutError):
            return True
        log.error("a stream broke off", exc_info=error)
        return True

    async def send(self, lines: bytes) -> None:
        """Send whole lines with one write; waits while the client is behind, at most 60 s.

        Raises:
            TimeoutError: the client read nothing for that long.
            ConnectionError: it is gone.
        """
        if self._chunked:
            transport = self._request.transport
            if transport is None or transport.is_closing():
                raise ConnectionResetError("the client has gone")
            transport.write(_FRAMES.of(lines, self._sse))
        else:
            await self._writer.write(to_sse(lines) if self._sse else lines, drain=False)
        if self._request.protocol.writing_paused:
            async with asyncio.timeout(STALL_SECONDS):
                await self._writer.drain()

    async def finish(self, lines: bytes = b"") -> None:
        """Send the last lines together with the end of the stream."""
        async with asyncio.timeout(STALL_SECONDS):
            await self.response.write_eof(to_sse(lines) if self._sse else lines)

    async def relay(self, reader: Reader) -> bytes | None:
        """Send what a reader delivers, pings in its silence; one write for each delivery.

        Returns:
            The last lines, not sent yet, so that they go out together with the stream's end; None when the reader
            was cut and so is the connection.
        """
        seconds = self._context.server.ping_seconds
        while True:
            try:
                lines = await reader.next(seconds)
            except ReaderEnded:
                return b""
            except ReaderCut as cut:
                self._context.metrics.add(STREAMS_CUT, "behind")
                await self._last_words(str(cut) or "the client reads too slowly")
                return None
            if lines is None:
                lines = PING
            else:
                self._cursor = last_cursor(lines) or self._cursor
                if reader.ended:
                    return lines
            try:
                await self.send(lines)
            except TimeoutError:
                self._context.metrics.add(STREAMS_CUT, "stalled")
                reader.close(cut=True)
                raise

    async def _last_words(self, reason: str) -> None:
        data = to_json({"from": self._cursor, "reason": reason})
        line = event_line(None, None, None, rfc3339(self._context.clock.now_ms()), "resync", data)
        try:
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                if self._request.transport is not None:
                    self._request.transport.set_write_buffer_limits(high=0)  # a drain then means all is sent
                await self._writer.write(to_sse(line) if self._sse else line, drain=False)
                await self._writer.drain()
        except (TimeoutError, ConnectionError):
            pass
        self._abort()

    def _abort(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()
