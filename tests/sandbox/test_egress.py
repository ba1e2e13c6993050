"""``[local] network = proxy``: the only way out of a real cell (case J3)."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from runner.rules.egress import AllowList
from runner.rules.forwarding import ESTABLISHED
from runner.sandbox.egress import LOOKUPS, Bounds, Egress
from runner.sandbox.local import LocalProvider
from runner.sandbox.local_sandbox import LocalSandbox
from tests.sandbox import bed
from tests.sandbox.bed import Talk, spec, until

DIALER = (sys.executable, "-I", str(Path(__file__).with_name("dialer.py")))
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Outside:
    """A server on the machine's own loopback."""

    port: int
    seen: list[bytes] = field(default_factory=list)
    open: int = 0
    most: int = 0


@asynccontextmanager
async def outside(handler: Handler | None = None, tls: ssl.SSLContext | None = None) -> AsyncIterator[Outside]:
    """By default one that says everything back, and its end when it is told the other's."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.write(b"bye")

    serving: set[asyncio.Task[None]] = set()

    async def counted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        made.open += 1
        made.most = max(made.most, made.open)
        try:
            await (handler or echo)(reader, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            made.open -= 1
            serving.discard(task)
            writer.close()

    server = await asyncio.start_server(counted, "127.0.0.1", 0, ssl=tls)
    made = Outside(server.sockets[0].getsockname()[1])
    try:
        yield made
    finally:
        server.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


class Cell:
    """A cell with a dialer in it."""

    def __init__(self, sandbox: LocalSandbox) -> None:
        self.sandbox = sandbox
        self.talk = Talk(sandbox)

    async def do(self, what: str, name: str = "c", **more: Any) -> Any:
        return json.loads(await self.talk.say(json.dumps({"do": what, "id": name, **more})))

    async def proxied(self, text: str, name: str = "c") -> Any:
        """Open a connection to the proxy and send a head."""
        await self.do("open", name, port=self.port)
        await self.do("send", name, text=text.replace("\n", "\r\n") + "\r\n\r\n")

    async def tunnel(self, target: str, name: str = "c") -> str:
        """The status line of the answer to a CONNECT, with its empty line."""
        await self.proxied(f"CONNECT {target} HTTP/1.1", name)
        return str(await self.do("recv", name, count=len(ESTABLISHED)))

    @property
    def port(self) -> int:
        return self.egress.ports[0]

    @property
    def egress(self) -> Egress:
        assert self.sandbox._bounds.egress is not None
        return self.sandbox._bounds.egress


Open = Callable[..., Awaitable[Cell]]


@pytest.fixture
async def cell(tmp_path: Path, store_id: str) -> AsyncIterator[Open]:
    """Makes cells that may connect to what is named; nothing is left of them, in them or here."""
    before = bed.descriptors()
    made: list[LocalProvider] = []

    async def start(*allowed: str, own: tuple[int, ...] = ()) -> Cell:
        provider = bed.local(tmp_path / "state", f"{store_id}{len(made)}", level="cell")
        provider._bounds = replace(provider._bounds, network="proxy", allowed=AllowList.of(allowed))
        provider.own_ports = lambda: own
        made.append(provider)
        return Cell(await provider.start(spec(f"seat_{len(made)}", *DIALER, read=(Path(DIALER[-1]),))))

    yield start
    for provider in made:
        await provider.close()
        assert provider.live == ()
    await until(lambda: bed.descriptors() <= before)


async def test_a_name_that_is_allowed_is_reached_through_a_tunnel_and_each_end_ends_alone(cell: Open) -> None:
    async with outside() as server:
        inside = await cell(f"localhost:{server.port}", f"127.0.0.1:{server.port}")
        assert await inside.tunnel(f"localhost:{server.port}") == ESTABLISHED.decode()
        await inside.do("send", text="hello")
        assert await inside.do("recv", count=5) == "hello"
        await inside.do("shut")
        assert await inside.do("recv") == "bye"
        await until(lambda: inside.egress.connections == 0)
        assert server.open == 0


async def test_what_is_not_allowed_is_refused_with_the_reason_case_j3(cell: Open) -> None:
    async with outside() as server:
        inside = await cell("api.example", f"localhost:{server.port}")
        for number, (target, why) in enumerate(
            {
                "evil.example:443": "evil.example:443 is not in [local] allow_hosts",
                f"127.0.0.1:{server.port}": "is not allowed",
                f"[::ffff:127.0.0.1]:{server.port}": "is not allowed",
                "169.254.169.254:80": "is not allowed",
                f"2130706433:{server.port}": "a spelling that is not understood",
                # The name is allowed, and leads into the machine.
                f"localhost:{server.port}": "has no address that",
            }.items()
        ):
            await inside.proxied(f"CONNECT {target} HTTP/1.1", str(number))
            said = await inside.do("recv", str(number))
            assert said.startswith(("HTTP/1.1 403 ", "HTTP/1.1 400 ")), (target, said)
            assert why in said, (target, said)
        assert server.most == 0


async def test_there_is_no_other_way_out(cell: Open) -> None:
    async with outside() as server:
        inside = await cell("api.example")
        assert await inside.do("open", port=server.port) == "ConnectionRefusedError"
        assert await inside.do("open", host="192.0.2.1", port=80) == "OSError"


async def test_the_address_that_was_checked_is_the_one_that_is_connected_to_case_j3(
    cell: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that answers with a public address first and the machine's own the second time."""
    asked: list[str] = []
    real = socket.getaddrinfo

    def flipping(host: Any, port: Any, *words: Any, **more: Any) -> Any:
        if host != "flip.example":
            return real(host, port, *words, **more)
        asked.append(host)
        return real("127.0.0.1" if len(asked) > 1 else "192.88.99.1", port, *words, **more)

    dialled: list[Any] = []
    opened = asyncio.open_connection

    async def connect(host: Any = None, port: Any = None, **more: Any) -> Any:
        if "sock" in more:
            return await opened(**more)
        dialled.append((host, port))
        raise OSError("there is no network here")

    monkeypatch.setattr(socket, "getaddrinfo", flipping)
    inside = await cell("flip.example")
    monkeypatch.setattr(asyncio, "open_connection", connect)
    await inside.proxied("CONNECT flip.example:443 HTTP/1.1", "a")
    assert (await inside.do("recv", "a")).startswith("HTTP/1.1 502 ")
    await inside.proxied("CONNECT flip.example:443 HTTP/1.1", "b")
    assert (await inside.do("recv", "b")).startswith("HTTP/1.1 403 ")
    assert dialled == [("192.88.99.1", 443)]


