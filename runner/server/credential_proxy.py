"""The credential proxy: a listener of its own on the loopback interface, where a cell's token is worth a key.

A request goes to the one upstream of its token, with the key in place of the token, and its answer comes back as it is
told; nothing is kept, nothing is tried twice, no redirect is followed (DESIGN 3.10). It serves nothing else, and no
route of the API is here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from aiohttp import (
    ClientConnectionError,
    ClientConnectorDNSError,
    ClientConnectorError,
    ClientError,
    ClientResponse,
    ClientSession,
    ClientSSLError,
    ClientTimeout,
    DummyCookieJar,
    ServerTimeoutError,
    SocketTimeoutError,
    TCPConnector,
    web,
)
from yarl import URL

from runner.metrics import MODEL_REQUESTS, MODEL_TOKENS, Metrics
from runner.redaction import StreamRedactor
from runner.rules.credentials import OWN_HOST, Header, Upstream
from runner.rules.metering import BodyMeter
from runner.rules.passing_on import METHODS, asked, is_own_host, place_of, presented, problem, told
from runner.server.app import start_site, stop_site
from runner.session.keys import Grant, KeyBook

log = logging.getLogger("runner.keys")
MIB: Final = 1024 * 1024
NO_GRANT: Final = "none"
REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_AUTOMATIC: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one request may take.

    Attributes:
        connect_seconds: until the upstream is connected.
        idle_seconds: in which the upstream, or the agent, moves nothing.
        body_bytes: of a request, unpacked.
        requests: of one token at a time.
        close_seconds: for answers under way when the proxy closes.
    """

    connect_seconds: float = 10.0
    idle_seconds: float = 900.0
    body_bytes: int = 32 * MIB
    requests: int = 64
    close_seconds: float = 1.0


