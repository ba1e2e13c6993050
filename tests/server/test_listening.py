"""Connections on which nothing is said, which anybody who reaches the port can open (DESIGN 3.11: all is bounded)."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from runner.server import listening
from runner.server.app import start_site, stop_site
from runner.server.listening import Listener, most_connections

ASKED = b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n"
SECONDS = 10.0


@pytest.fixture
async def site(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Listener]:
    monkeypatch.setattr(listening, "HEAD_SECONDS", 0.2)

    async def handler(request: web.Request) -> web.Response:
        await asyncio.sleep(float(request.query.get("seconds", 0)))
        return web.Response(text="served")

    app = web.Application()
    app.router.add_get("/x", handler)
    monkeypatch.setattr("runner.server.app.most_connections", lambda share: 3)
    made, _ = await start_site(app, "127.0.0.1", 0)
    assert isinstance(made, Listener)
    yield made
    await stop_site(made)


async def connect(site: Listener) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", site.addresses[0][1])


async def ended(reader: asyncio.StreamReader) -> bytes:
    """All until the end of a connection."""
    async with asyncio.timeout(SECONDS):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


@pytest.mark.parametrize("said", [b"", b"GET /x HTTP/1.1\r\nHost: h\r\n"])
async def test_a_head_that_does_not_come_ends_its_connection(site: Listener, said: bytes) -> None:
    reader, writer = await connect(site)
    writer.write(said)
    assert await ended(reader) == b""
    writer.close()


async def test_a_head_in_pieces_and_all_behind_it_take_their_time(site: Listener) -> None:
    reader, writer = await connect(site)
    for piece in (b"GET /x?seconds=0.5 HTTP/1.1\r\nHost: h\r", b"\n\r", b"\n"):
        writer.write(piece)
        await asyncio.sleep(0.02)
    async with asyncio.timeout(SECONDS):
        assert (await reader.readuntil(b"served")).startswith(b"HTTP/1.1 200 ")
        await asyncio.sleep(0.3)
        writer.write(ASKED)
        assert (await reader.readuntil(b"served")).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_one_connection_too_many_is_closed_and_the_next_one_finds_room(site: Listener) -> None:
    kept = []
    for _ in range(3):
        reader, writer = await connect(site)
        writer.write(ASKED)
        await reader.readuntil(b"served")
        kept.append(writer)
    reader, writer = await connect(site)
    assert await ended(reader) == b""
    writer.close()
    kept[0].close()
    async with asyncio.timeout(SECONDS):
        while True:
            reader, writer = await connect(site)
            writer.write(ASKED)
            said = await ended(reader) if reader.at_eof() else await reader.read(1)
            if said:
                break
            writer.close()
    writer.close()
    for other in kept:
        other.close()


async def test_the_oldest_that_said_nothing_gives_way_to_who_asks(
    site: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "HEAD_SECONDS", 600.0)
    mute = [await connect(site) for _ in range(3)]
    reader, writer = await connect(site)
    writer.write(ASKED)
    async with asyncio.timeout(SECONDS):
        assert (await reader.readuntil(b"served")).startswith(b"HTTP/1.1 200 ")
    assert await ended(mute[0][0]) == b""
    assert not any(reader.at_eof() for reader, _ in mute[1:])
    for _, other in (*mute, (reader, writer)):
        other.close()


def test_a_port_takes_a_share_of_what_the_process_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((1024, 512), (100, 64), (65536, 32768), (resource.RLIM_INFINITY, 32768)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert most_connections(2) == most