async def test_names_that_take_long_hold_up_nobody_else(cell: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever serves an allowed name may be slow on purpose; the runner's other work needs threads, too."""
    inside, gate, real, asked = await cell("*.slow.example"), threading.Event(), socket.getaddrinfo, []

    def slow(host: Any, *words: Any, **more: Any) -> Any:
        if not str(host).endswith(".slow.example"):
            return real(host, *words, **more)
        asked.append(host)
        gate.wait(bed.SECONDS)
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    try:
        for number in range(40):
            await inside.proxied(f"CONNECT n{number}.slow.example:443 HTTP/1.1", str(number))
        await until(lambda: len(asked) == LOOKUPS and inside.egress.connections == 40)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), bed.SECONDS / 2) == "free"
    finally:
        gate.set()
    assert (await inside.do("recv", "39")).startswith("HTTP/1.1 502 ")


async def test_of_answers_that_are_not_the_last_no_more_than_one_waits() -> None:
    """A server that sends them without end costs no memory while the client reads nothing."""
    egress, written, gate = Egress("c", AllowList()), [], asyncio.Event()

    class Writer:
        def write(self, data: bytes) -> None:
            written.append(data)

        async def drain(self) -> None:
            await gate.wait()

        def can_write_eof(self) -> bool:
            return False

    there = asyncio.StreamReader()
    there.feed_data(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100 + b"HTTP/1.1 200 OK\r\n\r\n")
    there.feed_eof()
    work = asyncio.create_task(egress._answered(there, Writer()))  # type: ignore[arg-type]
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(written) == 1
    gate.set()
    await work
    assert len(written) == 101
    await egress.close()


