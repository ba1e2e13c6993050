"""Python client of the HTTP API, used by the command line and the tests.

aiohttp is imported when a client is opened, so that importing this module costs nothing.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode, urlsplit

import orjson

from runner.wire.answers import MAX_LINE_BYTES, ApiError, LineParser

if TYPE_CHECKING:
    import aiohttp

__all__ = ["MAX_LINE_BYTES", "ApiError", "Client", "LineParser", "is_loopback_url"]

CONNECT_SECONDS: Final = 10.0
READ_SECONDS: Final = 60.0
SHELL_SECONDS: Final = 120.0
"""How long a command may run when the caller does not say."""
COPY_SECONDS: Final = 60.0
"""How long a server may copy a workspace."""
FILE_SECONDS: Final = 120.0
"""How long a file may take; a sandbox that sleeps is woken for it."""
NDJSON: Final = {"Accept": "application/x-ndjson"}


class Client:
    """An async context over one server.

    Args:
        url: ``http://host:port``, with a path prefix if there is one.
        token: for ``Authorization``; None asks only what is open.
        read_seconds: the longest silence of a stream; more than the server's ping interval.
    """

    def __init__(self, url: str, token: str | None = None, *, read_seconds: float = READ_SECONDS) -> None:
        self.url = url.rstrip("/")
        self._token = token
        self._read_seconds = read_seconds
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; open streams break. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            import aiohttp

            headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
            # A proxy of the environment is never meant for this machine itself.
            self._session = aiohttp.ClientSession(headers=headers, trust_env=not is_loopback_url(self.url))
        return self._session

    async def dispatch(
        self, session: str, prompt: str | list[dict[str, Any]], **fields: Any
    ) -> AsyncGenerator[dict[str, Any]]:
        """Dispatch a prompt and yield its lines: events, then one result; pings are left out.

        Closing the generator detaches from the turn, nothing else.

        Args:
            session: the session's id.
            prompt: text or ACP content blocks.
            fields: more members of the body (DESIGN 4.1).

        Raises:
            ApiError: refused before the first line, or ``stream_broken`` when it ended without a result.
        """
        body = {"prompt": prompt, **fields}
        async with self._stream("POST", f"/v1/sessions/{_id(session)}/turns", body) as lines:
            async for line in lines:
                yield line
                if line.get("kind") == "result":
                    return
        raise ApiError("stream_broken", 200, "The server ended the stream without a result.")

    async def prompt(self, session: str, prompt: str | list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """Dispatch a prompt and wait for its result; a refusal is a failed result with its error."""
        result: dict[str, Any] = {}
        async for line in self.dispatch(session, prompt, **fields):
            if line.get("kind") == "result":
                result = line["result"]
        return result

    async def submit(self, session: str, prompt: str | list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """Dispatch without waiting: ``{prompt_id, turn_id, state}``."""
        path = f"/v1/sessions/{_id(session)}/turns"
        return await self._call("POST", path, {"prompt": prompt, **fields}, headers={"Prefer": "respond-async"})

    async def cancel(
        self,
        session: str,
        *,
        expected_execution_id: str | None = None,
        idempotency_key: str | None = None,
        wait_seconds: float | None = None,
        queue: str | None = None,
    ) -> dict[str, Any]:
        """Stop the session's turn; with ``wait_seconds`` its settled outcome."""
        body = _given(
            expected_execution_id=expected_execution_id,
            idempotency_key=idempotency_key,
            wait_seconds=wait_seconds,
            queue=queue,
        )
        path = f"/v1/sessions/{_id(session)}/cancel"
        return await self._call("POST", path, body, seconds=self._read_seconds + (wait_seconds or 0))

    async def abort_prompt(self, session: str, prompt_id: str) -> bool:
        """Abort one prompt and nothing else; whether this call cancelled it."""
        reply = await self._call("POST", f"/v1/sessions/{_id(session)}/prompts/{_id(prompt_id)}/abort")
        return bool(reply["aborted"])

    async def prompts(self, session: str) -> dict[str, Any]:
        """The queue: ``{items: [{prompt_id, state, position}], active}``."""
        return await self._call("GET", f"/v1/sessions/{_id(session)}/prompts")

    async def resume(self, session: str) -> str | None:
        """Go on where the last prompt has no completed answer: the turn's id, None when nothing is unanswered."""
        turn_id: str | None = (await self._call("POST", f"/v1/sessions/{_id(session)}/resume"))["turn_id"]
        return turn_id

    async def shell(self, session: str, command: str, *, timeout_seconds: float | None = None) -> dict[str, Any]:
        """Run a command in the session's sandbox: ``{turn_id, exit_code, output, truncated}``.

        Raises:
            ApiError: ``session_turn_in_use``, ``session_starting``.
        """
        body = _given(command=command, timeout_seconds=timeout_seconds)
        seconds = self._read_seconds + (timeout_seconds or SHELL_SECONDS)
        return await self._call("POST", f"/v1/sessions/{_id(session)}/shell", body, seconds=seconds)

    async def read_file(self, session: str, path: str) -> bytes:
        """A file of the session's workspace."""
        async with self._request("GET", _file(session, path), None, None, None, total=FILE_SECONDS) as response:
            content = await response.read()
            if response.status != 200:
                raise _refusal(response.status, content)
            return content

    async def write_file(
        self, session: str, path: str, data: bytes, *, if_match: str | None = None, if_none_match: str | None = None
    ) -> dict[str, Any]:
        """Put a file into the session's workspace: ``{path, size, etag, created}``; status 412 when it is another."""
        headers = {"If-Match": if_match, "If-None-Match": if_none_match}
        given = {name: value for name, value in headers.items() if value is not None}
        path = _file(session, path)
        return await self._call("PUT", path, data, headers=given, seconds=FILE_SECONDS, accepted=(200, 201))

    async def files(
        self, session: str, path: str = "", *, limit: int | None = None, cursor: str | None = None
    ) -> dict[str, Any]:
        """A page of a folder of the session's workspace: ``{path, items, next_cursor}``."""
        query = _given(path=path or None, limit=limit, cursor=cursor)
        return await self._call("GET", f"/v1/sessions/{_id(session)}/files", query=query, seconds=FILE_SECONDS)

    async def kill(self, session: str) -> dict[str, Any]:
        """Destroy the session's sandbox."""
        return await self._call("POST", f"/v1/sessions/{_id(session)}/kill")

    async def delete(self, session: str) -> dict[str, Any]:
        """Kill and end the session."""
        return await self._call("DELETE", f"/v1/sessions/{_id(session)}")

    async def sessions(self, *, limit: int | None = None, cursor: str | None = None) -> dict[str, Any]:
        """A page of the project's sessions."""
        return await self._call("GET", "/v1/sessions", query=_given(limit=limit, cursor=cursor))

    async def session(self, session: str) -> dict[str, Any]:
        """The session's view."""
        return await self._call("GET", f"/v1/sessions/{_id(session)}")

    async def records(self, session: str, *, after: str | None = None, limit: int | None = None) -> dict[str, Any]:
        """A page of the session's records."""
        path = f"/v1/sessions/{_id(session)}/records"
        return await self._call("GET", path, query=_given(after=after, limit=limit))

    async def export(self, session: str) -> AsyncGenerator[dict[str, Any]]:
        """Everything durable of the session: a line ``session``, one per record, and ``end``.

        Raises:
            ApiError: ``stream_broken`` when it ended without its end.
        """
        async with self._stream("GET", f"/v1/sessions/{_id(session)}/export") as lines:
            async for line in lines:
                yield line
                if line.get("kind") == "end":
                    return
        raise ApiError("stream_broken", 200, "The server ended the export before its end.")

    async def fork(
        self, session: str, after: str, *, session_id: str | None = None, allow_incomplete: bool | None = None
    ) -> dict[str, Any]:
        """A new session with the history up to ``after``; with ``session_id`` the same one when it is asked again."""
        body = _given(after=after, session_id=session_id, allow_incomplete=allow_incomplete)
        path = f"/v1/sessions/{_id(session)}/fork"
        return await self._call("POST", path, body, seconds=self._read_seconds + COPY_SECONDS, accepted=(200, 201))

    async def events(
        self, session: str, *, after: str | None = None, follow: bool = False
    ) -> AsyncGenerator[dict[str, Any]]:
        """Events behind a cursor; with ``follow`` live ones until the generator is closed."""
        query = _given(after=after, follow="1" if follow else None)
        async with self._stream("GET", f"/v1/sessions/{_id(session)}/events", query=query) as lines:
            async for line in lines:
                yield line

    async def feed(self, *, after: str | None = None, follow: bool = False) -> AsyncGenerator[dict[str, Any]]:
        """What becomes of the project's sessions behind a cursor of the feed; with ``follow`` what comes, without end.

        Without ``after`` a follower gets what comes from now on, anybody else everything that is kept. First comes a
        ``ping`` with the ``cursor`` from which one that saw nothing yet can go on.
        """
        query = _given(after=after, follow="1" if follow else None)
        async with self._stream("GET", "/v1/events", query=query) as lines:
            async for line in lines:
                yield line

    async def interactions(self, session: str | None = None, *, status: str | None = None) -> dict[str, Any]:
        """Questions of a session, or of the project."""
        path = "/v1/interactions" if session is None else f"/v1/sessions/{_id(session)}/interactions"
        return await self._call("GET", path, query=_given(status=status))

    async def answer(
        self,
        session: str,
        interaction: str,
        *,
        option_id: str | None = None,
        decision: str | None = None,
        action: str | None = None,
        content: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> dict[str, Any]:
        """Answer a question: a permission by ``option_id`` or ``decision`` (allow, deny), else by ``action``.

        ``action`` is accept, decline or cancel; ``content`` fills in the form that is accepted.
        """
        path = f"/v1/sessions/{_id(session)}/interactions/{_id(interaction)}/answer"
        body = _given(
            option_id=option_id, decision=decision, action=action, content=content, idempotency_key=idempotency_key
        )
        return await self._call("POST", path, body)

    async def pool(self) -> dict[str, Any]:
        """Seats, spares and verdicts."""
        return await self._call("GET", "/v1/pool")

    async def health(self) -> dict[str, Any]:
        """Status and version; with a token the replica, harnesses and providers."""
        return await self._call("GET", "/health")

    async def ready(self) -> dict[str, Any]:
        """Whether turns can be dispatched, and why not."""
        return await self._call("GET", "/ready", accepted=(200, 503))

    async def openapi(self) -> dict[str, Any]:
        """The API's description."""
        return await self._call("GET", "/openapi.json")

    async def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        seconds: float | None = None,
        accepted: tuple[int, ...] = (200, 202),
    ) -> dict[str, Any]:
        async with self._request(method, path, body, query, headers, total=seconds or self._read_seconds) as response:
            content = await response.read()
            if response.status not in accepted:
                raise _refusal(response.status, content)
            try:
                value: dict[str, Any] = orjson.loads(content)
            except orjson.JSONDecodeError:
                raise _refusal(response.status, content) from None
            return value

    @asynccontextmanager
    async def _stream(
        self, method: str, path: str, body: Any = None, query: Mapping[str, Any] | None = None
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        async with self._request(method, path, body, query, NDJSON, total=None) as response:
            if response.status != 200:
                raise _refusal(response.status, await response.read())
            yield _lines(response)

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        body: Any,
        query: Mapping[str, Any] | None,
        headers: Mapping[str, str] | None,
        *,
        total: float | None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        session = self._open()
        import aiohttp
        from yarl import URL

        raw = isinstance(body, bytes)
        kind = {"Content-Type": "application/octet-stream" if raw else "application/json"} if body is not None else {}
        given, packed = {**(headers or {}), **kind}, body if raw or body is None else orjson.dumps(body)
        silence = max(self._read_seconds, total or 0.0)
        timeout = aiohttp.ClientTimeout(total=total, sock_connect=CONNECT_SECONDS, sock_read=silence)
        try:
            async with session.request(
                method,
                URL(self.url + path + (f"?{urlencode(query)}" if query else ""), encoded=True),
                data=None if packed is None else BytesIO(packed),  # bytes above 1 MiB draw a warning
                headers=given,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                yield response
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL) as error:
            raise ApiError("unreachable", 0, f"No answer from {self.url}: {_why(error)}.") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise ApiError("stream_broken", 0, f"The connection to {self.url} broke: {reason}.") from error


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    parser = LineParser()
    async for chunk in response.content.iter_any():
        for line in parser.feed(chunk):
            if line.get("kind") != "ping" or "cursor" in line:
                yield line
    if parser.unfinished:
        raise ApiError("stream_broken", 200, "The server ended the stream in the middle of a line.")


def _why(error: Exception) -> str:
    """The system's word where there is one, without what aiohttp says around it."""
    cause = getattr(error, "os_error", error)
    number = getattr(cause, "errno", None) or 0
    return os.strerror(number) if number > 0 else str(cause)


def _refusal(status: int, content: bytes) -> ApiError:
    try:
        problem = orjson.loads(content)
    except orjson.JSONDecodeError:
        problem = None
    if isinstance(problem, dict) and isinstance(problem.get("code"), str):
        return ApiError(problem["code"], status, str(problem.get("detail") or problem["code"]), problem)
    return ApiError("unexpected_answer", status, f"The server answered {status} without a problem document.")


def _id(text: str) -> str:
    return quote(text, safe="")


def _file(session: str, path: str) -> str:
    return f"/v1/sessions/{_id(session)}/files/{quote(path)}"


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def is_loopback_url(url: str) -> bool:
    """Whether a URL's host is this machine itself."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
