"""The runner's end of a bridge: one link over as many WebSocket connections as it takes (DESIGN 3.10)."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI, WebSocketException

from runner.acp.link import CLOSE_GAP, FATAL, MAX_FRAME_BYTES, Link, LinkError
from runner.errors import RunnerError
from runner.tasks import Tasks, shielded

OPEN_SECONDS: Final = 10.0
PING_SECONDS: Final = 20.0
CLOSE_SECONDS: Final = 1.0
FIRST_WAIT: Final = 0.05
LAST_WAIT: Final = 2.0
log = logging.getLogger("runner.acp.websocket")


@dataclass(frozen=True, slots=True)
class Address:
    """Where the bridge is reached: a ws or wss URL, opaque, and the headers that open the door to it."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)


Find = Callable[[bool], Awaitable[Address]]
"""Finds the address; True: the last one was refused. ``ConnectionError``: not now; ``RunnerError``: never again."""


class _Dial(connect):
    """Follows no redirect: the preview proxy sends who is not let in to a login page, headers and all."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


class BridgeConnection:
    """Keeps the link connected until it is closed or lost. All methods are called on the event loop's thread.

    Args:
        find: the address; asked again after every answer that is not a WebSocket.
        secret: the bridge's own, shown in the first frame.
        resume_seconds: without a connection for so long the link is lost.
        on_frame: called with the kind and payload of every frame, each once, in order.
        on_acked: called behind every acknowledgement.
        on_lost: called once when the link cannot go on, with a sentence; not after ``close``.

    Attributes:
        link: what is sent; call ``flush`` behind it.
        boot_id: of the bridge, once it was reached.
        connections: how many there were.
    """

    def __init__(
        self,
        find: Find,
        secret: str,
        *,
        resume_seconds: float,
        on_frame: Callable[[bytes, bytes], None],
        on_acked: Callable[[], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self.link = Link()
        self.boot_id: str | None = None
        self.connections = 0
        self._find, self._secret, self._resume_seconds = find, secret, resume_seconds
        self._on_frame, self._on_acked, self._on_lost = on_frame, on_acked, on_lost
        self._wake = asyncio.Event()
        self._opened = asyncio.Event()
        self._peer: ClientConnection | None = None
        self._lost: str | None = None
        self._tasks = Tasks("bridge connection")
        self._closed = False

    async def open(self, seconds: float) -> None:
        """Connect for the first time.

        Raises:
            RunnerError: ``sandbox_lost``: the bridge was not reached in time or refused; nothing goes on.
        """
        self._tasks.spawn("link", self._kept())
        try:
            async with asyncio.timeout(seconds):
                await self._opened.wait()
        except TimeoutError:
            await self.close()
            raise RunnerError("sandbox_lost", f"The bridge was not reached within {seconds:g} s.") from None
        if self._lost is not None:
            raise RunnerError("sandbox_lost", f"The bridge was not reached: {self._lost}.")

    def flush(self) -> None:
        """Send what the link has to send."""
        self._wake.set()

    def drop(self) -> None:
        """Cut the connection as a network would; the link is resumed."""
        if self._peer is not None:
            self._peer.transport.abort()

    async def close(self) -> None:
        """Give the link up; idempotent, bounded."""
        self._closed = True
        await self._tasks.close()

    # -- connections -------------------------------------------------------------------------------------------------

    async def _kept(self) -> None:
        """Whatever the other end says: a link that nobody keeps any more is told as lost."""
        try:
            await self._keep()
        except Exception as error:
            log.exception("bridge: the link is given up")
            self._lose(f"it said what cannot be read ({type(error).__name__})")

    async def _keep(self) -> None:
        """One connection behind the other until the link is lost."""
        loop = asyncio.get_running_loop()
        alone_since, wait, refused = loop.time(), FIRST_WAIT, False
        while True:
            try:
                peer = await self._dial(refused)
            except RunnerError as error:
                self._lose(str(error).rstrip("."))
                return
            except (InvalidHandshake, InvalidURI) as error:
                refused, why = True, f"no WebSocket there ({error})"
            except (WebSocketException, OSError) as error:
                refused, why = False, f"{type(error).__name__}: {error}"
            else:
                code = await self._connected(peer)
                if code in FATAL:
                    self._lose(f"the bridge does not go on with this link ({code})")
                    return
                if self.link.connected:
                    alone_since, wait = loop.time(), FIRST_WAIT
                self.link.drop()
                refused, why = False, f"the connection ended ({code})"
            if loop.time() - alone_since >= self._resume_seconds:
                self._lose(f"no connection for {self._resume_seconds:g} s; {why}")
                return
            log.info("bridge: %s; trying again", why)
            await asyncio.sleep(wait)
            wait = min(2 * wait, LAST_WAIT)

    async def _dial(self, refused: bool) -> ClientConnection:
        async with asyncio.timeout(OPEN_SECONDS):
            address = await self._find(refused)
            return await _Dial(
                address.url,
                additional_headers=dict(address.headers),
                compression=None,
                max_size=MAX_FRAME_BYTES,
                open_timeout=OPEN_SECONDS,
                ping_interval=PING_SECONDS,
                ping_timeout=PING_SECONDS,
                close_timeout=CLOSE_SECONDS,
            )

    async def _connected(self, peer: ClientConnection) -> int | None:
        """Resume the link over one connection; the close code when it ended."""
        sending: asyncio.Task[None] | None = None
        broken = False
        try:
            hello = {"secret": self._secret, "boot_id": self.boot_id, "received": self.link.received}
            await peer.send(json.dumps(hello))
            async with asyncio.timeout(OPEN_SECONDS):
                answer = json.loads(await peer.recv())
            self._greeted(answer)
            self._peer = peer
            sending = self._tasks.spawn("send", self._send(peer))
            async for message in peer:
                self._take(message)
        except ConnectionClosed:
            pass
        except (LinkError, ValueError, KeyError, TypeError, TimeoutError) as error:
            log.warning("bridge: %s: %s", type(error).__name__, error)
            broken = isinstance(error, LinkError)
        finally:
            self._peer = None
            if sending is not None:
                sending.cancel()
            await shielded(peer.close(), 2 * CLOSE_SECONDS)
        return CLOSE_GAP if broken else peer.close_code

    def _greeted(self, answer: Mapping[str, Any]) -> None:
        if self.boot_id is not None and answer["boot_id"] != self.boot_id:
            raise LinkError("another bridge answered")
        self.link.resume(int(answer["received"]))
        self.boot_id = str(answer["boot_id"])
        self.connections += 1
        self._opened.set()

    def _take(self, message: str | bytes) -> None:
        if isinstance(message, str):
            raise LinkError("a text frame behind the greeting")
        found = self.link.take(message)
        if found is None:
            self._on_acked()
        else:
            self._on_frame(*found)
        self._wake.set()

    async def _send(self, peer: ClientConnection) -> None:
        try:
            while self._peer is peer:
                self._wake.clear()
                frame = self.link.next_frame()
                if frame is not None:
                    await peer.send(frame)
                else:
                    await self._wake.wait()
        except ConnectionClosed:
            pass

    def _lose(self, why: str) -> None:
        self._lost = why
        self._opened.set()
        if not self._closed:
            self._on_lost(why)
