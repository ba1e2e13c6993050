"""One request to another replica: sent at most once, and never left waiting for one that froze (DESIGN 3.1.10)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, Protocol
from urllib.parse import urlsplit

import orjson
from aiohttp import (
    ClientConnectorError,
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    ConnectionTimeoutError,
    DummyCookieJar,
    InvalidURL,
    TCPConnector,
    web,
)
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from runner.errors import RunnerError, owned_elsewhere
from runner.leases.port import ReplicaInfo
from runner.session.owners import Elsewhere
from runner.wire.problems import error_of

FORWARDED: Final = "X-Acp-Runner-Forwarded"
CONNECT_SECONDS: Final = 1.0
TAKE_SECONDS: Final = 2.0
READ_SECONDS: Final = 10.0
WATCH_SECONDS: Final = 1.0
PIECE: Final = 64 * 1024
REPEATABLE: Final = frozenset({"GET", "HEAD", "PUT", "DELETE"})
_HOP: Final = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding"}
    | {"upgrade", "content-length", "proxy-connection"}
)
# The first replica has checked Origin and unpacked the body; Host and Expect belong to one connection.
_NOT_UP: Final = _HOP | {"host", "origin", "expect", "content-encoding", FORWARDED.lower()}
_AUTOMATIC: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")

Still = Callable[[], Awaitable[bool]]
"""Whether the replica that was asked may still answer: nobody else has taken the session."""


class Whereabouts(Protocol):
    """What the server asks about owners; ``runner.session.owners.Owners`` answers."""

    @property
    def me(self) -> ReplicaInfo:
        """This replica."""
        ...

    @property
    def shared(self) -> bool:
        """Whether there may be other replicas."""
        ...

    async def elsewhere(self, project: str, session_id: str) -> Elsewhere | None:
        """The other replica that holds a session; None when this one does or nobody."""
        ...

    async def unsettled(self, project: str, session_id: str) -> bool:
        """Whether another replica's turn of a session has no ending yet."""
        ...

    async def gone(self, replica_id: str) -> bool:
        """Whether a replica is provably gone; then its leases are free and its turns have their ending."""
        ...


class Unreached(Exception):
    """Nothing of the request has taken effect at the other replica."""


class Broken(Exception):
    """The other replica went away behind a request that it may have taken."""


