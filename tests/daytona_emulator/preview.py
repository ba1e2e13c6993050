"""The preview proxy: one loopback listener per sandbox and port, HTTP and WebSocket, bytes passed on as they are.

The real host form ``https://{port}-{id}.proxy.domain`` does not resolve on loopback; a listener of its own keeps a URL
without a path. A connection carries one request: its head is read here, the rest is spliced.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus

from tests.daytona_emulator.box import Box
from tests.daytona_emulator.clock import MovableClock
from tests.daytona_emulator.faults import Faults
from tests.daytona_emulator.problems import PROXY, Problem, bare_502, not_found, not_started

End = tuple[asyncio.StreamReader, asyncio.StreamWriter]
TOKEN_HEADER = "x-daytona-preview-token"
TOKEN_QUERY = "DAYTONA_SANDBOX_AUTH_KEY"
ACTIVITY_SECONDS = 50.0
MAX_GONE = 16
CHUNK = 1 << 18
LOGIN = b'<!DOCTYPE html><html><head><title>Daytona</title></head><body><a href="/login">Log in</a></body></html>'


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(slots=True, eq=False)
class Door:
    """One listener. ``signed`` ones need no token until ``expires``; nothing passes while ``flowing`` is not set."""

    box: str
    port: int
    signed: str = ""
    expires: float = 0.0
    url: str = ""
    server: asyncio.Server | None = None
    links: set[asyncio.WriteTransport] = field(default_factory=set)
    active: float = 0.0
    flowing: asyncio.Event = field(default_factory=_set_event)


class Previews:
    """All listeners.

    Args:
        api_key: accepted as a bearer in place of the preview token.
        find: a sandbox by id; refuses an unknown one.
        used: told of use.
    """

    def __init__(
        self, api_key: str, clock: MovableClock, faults: Faults, find: Callable[[str], Box], used: Callable[[Box], None]
    ) -> None:
        self._api_key = api_key
        self._clock = clock
        self._faults = faults
        self._find = find
        self._used = used
        self._doors: list[Door] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, box: Box, port: int, signed_seconds: int = 0) -> Door:
        """The listener of a port, or a new one with a signature."""
        for door in self._doors:
            if not signed_seconds and not door.signed and (door.box, door.port) == (box.id, port):
                return door
        self._forget_old()
        door = Door(box.id, port)
        if signed_seconds:
            door.signed, door.expires = secrets.token_hex(12), self._clock.now() + signed_seconds
        self._doors.append(door)
        door.server = await asyncio.start_server(
            lambda reader, writer: self._accept(door, reader, writer), "127.0.0.1", limit=CHUNK
        )
        door.url = f"http://127.0.0.1:{door.server.sockets[0].getsockname()[1]}"
        return door

    def expire(self, box: Box, token: str = "") -> None:
        """Signed links of a sandbox (or one of them) are over."""
        for door in self._doors:
            if door.box == box.id and door.signed and token in ("", door.signed):
                door.expires = 0.0

    def cut(self, box: Box) -> int:
        """Break every connection of a sandbox without a goodbye; how many there were."""
        links = [link for door in self._doors if door.box == box.id for link in door.links]
        for link in links:
            link.abort()
        return len(links)

    def stall(self, box: Box, stalled: bool) -> None:
        """The links of a sandbox stay open and nothing passes, as in a network that swallows packets."""
        for door in self._doors:
            if door.box == box.id:
                (door.flowing.clear if stalled else door.flowing.set)()

    def keep_alive(self) -> None:
        """An open connection is activity, now and then."""
        for door in self._doors:
            if door.links and self._clock.now() >= door.active:
                door.active = self._clock.now() + ACTIVITY_SECONDS
                if self._known(door.box) and not self._find(door.box).traits.idle_links:
                    self._used(self._find(door.box))

    async def close(self) -> None:
        for door in self._doors:
            if door.server is not None:
                door.server.close()
            for link in door.links:
                link.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, door: Door, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(door, reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _forget_old(self) -> None:
        """The links of sandboxes that are gone answer 404 for a while, not for ever."""
        gone = [door for door in self._doors if not self._known(door.box)]
        for door in gone[:-MAX_GONE]:
            self._doors.remove(door)
            if door.server is not None:
                door.server.close()

    def _known(self, box: str) -> bool:
        try:
            self._find(box)
        except Problem:
            return False
        return True

    async def _serve(self, door: Door, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        near = writer.transport
        door.links.add(near)
        head = b""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            await door.flowing.wait()
            fault = self._faults.take(f"PREVIEW {door.box} {door.port}")
            if fault is not None:
                await asyncio.sleep(fault.delay)
                if fault.drop:
                    near.abort()
                    return
                if fault.status:
                    body = fault.body.encode() if fault.body is not None else None
                    raise Problem(fault.status, fault.message, fault.source or PROXY, fault.code, fault.headers, body)
            far_reader, far_writer = await self._dial(door, head)
        except Problem as problem:
            await _refuse(writer, head, problem)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            near.abort()
        else:
            door.links.add(far_writer.transport)
            try:
                await _splice(door.flowing, (reader, writer), (far_reader, far_writer))
            finally:
                door.links.discard(far_writer.transport)
        finally:
            door.links.discard(near)
            writer.close()

    async def _dial(self, door: Door, head: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Check the request and hand its head to the port inside."""
        box = self._find(door.box)
        if door.signed:
            if self._clock.now() >= door.expires:
                raise Problem(400, "", PROXY, headers={"Content-Type": "text/html; charset=utf-8"}, body=LOGIN)
        elif not box.public and not self._authorized(box, head):
            target = "http://127.0.0.1/login?returnTo=%2F"
            raise Problem(307, "", PROXY, headers={"Location": target, "Content-Type": "text/html"}, body=LOGIN)
        if box.state != "started":
            raise not_started()
        if box.traits.container_gone:
            raise not_found(box.id)
        if box.traits.daemon_dead:
            raise bare_502()
        self._used(box)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", door.port, limit=CHUNK)
        except OSError:
            raise bare_502() from None
        writer.write(_forwarded(head))
        return reader, writer

    def _authorized(self, box: Box, head: bytes) -> bool:
        first, *lines = head.decode("latin-1").split("\r\n")
        given = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return (
            given.get(TOKEN_HEADER) == box.token
            or f"{TOKEN_QUERY}={box.token}" in first
            or given.get("authorization") == f"Bearer {self._api_key}"
        )


