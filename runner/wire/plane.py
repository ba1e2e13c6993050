"""Calls to a plane over HTTP: one request, one answer, one deadline (DESIGN 4, coordination)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import orjson
from aiohttp import (
    ClientConnectorError,
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    TCPConnector,
)

from runner.errors import RunnerError
from runner.wire.problems import error_of

ANSWER_MAX: Final = 64 * 1024 * 1024
PREFIX: Final = "/v1/coordination/"
STORE_HEADER: Final = "Acp-Runner-Store"
KEEPALIVE_SECONDS: Final = 15.0
CONNECTIONS_MAX: Final = 32


class PlaneClient:
    """What the lease plane and the store over HTTP have in common.

    A cancelled call closes its connection: no later call ever reads an answer that is not its own.

    Args:
        url: of the plane, without a path.
        tokens: a token of scope ``runner`` for each project; at least one.
        unreachable: the code of an error for a plane that gives no answer.
        unwelcome: the code for a token that the plane does not accept.
        seconds: longest wait for one answer.
    """

    def __init__(
        self, url: str, tokens: Mapping[str, str], *, unreachable: str, seconds: float, unwelcome: str = "internal"
    ) -> None:
        if not tokens:
            raise ValueError("a runner of a plane needs a token of scope runner")
        self.url = url.rstrip("/")
        self.projects = tuple(tokens)
        self._tokens = dict(tokens)
        self._unreachable = unreachable
        self._unwelcome = unwelcome
        self._seconds = seconds
        self._http: ClientSession | None = None
        self._closed = False

    async def post(self, path: str, body: bytes, project: str | None = None) -> tuple[bytes, Mapping[str, str]]:
        """The body and headers of a 200.

        Args:
            path: behind ``/v1/coordination/``.
            body: JSON.
            project: whose token is shown; None: the first one.

        Raises:
            RunnerError: the client's ``unreachable`` code when the plane gives no answer or says that it cannot work
                now, ``unwelcome`` for want of a token, ``too_large``, ``internal`` when it refuses the request.
        """
        headers = {"Authorization": f"Bearer {self.token(project)}", "Content-Type": "application/json"}
        http = self.session()
        try:
            async with (
                asyncio.timeout(self._seconds),
                http.post(f"{self.url}{PREFIX}{path}", data=body, headers=headers, allow_redirects=False) as answer,
            ):
                content = await _bounded(answer)
        except TimeoutError:
            raise self._gone(f"no answer in {self._seconds:g} s") from None
        except (ClientError, OSError, ValueError) as error:
            raise self._gone(_reason(error)) from error
        if answer.status != 200:
            raise self._refusal(answer.status, content)
        return content, answer.headers

    def token(self, project: str | None) -> str:
        """The token of a project.

        Raises:
            RunnerError: the client's ``unwelcome`` code: this runner has none.
        """
        token = self._tokens.get(self.projects[0] if project is None else project)
        if token is None:
            raise RunnerError(self._unwelcome, f"This runner has no token of the plane for project {project}.")
        return token

    def other_tokens(self) -> list[str]:
        """The tokens of all projects but the first."""
        return [self._tokens[project] for project in self.projects[1:]]

    def session(self) -> ClientSession:
        """The connections, made at their first use."""
        if self._closed:
            raise self._gone("it is closed here")
        if self._http is None:
            # Dropped well before the server drops them: a request never meets a connection that is being closed.
            connector = TCPConnector(limit=CONNECTIONS_MAX, keepalive_timeout=KEEPALIVE_SECONDS)
            self._http = ClientSession(connector=connector, cookie_jar=DummyCookieJar(), timeout=ClientTimeout())
        return self._http

    async def close(self) -> None:
        """Drop connections; later calls fail as if the plane were gone."""
        self._closed = True
        if self._http is not None:
            await self._http.close()

    def _gone(self, why: str) -> RunnerError:
        return RunnerError(self._unreachable, f"The plane {self.url} cannot be used: {why}.")

    def _refusal(self, status: int, content: bytes) -> RunnerError:
        problem = _problem(content)
        if problem is None or status in (429, 502, 503, 504):
            return self._gone(f"it answered {status}{'' if problem is None else f' ({problem.message})'}")
        if problem.code in ("internal", "too_large"):
            return RunnerError(problem.code, problem.message)
        code = self._unwelcome if status in (401, 403) else "internal"
        return RunnerError(code, f"The plane refused a request of this runner ({status}): {problem.message}")


def body_of(members: Mapping[str, Any]) -> bytes:
    """A request body; members that are None are left out."""
    return orjson.dumps({name: value for name, value in members.items() if value is not None})


def _reason(error: Exception) -> str:
    """A connection's failure in a few words."""
    inner = error.os_error if isinstance(error, ClientConnectorError) else error
    return f"{type(inner).__name__}: {inner}"[:200]


async def _bounded(answer: ClientResponse) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in answer.content.iter_any():
        size += len(part)
        if size > ANSWER_MAX:
            raise ValueError(f"its answer is larger than {ANSWER_MAX} bytes")
        parts.append(part)
    return b"".join(parts)


def _problem(content: bytes) -> RunnerError | None:
    try:
        document = orjson.loads(content)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(document, dict) or "code" not in document or "retryable" not in document:
        return None
    return error_of(document)