class Peers:
    """Connections to other replicas; each request has its own, so that none is sent on one that is half closed."""

    def __init__(self, owners: Whereabouts) -> None:
        self._owners = owners
        self._http: ClientSession | None = None

    async def close(self) -> None:
        """Close every connection; idempotent."""
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    async def ask(
        self,
        target: Elsewhere,
        method: str,
        path: str,
        headers: CIMultiDict[str],
        *,
        body: bytes = b"",
        still: Still | None = None,
        patience: float | None = None,
    ) -> ClientResponse:
        """Send one request and wait for the head of its answer; closing the answer is the caller's.

        A request with a body goes out behind ``100 Continue``: a process that is frozen holds its head, never its
        body, and so does nothing with it when it wakes.

        Args:
            target: whom to ask.
            method: of the request.
            path: with the query, percent-encoded as it came.
            headers: of ``headers_up``.
            body: whole.
            still: asked each second while a request that may have taken effect has no answer.
            patience: longest wait for the answer to a request that may be repeated; None: ``READ_SECONDS``.

        Raises:
            Unreached: nothing was done there, or the request may be repeated.
            Broken: it may have been done.
        """
        started = asyncio.Event()
        url = self._url(target, path)
        up = headers.copy()
        up[FORWARDED] = self._owners.me.replica_id
        up["Content-Length"] = str(len(body))
        asking = asyncio.ensure_future(
            self._session().request(
                method,
                url,
                headers=up,
                data=_pieces(body, started) if body else None,
                expect100=bool(body),
                allow_redirects=False,
                skip_auto_headers=_AUTOMATIC,
            )
        )
        try:
            longest = (READ_SECONDS if patience is None else patience) if method in REPEATABLE else None
            await self._head(asking, started, longest, sends=bool(body), still=still)
            return asking.result()
        except (ClientConnectorError, ConnectionTimeoutError, InvalidURL) as error:
            raise Unreached(str(error)) from error
        except (ClientError, OSError, TimeoutError) as error:
            if method in REPEATABLE or (body and not started.is_set()):
                raise Unreached(str(error)) from error
            raise Broken(str(error)) from error
        except BaseException:
            _drop(asking)
            raise

    async def _head(
        self,
        asking: asyncio.Future[ClientResponse],
        started: asyncio.Event,
        longest: float | None,
        *,
        sends: bool,
        still: Still | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            done, _ = await asyncio.wait({asking}, timeout=WATCH_SECONDS)
            if done:
                return
            waited = loop.time() - began
            if sends and not started.is_set():
                if waited >= TAKE_SECONDS:
                    raise Unreached("it does not take the request")
            elif longest is not None:
                if waited >= longest:
                    raise Unreached("it does not answer")
            elif still is not None and not await still():
                raise Broken("another replica has taken the session")

    def _url(self, target: Elsewhere, path: str) -> URL:
        base = (target.advertise_url or "").rstrip("/")
        parts = urlsplit(base)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise Unreached("it has no address")
        if base == (self._owners.me.advertise_url or "").rstrip("/"):
            raise Unreached("its address is this replica's own")
        return URL(base + path, encoded=True)

    def _session(self) -> ClientSession:
        if self._http is None:
            self._http = ClientSession(
                connector=TCPConnector(limit=0, force_close=True),
                cookie_jar=DummyCookieJar(),
                auto_decompress=False,
                timeout=ClientTimeout(total=None, connect=CONNECT_SECONDS, sock_connect=CONNECT_SECONDS),
            )
        return self._http


async def _pieces(body: bytes, started: asyncio.Event) -> AsyncIterator[bytes]:
    started.set()
    for start in range(0, len(body), PIECE):
        yield body[start : start + PIECE]


def _drop(asking: asyncio.Future[ClientResponse]) -> None:
    """Give a request up; an answer that comes all the same is closed."""

    def close(done: asyncio.Future[ClientResponse]) -> None:
        if not done.cancelled() and done.exception() is None:
            done.result().close()

    asking.cancel()
    asking.add_done_callback(close)


class Chunks:
    """The body of an answer as it arrives."""

    def __init__(self, response: ClientResponse) -> None:
        self._response = response
        self._read: asyncio.Task[bytes] | None = None

    async def next(self, seconds: float) -> bytes | None:
        """What has arrived: None after ``seconds`` of silence, empty at the end.

        Raises:
            Broken: the other replica is gone, or has cut the answer.
        """
        if self._read is None:
            self._read = asyncio.create_task(self._response.content.readany(), name="forwarded answer")
        done, _ = await asyncio.wait({self._read}, timeout=seconds)
        if not done:
            return None
        read, self._read = self._read, None
        try:
            return read.result()
        except (ClientError, OSError, TimeoutError) as error:
            raise Broken(str(error)) from error

    def close(self) -> None:
        """Close the connection; the other replica detaches its reader."""
        if self._read is not None:
            self._read.cancel()
            self._read = None
        self._response.close()


async def whole(chunks: Chunks) -> bytes:
    """A short answer to its end, and closed; what breaks off or is longer than 64 KiB is empty."""
    body = b""
    try:
        while chunk := await chunks.next(READ_SECONDS):
            body += chunk
            if len(body) > PIECE:
                return b""
        return body
    except Broken:
        return b""
    finally:
        chunks.close()


def error_in(body: bytes, target: Elsewhere) -> RunnerError:
    """The error of a problem document; what is none says that the owner is not reached."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = None
    return error_of(document) if isinstance(document, dict) else held_by(target)


def path_of(request: web.Request) -> str:
    """A request's path and query as they came."""
    url = request.rel_url
    return f"{url.raw_path}?{url.raw_query_string}" if url.raw_query_string else url.raw_path


def headers_up(request: web.Request) -> CIMultiDict[str]:
    """The client's headers as the other replica gets them."""
    return _kept(request.headers, _NOT_UP)


def headers_down(response: ClientResponse) -> CIMultiDict[str]:
    """The other replica's headers as the client gets them."""
    return _kept(response.headers, _HOP)


def _kept(headers: CIMultiDictProxy[str], dropped: frozenset[str]) -> CIMultiDict[str]:
    named = {name.strip().lower() for value in headers.getall("Connection", ()) for name in value.split(",")}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped | named)


def held_by(target: Elsewhere, message: str | None = None) -> RunnerError:
    """The retryable refusal that names the owner (DESIGN 3.1.10)."""
    text = message or "The replica that holds this session cannot be reached; it is being recovered. Try again."
    return owned_elsewhere(text, target.replica_id)
