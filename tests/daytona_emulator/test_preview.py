"""The preview proxy: tokens, HTTP and WebSocket, and what it says when it refuses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
import pytest
import websockets
from aiohttp import web
from daytona import AsyncSandbox

from tests.daytona_emulator.scenarios import play
from tests.daytona_emulator.server import DaytonaEmulator

TOKEN = "X-Daytona-Preview-Token"


@contextlib.asynccontextmanager
async def http_server() -> AsyncIterator[int]:
    """A server as one inside a sandbox would be; its port."""

    async def answer(request: web.Request) -> web.Response:
        told = {"path": request.path_qs, "body": await request.text(), "token": request.headers.get(TOKEN)}
        return web.json_response(told)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def echo_server() -> AsyncIterator[int]:
    async def echo(link: websockets.ServerConnection) -> None:
        async for message in link:
            await link.send(message)

    async with websockets.serve(echo, "127.0.0.1", 0, max_size=None, compression=None) as server:
        yield next(iter(server.sockets)).getsockname()[1]


async def get(url: str, **headers: str) -> tuple[int, str, str]:
    async with aiohttp.ClientSession() as client, client.get(url, headers=headers, allow_redirects=False) as answer:
        return answer.status, answer.content_type, await answer.text()


async def test_http_with_the_header_the_query_and_the_key(emulator: DaytonaEmulator, box: AsyncSandbox) -> None:
    async with http_server() as port, aiohttp.ClientSession() as client:
        link = await box.get_preview_link(port)
        async with client.post(f"{link.url}/a?b=1", data="x" * 300_000, headers={TOKEN: link.token}) as answer:
            told = await answer.json()
        assert (told["path"], len(told["body"]), told["token"]) == ("/a?b=1", 300_000, None)
        assert (await get(f"{link.url}/?DAYTONA_SANDBOX_AUTH_KEY={link.token}"))[0] == 200
        assert (await get(link.url, Authorization=f"Bearer {emulator.api_key}"))[0] == 200


async def test_one_token_opens_every_port(box: AsyncSandbox) -> None:
    async with http_server() as one, http_server() as other:
        token = (await box.get_preview_link(one)).token
        assert (await get((await box.get_preview_link(other)).url, **{TOKEN: token}))[0] == 200


async def test_without_or_with_a_wrong_token_it_is_a_login_page(box: AsyncSandbox) -> None:
    async with http_server() as port:
        link = await box.get_preview_link(port)
        for headers in ({}, {TOKEN: "wrong"}):
            assert (await get(link.url, **headers))[:2] == (307, "text/html")
        # websockets follows the redirect, and a login page is no address of a WebSocket.
        with pytest.raises(websockets.InvalidURI):
            await websockets.connect(link.url.replace("http", "ws"))


async def test_a_closed_port_and_a_stopped_sandbox(emulator: DaytonaEmulator, box: AsyncSandbox) -> None:
    async with http_server() as port:
        link = await box.get_preview_link(port)
    assert await get(link.url, **{TOKEN: link.token}) == (502, "application/octet-stream", "")
    await box.stop()
    status, _, text = await get(link.url, **{TOKEN: link.token})
    assert status == 400 and "Is the Sandbox started?" in text
    await play(emulator, "vanished", {"sandbox": box.id})
    assert (await get(link.url, **{TOKEN: link.token}))[0] == 404


async def test_the_token_is_new_after_a_start(box: AsyncSandbox) -> None:
    async with http_server() as port:
        old = await box.get_preview_link(port)
        await box.stop()
        await box.start()
        new = await box.get_preview_link(port)
        assert old.url == new.url
        assert (await get(new.url, **{TOKEN: old.token}))[0] == 307
        assert (await get(new.url, **{TOKEN: new.token}))[0] == 200


async def test_signed_links(emulator: DaytonaEmulator, box: AsyncSandbox) -> None:
    async with http_server() as port:
        signed = await box.create_signed_preview_url(port, expires_in_seconds=120)
        assert (await get(signed.url))[0] == 200
        await emulator.advance(121)
        assert (await get(signed.url))[:2] == (400, "text/html")
        revoked = await box.create_signed_preview_url(port)
        await box.expire_signed_preview_url(port, revoked.token)
        assert (await get(revoked.url))[0] == 400


async def test_websocket_messages_of_any_size(box: AsyncSandbox) -> None:
    async with echo_server() as port:
        link = await box.get_preview_link(port)
        headers = {TOKEN: link.token}
        address = link.url.replace("http", "ws")
        async with websockets.connect(address, additional_headers=headers, max_size=None, compression=None) as socket:
            for message in ("small", "x" * 3_000_000, b"\x00" * 100_000):
                await socket.send(message)
                assert await socket.recv() == message
            await (await socket.ping())


async def test_links_break_and_the_sandbox_runs_on(emulator: DaytonaEmulator, box: AsyncSandbox) -> None:
    async with echo_server() as port:
        link = await box.get_preview_link(port)
        headers, address = {TOKEN: link.token}, link.url.replace("http", "ws")
        async with websockets.connect(address, additional_headers=headers) as socket:
            await play(emulator, "dropped_links", {"sandbox": box.id})
            with pytest.raises(websockets.ConnectionClosedError):
                await socket.recv()
        async with websockets.connect(address, additional_headers=headers) as socket:
            await socket.send("again")
            assert await socket.recv() == "again"
        await play(emulator, "expired_link", {"sandbox": box.id})
        assert (await get(link.url, **headers))[0] == 307


async def test_links_that_swallow_everything(emulator: DaytonaEmulator, box: AsyncSandbox) -> None:
    async with echo_server() as port:
        link = await box.get_preview_link(port)
        headers, address = {TOKEN: link.token}, link.url.replace("http", "ws")
        async with websockets.connect(address, additional_headers=headers) as socket:
            await play(emulator, "stalled_links", {"sandbox": box.id})
            await socket.send("late")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(socket.recv(), 0.1)
            with pytest.raises(TimeoutError):
                await websockets.connect(address, additional_headers=headers, open_timeout=0.1)
            await play(emulator, "stalled_links", {"sandbox": box.id, "stalled": False})
            assert await socket.recv() == "late"


async def test_an_open_connection_is_activity(emulator: DaytonaEmulator, box: AsyncSandbox) -> None:
    await box.set_autostop_interval(5)
    async with echo_server() as port:
        link = await box.get_preview_link(port)
        address = link.url.replace("http", "ws")
        async with websockets.connect(address, additional_headers={TOKEN: link.token}):
            for _ in range(5):
                await emulator.advance(120)
        assert emulator.boxes.find(box.id).state == "started"
        await asyncio.sleep(0.05)
        await emulator.advance(301)
    assert emulator.boxes.find(box.id).state == "stopped"


async def test_faults_of_the_proxy(emulator: DaytonaEmulator, box: AsyncSandbox) -> None:
    async with http_server() as port:
        link = await box.get_preview_link(port)
        headers = {TOKEN: link.token}
        emulator.fault(f"PREVIEW {box.id}", status=503, message="busy")
        emulator.fault(f"PREVIEW {box.id}", drop="before")
        assert (await get(link.url, **headers))[0] == 503
        async with aiohttp.ClientSession() as client:
            with pytest.raises(aiohttp.ClientError):
                await client.post(link.url, headers=headers)
        assert (await get(link.url, **headers))[0] == 200