async def test_a_plain_request_is_passed_on_and_ends_its_connection(cell: Open) -> None:
    async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.seen.append(await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(4))
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nConnection: keep-alive\r\n\r\n" + b"x" * 100_000)

    async with outside(http) as server:
        inside = await cell(f"127.0.0.1:{server.port}")
        where = f"127.0.0.1:{server.port}"
        await inside.proxied(f"POST http://{where}/a?b HTTP/1.1\nHost: other\nContent-Length: 4")
        await inside.do("send", text="body")
        said = await inside.do("recv")
        head = (
            b"POST /a?b HTTP/1.1\r\nHost: " + where.encode() + b"\r\nConnection: close\r\nContent-Length: 4\r\n\r\nbody"
        )
        assert server.seen == [head]
        assert said.startswith("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        assert said.endswith("x" * 100_000)


async def test_what_is_no_request_is_answered_and_an_endless_head_is_cut(cell: Open) -> None:
    inside = await cell("api.example")
    await inside.proxied("GET / HTTP/1.1\nHost: api.example", "a")
    assert "send the whole http:// address" in await inside.do("recv", "a")
    await inside.do("open", "b", port=inside.port)
    await inside.do("send", "b", text="x" * 1000, times=100)
    assert (await inside.do("recv", "b")).startswith("HTTP/1.1 400 ")


async def test_nobody_listens_where_it_is_allowed(cell: Open) -> None:
    async with outside() as server:
        port = server.port
    inside = await cell(f"127.0.0.1:{port}", f"localhost:{port}")
    await inside.proxied(f"CONNECT localhost:{port} HTTP/1.1")
    assert (await inside.do("recv")).startswith("HTTP/1.1 502 ")


async def test_ports_of_the_machine_that_are_named_are_at_the_cells_own_loopback(cell: Open) -> None:
    async with outside() as server, outside() as other, outside() as own:
        inside = await cell(f"127.0.0.1:{server.port}", own=(own.port,))
        for name, port in (("a", server.port), ("b", own.port)):
            assert await inside.do("open", name, port=port) == "ok"
            await inside.do("send", name, text="hello")
            assert await inside.do("recv", name, count=5) == "hello"
            await inside.do("shut", name)
            assert await inside.do("recv", name) == "bye"
        assert await inside.do("open", port=other.port) == "ConnectionRefusedError"


async def test_programs_are_told_of_the_proxy(cell: Open) -> None:
    inside = await cell("api.example")
    for name in ("HTTP_PROXY", "https_proxy", "ALL_PROXY"):
        assert await inside.do("env", variable=name) == f"http://127.0.0.1:{inside.port}"
    assert "127.0.0.1" in await inside.do("env", variable="NO_PROXY")


async def test_tls_goes_through_from_end_to_end(cell: Open, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command = ["openssl", "req", *words, *names, "-keyout", str(key), "-out", str(certificate)]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)

    async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecret")

    async with outside(http, tls) as server:
        inside = await cell(f"localhost:{server.port}", f"127.0.0.1:{server.port}")
        fetch = (
            "import ssl, sys, urllib.request as r; c = ssl.create_default_context(cafile=sys.argv[1]);"
            "o = r.build_opener(r.ProxyHandler({'https': sys.argv[3]}), r.HTTPSHandler(context=c));"
            "print(o.open(sys.argv[2], timeout=20).read())"
        )
        ca = Path(inside.sandbox.workspace) / "ca.pem"
        ca.write_bytes(certificate.read_bytes())
        heard: list[bytes] = []
        argv = [sys.executable, "-I", "-c", fetch, str(ca), f"https://localhost:{server.port}/"]
        ran = await inside.sandbox.run("fetch", [*argv, f"http://127.0.0.1:{inside.port}"], heard.append)
        assert (ran.code, b"".join(heard)) == (0, b"b'secret'\n")


async def test_a_client_that_goes_away_takes_its_connection_outside_along(cell: Open) -> None:
    gone = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        gone.set()

    async with outside(silent) as server:
        inside = await cell(f"127.0.0.1:{server.port}")
        await inside.tunnel(f"127.0.0.1:{server.port}")
        await until(lambda: server.open == 1)
        await inside.do("close")
        await asyncio.wait_for(gone.wait(), bed.SECONDS)


async def test_the_end_of_a_cell_ends_its_connections(cell: Open) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with outside(silent) as server:
        inside = await cell(f"127.0.0.1:{server.port}")
        await inside.tunnel(f"127.0.0.1:{server.port}")
        await until(lambda: server.open == 1)
        assert (await inside.sandbox.destroy()).proven
        await until(lambda: server.open == 0)
        assert inside.egress.connections == 0


async def test_connections_are_bounded(cell: Open) -> None:
    async with outside() as server:
        inside = await cell(f"127.0.0.1:{server.port}")
        inside.egress._bounds = Bounds(connections=3)
        for number in range(3):
            assert "200" in await inside.tunnel(f"127.0.0.1:{server.port}", str(number))
        await inside.do("open", "more", port=inside.port)
        assert await inside.do("recv", "more") in ("", "ConnectionResetError")
        await inside.do("close", "0")
        await until(lambda: inside.egress.connections == 2)
        assert "200" in await inside.tunnel(f"127.0.0.1:{server.port}", "again")


async def test_much_goes_through_although_nobody_reads_for_a_while(cell: Open) -> None:
    """What waits is bounded by the sockets: the proxy keeps none of it."""

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(256):
            writer.write(b"x" * 65536)
            await writer.drain()

    async with outside(flood) as server:
        inside = await cell(f"127.0.0.1:{server.port}")
        await inside.tunnel(f"127.0.0.1:{server.port}")
        assert await inside.do("size") == 256 * 65536