def _forwarded(head: bytes) -> bytes:
    """The head without the proxy's own credentials; a connection that is no WebSocket ends with its answer."""
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    names = [line.partition(":")[0].strip().lower() for line in lines]
    upgrade = "upgrade" in names
    dropped = {TOKEN_HEADER} if upgrade else {TOKEN_HEADER, "connection", "keep-alive"}
    kept = [line for name, line in zip(names, lines, strict=True) if name not in dropped]
    return "\r\n".join([first, *kept, *([] if upgrade else ["Connection: close"]), "", ""]).encode("latin-1")


async def _splice(flowing: asyncio.Event, near: End, far: End) -> None:
    """Pass bytes both ways until one side ends; then both are closed."""
    pumps = [
        asyncio.get_running_loop().create_task(_pump(flowing, near[0], far[1])),
        asyncio.get_running_loop().create_task(_pump(flowing, far[0], near[1])),
    ]
    try:
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        far[1].close()


async def _pump(flowing: asyncio.Event, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, RuntimeError):
        while data := await reader.read(CHUNK):
            await flowing.wait()
            writer.write(data)
            await writer.drain()


async def _refuse(writer: asyncio.StreamWriter, head: bytes, problem: Problem) -> None:
    method, path, *_ = [*head.decode("latin-1").split(" ", 2), ""]
    headers = dict(problem.headers)
    body = problem.body
    if body is None:
        body = json.dumps(problem.document(method, path)).encode()
        headers["Content-Type"] = "application/json"
    headers |= {"Content-Length": str(len(body)), "Connection": "close"}
    lines = [f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    with contextlib.suppress(ConnectionError):
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        await writer.drain()
