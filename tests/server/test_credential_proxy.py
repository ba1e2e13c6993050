"""The credential proxy, over real sockets, before a model's server that does what it is told."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession, web

from runner.harness.spec import HarnessSpec, Resolved
from runner.metrics import MODEL_REQUESTS, MODEL_TOKENS, Metrics
from runner.rules.credentials import KeyRoute, host_pattern
from runner.server.credential_proxy import Bounds, CredentialProxy
from runner.session.effective import Effective
from runner.session.keys import KeyBook
from runner.turn.leased import Leased

KEY = "sk-real-key-of-the-test"
SECONDS = 20.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Upstream:
    """A server at loopback; ``handler`` answers, ``seen`` is what came."""

    def __init__(self) -> None:
        self.handler: Handler = self._echo
        self.seen: list[web.Request] = []
        self.bodies: list[bytes] = []
        self.closed = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/base/v1"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request)
        try:
            return await self.handler(request)
        except asyncio.CancelledError:
            self.closed.set()
            raise

    async def _echo(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.read())
        return web.json_response({"ok": True}, headers={"Set-Cookie": "a=b", "request-id": "r1"})


class Bed:
    """A proxy whose one cell has ``token`` for ``KEY`` at the upstream."""

    def __init__(self, upstream: Upstream, **bounds: Any) -> None:
        self.upstream = upstream
        self.metrics = Metrics()
        self.book = KeyBook([host_pattern("127.0.0.1")])
        self.proxy = CredentialProxy(self.book, self.metrics, bounds=Bounds(**({"connect_seconds": 5.0} | bounds)))
        self.client = ClientSession()
        self.leased = Leased()

    async def start(self) -> None:
        await self.proxy.start()
        self.leased = self.lease()

    def lease(self, session: str = "s", key: str = KEY, **env: str) -> Leased:
        given = {"MODEL_URL": self.upstream.url} | env
        return self.book.lease(SPEC, Effective({"env": given}, {"MODEL_KEY": key}), ("p", session))

    @property
    def token(self) -> str:
        return self.leased.variables["MODEL_KEY"]

    @property
    def base(self) -> str:
        return self.leased.variables["MODEL_URL"]

    def ask(self, path: str = "/responses", method: str = "POST", **more: Any) -> Any:
        headers = {"Authorization": f"Bearer {self.token}"} | more.pop("headers", {})
        return self.client.request(method, self.base + path, headers=headers, **more)

    def results(self) -> dict[tuple[str, ...], float]:
        return self.metrics.numbers().get(MODEL_REQUESTS, {})

    async def close(self) -> None:
        await self.client.close()
        await self.proxy.close()


def _resolve(_: Any) -> Resolved:
    return Resolved(("true",))


SPEC = HarnessSpec(
    "mine",
    "Mine",
    _resolve,
    routes=(
        KeyRoute("model", {"MODEL_KEY": "bearer", "OTHER_KEY": "x-api-key"}, ("MODEL_URL",), "https://m.example/v1"),
    ),
)


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    made = Upstream()
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def bed(upstream: Upstream) -> AsyncIterator[Bed]:
    made = Bed(upstream)
    await made.start()
    yield made
    await made.close()


@pytest.fixture
async def narrow(upstream: Upstream) -> AsyncIterator[Bed]:
    """One whose bounds are small."""
    made = Bed(upstream, body_bytes=1000, requests=2, idle_seconds=0.3)
    await made.start()
    yield made
    await made.close()


async def test_the_key_takes_the_tokens_place(bed: Bed, upstream: Upstream) -> None:
    more = {"Cookie": "c=1", "anthropic-version": "x", "X-Forwarded-For": "1.2.3.4", "Accept-Encoding": "gzip"}
    async with bed.ask("/responses?a=%20b", json={"model": "m"}, headers=more) as answer:
        assert (answer.status, await answer.json()) == (200, {"ok": True})
        assert (answer.headers["request-id"], answer.headers.get("Set-Cookie")) == ("r1", None)
    (seen,) = upstream.seen
    assert seen.raw_path == "/base/v1/responses?a=%20b"
    assert seen.headers["Authorization"] == f"Bearer {KEY}"
    assert seen.headers["anthropic-version"] == "x"
    assert seen.headers["Accept-Encoding"] == "identity"
    assert seen.headers["Content-Length"] == str(len(upstream.bodies[0]))
    assert not {"Cookie", "X-Forwarded-For", "Transfer-Encoding"} & set(seen.headers)
    assert bed.token not in str(seen.headers)
    assert json.loads(upstream.bodies[0]) == {"model": "m"}
    assert bed.results() == {("mine", "2xx"): 1}


async def test_each_form_of_a_key(bed: Bed, upstream: Upstream) -> None:
    """Two keys of one sandbox, each as its harness sends it; one that is unknown is dropped."""
    effective = Effective({"env": {"MODEL_URL": upstream.url}}, {"MODEL_KEY": KEY, "OTHER_KEY": "sk-other-key"})
    both = bed.book.lease(SPEC, effective, ("p", "t"))
    bearer = {"Authorization": f"Bearer {both.variables['MODEL_KEY']}"}
    other = {"x-api-key": both.variables["OTHER_KEY"]}
    for headers in (bearer | other, other, bearer | {"x-api-key": "of the agent"}):
        async with bed.client.get(bed.base + "/models", headers=headers) as answer:
            assert answer.status == 200
    shown = [(seen.headers.get("Authorization"), seen.headers.get("x-api-key")) for seen in upstream.seen]
    assert shown == [(f"Bearer {KEY}", "sk-other-key"), (None, "sk-other-key"), (f"Bearer {KEY}", None)]


@pytest.mark.parametrize("other", ["", "a"])
async def test_what_is_no_token_takes_nothing_along(bed: Bed, upstream: Upstream, other: str) -> None:
    async with bed.ask(headers={"x-api-key": other, "anthropic-version": "a"}) as answer:
        assert answer.status == 200
    assert upstream.seen[0].headers["anthropic-version"] == "a"


async def test_a_large_body_goes_up_and_comes_down_piece_by_piece(bed: Bed, upstream: Upstream) -> None:
    body = bytes(range(256)) * 80_000

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.content_length in (len(body), None)
        response = web.StreamResponse()
        await response.prepare(request)
        async for piece in request.content.iter_any():
            await response.write(piece)
        await response.write_eof()
        return response

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 1 << 20):
            yield body[at : at + (1 << 20)]

    upstream.handler = answer
    for data in (io.BytesIO(body), pieces()):
        async with bed.ask(data=data) as got:
            assert await got.read() == body


async def test_what_the_model_says_is_there_at_once(bed: Bed, upstream: Upstream) -> None:
    go_on = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: one\n\n")
        await go_on.wait()
        await response.write(b'data: {"usage": {"prompt_tokens": 11, "completion_tokens": 7}}\n\n')
        return response

    upstream.handler = answer
    async with asyncio.timeout(SECONDS), bed.ask() as got:
        assert await got.content.readany() == b"data: one\n\n"
        go_on.set()
        assert b"usage" in await got.read()
    assert bed.metrics.numbers()[MODEL_TOKENS] == {("p", "mine", "input"): 11, ("p", "mine", "output"): 7}


@pytest.mark.parametrize("when", ["before_the_head", "in_the_body"])
async def test_an_agent_that_gives_up_closes_the_models_request(bed: Bed, upstream: Upstream, when: str) -> None:
    began = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if when == "in_the_body":
            await response.prepare(request)
            await response.write(b"one")
        began.set()
        await asyncio.sleep(SECONDS)
        return response

    upstream.handler = answer

    async def asks() -> None:
        async with bed.ask(data=b"x") as got:
            await got.read()

    async with asyncio.timeout(SECONDS):
        task = asyncio.create_task(asks())
        await began.wait()
        task.cancel()
        await asyncio.wait({task})
        await upstream.closed.wait()
        while bed.results() != {("mine", "given_up"): 1}:
            await asyncio.sleep(0.01)


async def test_the_end_of_the_sandbox_ends_its_token_and_its_requests(bed: Bed, upstream: Upstream) -> None:
    began = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        began.set()
        await asyncio.sleep(SECONDS)
        return web.Response()

    upstream.handler = answer
    other = bed.lease("other")

    async def asks() -> str:
        try:
            async with bed.ask() as got:
                return str(got.status)
        except ClientError:
            return "cut"

    async with asyncio.timeout(SECONDS):
        task = asyncio.create_task(asks())
        await began.wait()
        bed.leased.end()
        bed.leased.end()
        assert await task == "cut"
        await upstream.closed.wait()
    upstream.handler = upstream._echo
    async with bed.ask() as got:
        assert got.status == 401
    headers = {"Authorization": f"Bearer {other.variables['MODEL_KEY']}"}
    async with bed.client.get(bed.base, headers=headers) as got:
        assert got.status == 200
    assert len(bed.book) == 1


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "no token": ({"headers": {"Authorization": ""}}, 401, "authentication_error"),
    "wrong token": ({"headers": {"Authorization": "Bearer acp-cell-wrong"}}, 401, "authentication_error"),
    "the key itself": ({"headers": {"Authorization": f"Bearer {KEY}"}}, 401, "authentication_error"),
    "other form": ({"headers": {"Authorization": "Basic dTpw"}}, 401, "authentication_error"),
    "other host": ({"headers": {"Host": "evil.example"}}, 421, "invalid_request_error"),
    "method": ({"method": "DELETE"}, 405, "invalid_request_error"),
    "WebSocket": (
        {"method": "GET", "headers": {"Upgrade": "websocket", "Connection": "Upgrade"}},
        426,
        "invalid_request_error",
    ),
    "too large": ({"data": b"x" * 1001}, 413, "request_too_large"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_refused_reaches_nobody(narrow: Bed, upstream: Upstream, name: str) -> None:
    given, status, kind = REFUSED[name]
    async with narrow.ask(**given) as answer:
        told = await answer.json()
        assert (answer.status, told["type"], told["error"]["type"]) == (status, "error", kind)
        assert told["error"]["message"]
        assert KEY not in str(told)
    assert upstream.seen == []


@pytest.mark.parametrize(
    "target",
    ["/", "/other/responses", "/model/../model/x", "/model/%2e%2e/x", "//model/x", "http://evil.example/model/x"],
)
async def test_no_other_path_is_served(bed: Bed, upstream: Upstream, target: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", bed.book.port)
    head = f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {bed.token}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode())
    async with asyncio.timeout(SECONDS):
        answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 404"), answer
    assert upstream.seen == []


async def test_a_tunnel_is_refused(bed: Bed) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", bed.book.port)
    writer.write(f"CONNECT evil.example:443 HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Api-Key: {bed.token}\r\n\r\n".encode())
    async with asyncio.timeout(SECONDS):
        assert (await reader.readline()).split()[1] in (b"400", b"404", b"405", b"426")
    writer.close()


async def test_a_body_that_grows_too_large_under_way(narrow: Bed, upstream: Upstream) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * 500
            await asyncio.sleep(0.01)

    async with narrow.ask(data=pieces()) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (413, "too_large")
    packed = gzip.compress(b"x" * 100_000)
    assert len(packed) < 1000
    async with narrow.ask(data=packed, headers={"Content-Encoding": "gzip"}) as answer:
        assert answer.status == 413
    assert upstream.bodies == []


async def test_a_packed_body_goes_up_unpacked(bed: Bed, upstream: Upstream) -> None:
    async with bed.ask(data=gzip.compress(b"hello"), headers={"Content-Encoding": "gzip"}) as answer:
        assert answer.status == 200
    assert upstream.bodies == [b"hello"]


async def test_so_many_requests_at_a_time(narrow: Bed, upstream: Upstream) -> None:
    began, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"one")
        began.release()
        await go_on.wait()
        return response

    upstream.handler = answer

    async def asks() -> int:
        async with narrow.ask() as got:
            await got.read()
            return int(got.status)

    async with asyncio.timeout(SECONDS):
        tasks = [asyncio.create_task(asks()) for _ in range(2)]
        for _ in tasks:
            await began.acquire()
        async with narrow.ask() as got:
            assert (got.status, got.headers["Retry-After"]) == (429, "1")
        go_on.set()
        assert await asyncio.gather(*tasks) == [200, 200]


async def test_a_server_that_is_away(bed: Bed, upstream: Upstream, caplog: pytest.LogCaptureFixture) -> None:
    await upstream.stop()
    with caplog.at_level(logging.DEBUG):
        async with bed.ask(data=b"x") as answer:
            told = await answer.json()
    assert (answer.status, told["error"]["code"]) == (502, "upstream_unreachable")
    origin = upstream.url.removesuffix("/base/v1")
    assert told["error"]["message"] == f"The model's server {origin} cannot be reached."
    assert KEY not in caplog.text
    assert bed.token not in caplog.text
    assert bed.results() == {("mine", "upstream_unreachable"): 1}


async def test_a_server_that_says_nothing(narrow: Bed, upstream: Upstream) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(SECONDS)
        return web.Response()

    upstream.handler = answer
    async with narrow.ask() as got:
        assert (got.status, (await got.json())["error"]["code"]) == (504, "upstream_silent")


async def test_a_redirect_is_not_followed(bed: Bed, upstream: Upstream) -> None:
    """Case J3: the key is shown to nobody whom the operator did not name."""

    async def answer(request: web.Request) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect("http://127.0.0.1:1/elsewhere")

    upstream.handler = answer
    async with bed.ask(allow_redirects=False) as got:
        assert (got.status, (await got.json())["error"]["code"]) == (502, "redirected")
        assert "Location" not in got.headers
    assert len(upstream.seen) == 1


@pytest.mark.parametrize("how", ["cut", "silent"])
async def test_an_answer_that_breaks_off_breaks_off_for_the_agent(narrow: Bed, upstream: Upstream, how: str) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"one")
        if how == "silent":
            await asyncio.sleep(SECONDS)
        assert request.transport is not None
        request.transport.close()
        return response

    upstream.handler = answer
    with pytest.raises(ClientError):
        async with narrow.ask() as got:
            await got.read()
    assert narrow.results() == {("mine", "broken_off"): 1}


@pytest.mark.parametrize("size", [1, 3, 7, 100])
async def test_an_echoed_key_is_masked_wherever_it_is_cut_case_k2(bed: Bed, upstream: Upstream, size: int) -> None:
    text = f'\x00\xff"{KEY}" and {KEY[:-1]} and {KEY}'.encode("latin-1")

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=400, headers={"X-Echo": f"Bearer {KEY}"})
        await response.prepare(request)
        for at in range(0, len(text), size):
            await response.write(text[at : at + size])
        return response

    upstream.handler = answer
    async with bed.ask() as got:
        body = await got.read()
    assert body == text.replace(KEY.encode(), b"[secret]")
    assert got.headers["X-Echo"] == "Bearer [secret]"


async def test_an_answer_that_comes_packed_all_the_same_is_unpacked(bed: Bed, upstream: Upstream) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        packed = gzip.compress(f"my {KEY}".encode())
        return web.Response(body=packed, headers={"Content-Encoding": "gzip", "Content-Type": "text/plain"})

    upstream.handler = answer
    async with bed.ask() as got:
        assert await got.text() == "my [secret]"


async def test_a_head_has_no_body(bed: Bed, upstream: Upstream) -> None:
    async with bed.ask("", method="HEAD") as got:
        assert (got.status, await got.read()) == (200, b"")


async def test_it_is_gone_with_the_runner(upstream: Upstream) -> None:
    bed = Bed(upstream)
    await bed.start()
    port = bed.book.port
    await bed.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