class Refused(Exception):
    """A request that is not passed on, or an answer that is not; told to the agent in words of model APIs."""

    def __init__(self, status: int, kind: str, code: str, message: str, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.body = problem(kind, code, message)
        self.headers = headers

    def answer(self) -> web.Response:
        """The answer."""
        return web.json_response(self.body, status=self.status, headers=self.headers)


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request whose token is worth something, and what it becomes."""

    grant: Grant
    url: URL
    headers: list[tuple[str, str]]


class CredentialProxy:
    """Serves the tokens of one book.

    Args:
        book: of tokens; it is told the port.
        metrics: counts requests and tokens by harness.
        bounds: what one request may take.
        proxy_for: the HTTP proxy by which an upstream is reached, by its scheme and ``host:port``; None: none.
    """

    def __init__(
        self,
        book: KeyBook,
        metrics: Metrics,
        *,
        bounds: Bounds | None = None,
        proxy_for: Callable[[str, str], str | None] = lambda scheme, host: None,
    ) -> None:
        self._book = book
        self._metrics = metrics
        self._bounds = bounds or Bounds()
        self._proxy_for = proxy_for
        self._site: web.AppRunner | None = None
        self._session: ClientSession | None = None

    async def start(self) -> None:
        """Listen on a port that the system chooses, and tell the book.

        Raises:
            OSError: there is none.
        """
        self._session = ClientSession(
            connector=TCPConnector(limit=0),
            cookie_jar=DummyCookieJar(),
            skip_auto_headers=_AUTOMATIC,
            timeout=ClientTimeout(
                total=None, sock_connect=self._bounds.connect_seconds, sock_read=self._bounds.idle_seconds
            ),
        )
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        try:
            self._site, _ = await start_site(app, OWN_HOST, 0, close_seconds=self._bounds.close_seconds, share=4)
        except BaseException:
            await self._session.close()
            raise
        self._book.port = self._site.addresses[0][1]

    async def close(self) -> None:
        """Stop listening and give up what is under way."""
        if self._site is not None:
            await stop_site(self._site)
        if self._session is not None:
            await self._session.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            admitted = self._admit(request)
        except Refused as refused:
            self._metrics.add(MODEL_REQUESTS, NO_GRANT, "refused")
            return refused.answer()
        grant, task = admitted.grant, asyncio.current_task()
        assert task is not None
        grant.requests.add(task)
        result = "given_up"
        try:
            answer, result = await self._pass_on(request, admitted)
            return answer
        except Refused as refused:
            result = refused.code
            return refused.answer()
        finally:
            grant.requests.discard(task)
            self._metrics.add(MODEL_REQUESTS, grant.harness, result)

    def _admit(self, request: web.Request) -> Admitted:
        """Judge a request by its head alone; nobody is asked for it."""
        if "upgrade" in request.headers:
            text = "A WebSocket is not passed on to the model's server: use HTTP."
            raise Refused(426, "invalid_request_error", "upgrade_refused", text, {"Upgrade": "HTTP/1.1"})
        if not is_own_host(request.headers.get("Host", "")):
            raise Refused(421, "invalid_request_error", "wrong_host", "This is no proxy for other hosts.")
        if request.method not in METHODS:
            text, headers = f"{request.method} is not passed on to the model's server.", {"Allow": ", ".join(METHODS)}
            raise Refused(405, "invalid_request_error", "method_refused", text, headers)
        place = place_of(request.raw_path)
        if place is None:
            raise Refused(404, "not_found_error", "not_found", "No model API is served under this path.")
        shown = presented(request.headers.items())
        grants = {form: grant for form, token in shown.items() if (grant := self._book.find(token))}
        if not grants:
            text = "This sandbox's token for its model is missing, wrong, or over with the sandbox that had it."
            raise Refused(401, "authentication_error", "invalid_token", text)
        name, rest, query = place
        grant = next((grant for grant in grants.values() if grant.route == name), None)
        if grant is None:
            raise Refused(404, "not_found_error", "not_found", "This token is for another model API.")
        if len(grant.requests) >= self._bounds.requests:
            text = f"{len(grant.requests)} requests of this sandbox are under way already."
            raise Refused(429, "rate_limit_error", "too_many_requests", text, {"Retry-After": "1"})
        if (request.content_length or 0) > self._bounds.body_bytes:
            raise self._too_large()
        same = [one for one in grants.values() if one.route == name and one.upstream == grant.upstream]
        keys: dict[Header, str] = {one.header: one.key for one in same}
        url = URL(grant.upstream.url(rest, query), encoded=True)
        return Admitted(grant, url, asked(request.headers.items(), [shown[form] for form in grants], keys))

    def _too_large(self) -> Refused:
        text = f"The request is larger than {self._bounds.body_bytes // MIB} MiB."
        return Refused(413, "request_too_large", "too_large", text)

    async def _pass_on(self, request: web.Request, admitted: Admitted) -> tuple[web.StreamResponse, str]:
        """Ask, and give the answer back; with the word under which that is counted.

        Raises:
            Refused: there is no answer, or none that may be given.
        """
        assert self._session is not None
        body, upstream = Body(request, self._bounds), admitted.grant.upstream
        try:
            async with self._session.request(
                request.method,
                admitted.url,
                headers=[*admitted.headers, *body.headers],
                data=body.pieces() if request.can_read_body else None,
                allow_redirects=False,
                proxy=self._proxy_for(upstream.scheme, f"{upstream.host}:{upstream.port}"),
            ) as answer:
                if answer.status in REDIRECTS:
                    text = f"{upstream.origin} answered with a redirect, which is not followed."
                    raise Refused(502, "api_error", "redirected", text)
                return await self._relay(request, answer, admitted.grant)
        except (ClientError, TimeoutError, OSError) as error:
            if body.too_large:
                raise self._too_large() from None
            log.warning("no answer of %s for %s: %s", upstream.origin, admitted.grant.harness, type(error).__name__)
            raise _no_answer(upstream, error) from None

    async def _relay(
        self, request: web.Request, answer: ClientResponse, grant: Grant
    ) -> tuple[web.StreamResponse, str]:
        """Pass an answer on as it comes, the key masked in it; one that breaks off breaks off for the agent too."""
        response = web.StreamResponse(status=answer.status)
        for name, value in told(answer.headers.items()):
            response.headers.add(name, grant.masks.text(value))
        meter, mask = BodyMeter(answer.headers.get("Content-Type", "")), StreamRedactor(grant.masks)
        await response.prepare(request)
        try:
            if request.method != "HEAD":
                async for chunk in answer.content.iter_any():
                    meter.feed(chunk)
                    await self._write(response, mask.feed(chunk.decode("latin-1")))
                await self._write(response, mask.flush())
            async with asyncio.timeout(self._bounds.idle_seconds):
                await response.write_eof()
            return response, f"{answer.status // 100}xx"
        except (ClientError, TimeoutError, OSError) as error:
            log.warning("the answer of %s broke off: %s", grant.upstream.origin, type(error).__name__)
            if request.transport is not None:
                request.transport.close()
            return response, "broken_off"
        finally:
            for kind, count in meter.end().items():
                self._metrics.add(MODEL_TOKENS, grant.project, grant.harness, kind, amount=count)

    async def _write(self, response: web.StreamResponse, text: str) -> None:
        if text:
            async with asyncio.timeout(self._bounds.idle_seconds):
                await response.write(text.encode("latin-1"))


class Body:
    """The body of a request on its way up."""

    def __init__(self, request: web.Request, bounds: Bounds) -> None:
        self._request = request
        self._bounds = bounds
        self.too_large = False

    @property
    def headers(self) -> list[tuple[str, str]]:
        """Its length, where it goes up as it came; a packed one has been unpacked."""
        packed = "content-encoding" in self._request.headers
        length = self._request.content_length
        known = self._request.can_read_body and length is not None and not packed
        return [("Content-Length", str(length))] if known else []

    async def pieces(self) -> AsyncIterator[bytes]:
        """As it comes; ends with ``ValueError`` where it is too large."""
        total = 0
        while True:
            async with asyncio.timeout(self._bounds.idle_seconds):
                piece = await self._request.content.readany()
            if not piece:
                return
            total += len(piece)
            if total > self._bounds.body_bytes:
                self.too_large = True
                raise ValueError("too large")
            yield piece


def _no_answer(upstream: Upstream, error: Exception) -> Refused:
    """What an agent is told; never words of a library, which may quote what was sent."""
    where = f"The model's server {upstream.origin}"
    if isinstance(error, SocketTimeoutError) or (
        isinstance(error, TimeoutError) and not isinstance(error, ServerTimeoutError)
    ):
        return Refused(504, "api_error", "upstream_silent", f"{where} did not answer in time.")
    if isinstance(error, ClientSSLError):
        return Refused(502, "api_error", "upstream_untrusted", f"{where} showed a certificate that is not trusted.")
    if isinstance(error, ClientConnectorDNSError):
        return Refused(502, "api_error", "upstream_unreachable", f"{where} has no address.")
    if isinstance(error, ClientConnectorError | ServerTimeoutError):
        return Refused(502, "api_error", "upstream_unreachable", f"{where} cannot be reached.")
    if isinstance(error, ClientConnectionError):
        return Refused(502, "api_error", "upstream_closed", f"{where} closed the connection without an answer.")
    return Refused(502, "api_error", "upstream_unreadable", f"{where} gave an answer that cannot be read.")
