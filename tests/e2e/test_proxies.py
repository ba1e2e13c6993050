"""Streams through a proxy that cuts what is silent, and one that cuts in the middle of a line (cases H5, H7)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest

from runner.client import ApiError, Client
from tests.agents import directive, steps
from tests.e2e.conftest import Serve
from tests.e2e.server import SECONDS, Server
from tests.normal_form import normal_form

PINGS = "[server]\nping_seconds = 0.2\n"
IDLE_SECONDS = 1.0
SILENT = directive(steps.text("before "), steps.sleep(3 * IDLE_SECONDS), steps.text("after"), steps.reply())


class CuttingProxy:
    """Passes bytes on; cuts a connection whose server is silent for ``idle``, or that has got ``allowance`` bytes.

    ``cuts`` counts streams only: a connection that nobody uses is dropped, too.
    """

    def __init__(self, target: tuple[str, int], *, idle: float = SECONDS, allowance: list[int] | None = None) -> None:
        self.cuts = 0
        self.port = 0
        self._target = target
        self._idle = idle
        self._allowance = allowance or []
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> CuttingProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.create_task(self._relay(reader, writer)))

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        streaming = False
        answers, requests = await asyncio.open_connection(*self._target)
        asking = asyncio.create_task(_pass(reader, requests))
        left = self._allowance.pop(0) if self._allowance else None
        try:
            while True:
                async with asyncio.timeout(self._idle):
                    data = await answers.read(65536)
                if not data:
                    break
                streaming = (streaming or b"chunked\r\n" in data) and not data.endswith(b"\r\n0\r\n\r\n")
                if left is not None and len(data) >= left:
                    writer.write(data[:left])
                    await writer.drain()
                    self.cuts += 1
                    break
                left = left - len(data) if left is not None else None
                writer.write(data)
                await writer.drain()
        except (TimeoutError, OSError) as error:
            self.cuts += isinstance(error, TimeoutError) and streaming
        finally:
            asking.cancel()
            writer.close()
            requests.close()

    def client(self, server: Server) -> Client:
        return Client(f"http://127.0.0.1:{self.port}", server.token)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()


async def events_of(lines: AsyncIterator[dict[str, Any]], done: Callable[[dict[str, Any]], bool]) -> list[Any]:
    seen = []
    async with asyncio.timeout(SECONDS):
        async for line in lines:
            seen.append(line)
            if done(line):
                break
    return seen


def idle(line: dict[str, Any]) -> bool:
    return bool(line.get("type") == "session_idle")


async def test_no_stream_is_silent_for_long_case_h7(serve: Serve) -> None:
    """A dispatch, a follower and the project feed outlive a silence of three times the proxy's patience."""
    server = serve(PINGS)
    async with CuttingProxy(server.address, idle=IDLE_SECONDS) as proxy, proxy.client(server) as client:
        assert (await client.prompt("s", "hi", harness="scripted"))["ok"]
        before = (await events_of(client.events("s", follow=True), idle))[-1]["cursor"]
        await events_of(client.feed(after="0-0", follow=True), idle)
        feed = asyncio.create_task(events_of(client.feed(follow=True), idle))
        follower = asyncio.create_task(events_of(client.events("s", after=before, follow=True), idle))
        await asyncio.sleep(2 * IDLE_SECONDS)
        result = await client.prompt("s", SILENT, harness="scripted")
        assert (result["ok"], result["text"]) == (True, "before after")
        assert [line["type"] for line in await feed if line["kind"] == "event"] == ["session_busy", "session_idle"]
        assert {"done", "session_idle"} <= {line["type"] for line in await follower}
        assert proxy.cuts == 0


async def test_server_sent_events_are_not_silent_either_case_h7(serve: Serve) -> None:
    server = serve(PINGS)
    async with CuttingProxy(server.address, idle=IDLE_SECONDS) as proxy, proxy.client(server) as client:
        await client.submit("s", SILENT, harness="scripted")
        for path in ("/v1/events?follow=1&after=0-0", "/v1/sessions/s/events?follow=1"):
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {server.token}\r\n"
            writer.write(f"{head}Accept: text/event-stream\r\n\r\n".encode())
            got = b""
            async with asyncio.timeout(SECONDS):
                while b"session_idle" not in got:
                    data = await reader.read(65536)
                    assert data, got
                    got += data
            assert b"\nid: " in got
            writer.close()
        assert proxy.cuts == 0


async def test_a_cut_is_a_reconnect_and_no_cancel_case_h7(serve: Serve) -> None:
    """With pings too rare for the proxy the turn goes on; the same prompt id attaches to it again."""
    server = serve("[server]\nping_seconds = 30\n")
    async with CuttingProxy(server.address, idle=IDLE_SECONDS) as proxy, proxy.client(server) as client:
        with pytest.raises(ApiError) as caught:
            await client.prompt("s", SILENT, harness="scripted", prompt_id="p1")
        assert caught.value.code == "stream_broken"
        assert proxy.cuts == 1
        while (await client.session("s"))["state"] != "idle":
            await asyncio.sleep(0.1)
        result = await client.prompt("s", SILENT, harness="scripted", prompt_id="p1")
        assert (result["outcome"], result["text"]) == ("completed", "before after")


async def test_half_a_line_stays_with_its_connection_case_h5(serve: Serve) -> None:
    """The stream is cut anywhere, in the head, in a line, between two; who reconnects reads on without a scratch."""
    server = serve()
    words = [steps.text(f"wörd{n} ") for n in range(60)]
    async with server.client() as direct:
        assert (await direct.prompt("s", directive(*words, steps.reply()), harness="scripted"))["ok"]
        await events_of(direct.events("s", follow=True), idle)
        whole = [line async for line in direct.events("s")]
    allowance = [200 + (n * 331) % 1500 for n in range(30)]
    seen: list[dict[str, Any]] = []
    async with CuttingProxy(server.address, allowance=list(allowance)) as proxy, proxy.client(server) as client:
        for _ in range(len(allowance) + 1):
            after = seen[-1]["cursor"] if seen else None
            with suppress(ApiError):
                async for line in client.events("s", after=after):
                    seen.append(line)
        assert proxy.cuts > 5, "in the head, in a line, between two"
    assert [line["cursor"] for line in seen] == [line["cursor"] for line in whole]
    assert normal_form(seen) == normal_form(whole)
