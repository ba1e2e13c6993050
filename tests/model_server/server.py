"""The HTTP side of the model server and its control object."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import TracebackType
from typing import Any

from aiohttp import web

from tests.model_server.anthropic import AnthropicMessages
from tests.model_server.chat import ChatCompletions
from tests.model_server.protocols import Wire
from tests.model_server.requests import RecordedRequest
from tests.model_server.responses import OpenAIResponses
from tests.model_server.script import Step, decide

MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_REQUESTS = 2_000
MAX_HOLD_SECONDS = 600.0
WAIT_SECONDS = 15.0

_WIRES: dict[str, Wire] = {
    "/messages": AnthropicMessages(),
    "/responses": OpenAIResponses(),
    "/chat/completions": ChatCompletions(),
}


class ModelServer:
    """A model on loopback whose answers the prompts script.

    Use it as an async context manager. ``url`` is the base without a version: Anthropic clients
    take it as it is, OpenAI clients take ``openai_url``.

    Attributes:
        requests: every model call so far, oldest first, at most ``MAX_REQUESTS``.
    """

    def __init__(self, port: int = 0) -> None:
        self._port = port
        self._runner: web.AppRunner | None = None
        self._held: dict[RecordedRequest, asyncio.Event] = {}
        self._changed = asyncio.Condition()
        self._closing = False
        self._notes: set[asyncio.Task[None]] = set()
        self.requests: list[RecordedRequest] = []

    async def __aenter__(self) -> ModelServer:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen on 127.0.0.1; a port of 0 takes a free one."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._route)
        # Without handler_cancellation a client that goes away is not seen by a held handler.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop listening and end every open answer."""
        self._closing = True
        self.release()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def held(self) -> list[RecordedRequest]:
        """The requests that wait for a release now, oldest first."""
        return list(self._held)

    @property
    def turns(self) -> list[RecordedRequest]:
        """The requests that belong to a prompt, without the auxiliary ones."""
        return [request for request in self.requests if not request.auxiliary]

    def release(self, request: RecordedRequest | None = None) -> int:
        """Let one held request go on, or all of them; gives the number released."""
        chosen = [request] if request is not None else list(self._held)
        for one in chosen:
            one.held = False
            self._held.pop(one).set()
        return len(chosen)

    async def wait_held(self, n: int = 1, timeout_seconds: float = WAIT_SECONDS) -> list[RecordedRequest]:
        """Wait until at least ``n`` requests are held at once.

        Raises:
            TimeoutError: fewer were held when the time was up.
        """
        await self._until(lambda: len(self._held) >= n, timeout_seconds, f"{n} held requests")
        return self.held

    async def wait_requests(self, n: int, timeout_seconds: float = WAIT_SECONDS) -> list[RecordedRequest]:
        """Wait until at least ``n`` requests that belong to a prompt came."""
        await self._until(lambda: len(self.turns) >= n, timeout_seconds, f"{n} requests")
        return self.turns

    async def wait_closed(
        self, request: RecordedRequest | None = None, timeout_seconds: float = WAIT_SECONDS
    ) -> RecordedRequest:
        """Wait until the client closed this request (or any one that was held) unanswered.

        Raises:
            TimeoutError: the connection was still open when the time was up.
        """

        def closed() -> RecordedRequest | None:
            among = [request] if request is not None else self.requests
            return next((one for one in among if one.closed_by_client), None)

        await self._until(lambda: closed() is not None, timeout_seconds, "a closed request")
        found = closed()
        assert found is not None
        return found

    async def _until(self, true: Callable[[], bool], timeout_seconds: float, what: str) -> None:
        try:
            async with asyncio.timeout(timeout_seconds), self._changed:
                await self._changed.wait_for(true)
        except TimeoutError:
            seen = [(one.protocol, one.directive) for one in self.requests[-10:]]
            message = f"no {what} within {timeout_seconds} s; last requests: {seen}"
            raise TimeoutError(message) from None

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _note(self) -> None:
        # A cancelled handler must not await, so the waiters are woken by a task of their own.
        task = asyncio.get_running_loop().create_task(self._notify())
        self._notes.add(task)
        task.add_done_callback(self._notes.discard)

    async def _route(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if request.method == "POST":
            wire = next((wire for end, wire in _WIRES.items() if path.endswith(end)), None)
            if wire is not None:
                return await self._answer(request, wire)
            if path.endswith("/count_tokens"):
                return web.json_response({"input_tokens": 11})
        elif path.endswith("/models"):
            model = {"id": "fake-model", "object": "model", "type": "model", "created": 0}
            return web.json_response({"object": "list", "data": [model]})
        elif request.method == "HEAD" or path in ("/", "/api/hello"):
            return web.Response()
        return web.json_response({"error": {"message": f"no route {path}"}}, status=404)

    async def _answer(self, request: web.Request, wire: Wire) -> web.StreamResponse:
        body = json.loads(await request.read())
        items = wire.items(body)
        step = decide(items, wire.tools(body))
        record = RecordedRequest(
            protocol=wire.name,
            path=request.path,
            body=body,
            api_key=_key(request),
            items=items,
            directive=step.directive,
            started=asyncio.get_running_loop().time(),
        )
        if len(self.requests) >= MAX_REQUESTS:
            return web.json_response(wire.error(429), status=429)
        self.requests.append(record)
        self._note()
        try:
            response = await self._perform(request, wire, step, record)
            record.finished = True
            return response
        except (asyncio.CancelledError, ConnectionResetError):
            record.closed_by_client = not self._closing
            raise
        finally:
            self._note()

    async def _perform(
        self, request: web.Request, wire: Wire, step: Step, record: RecordedRequest
    ) -> web.StreamResponse:
        if step.status != 200:
            return web.json_response(wire.error(step.status), status=step.status)
        encoder = wire.encoder(record.body, len(self.requests))
        if step.hold == "headers":
            await self._hold(record)
        if not record.body.get("stream"):
            if step.hold == "stream":
                await self._hold(record)
            return web.json_response(encoder.whole(step.chunks, step.tool))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(encoder.start())
        for index, chunk in enumerate(step.chunks):
            await response.write(encoder.text(chunk))
            if index == 0 and step.hold == "stream":
                await self._hold(record)
        if step.cut:
            assert request.transport is not None
            request.transport.close()
            return response
        if step.tool is not None:
            await response.write(encoder.tool(step.tool))
        await response.write(encoder.end())
        await response.write_eof()
        return response

    async def _hold(self, record: RecordedRequest) -> None:
        gate = asyncio.Event()
        self._held[record] = gate
        record.held = True
        self._note()
        try:
            async with asyncio.timeout(MAX_HOLD_SECONDS):
                await gate.wait()
        finally:
            self._held.pop(record, None)
            record.held = False


def _key(request: web.Request) -> str | None:
    key: Any = request.headers.get("x-api-key") or request.headers.get("authorization")
    return key.removeprefix("Bearer ") if key else None
