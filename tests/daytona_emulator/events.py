"""Socket.IO by hand: as much of it as the SDK's event channel speaks."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from typing import Any

from aiohttp import WSMsgType, web

PING_MILLISECONDS = 25_000
OPEN, CONNECT, REFUSED, EVENT = "0", "40", "44", "42"


class Events:
    """The channel that tells clients of state changes.

    Args:
        allowed: whether a token may connect.

    Attributes:
        muted: connections are accepted and told nothing, as behind a proxy that swallows frames.
    """

    def __init__(self, allowed: Callable[[str], bool]) -> None:
        self._allowed = allowed
        self._sockets: set[web.WebSocketResponse] = set()
        self.muted = False

    @property
    def listeners(self) -> int:
        """Connected clients."""
        return len(self._sockets)

    async def handle(self, request: web.Request) -> web.WebSocketResponse:
        """One client: Engine.IO 4 over WebSocket."""
        socket = web.WebSocketResponse(heartbeat=PING_MILLISECONDS / 1000)
        await socket.prepare(request)
        timing = {"pingInterval": PING_MILLISECONDS, "pingTimeout": 20_000, "maxPayload": 1_000_000}
        await socket.send_str(OPEN + json.dumps({"sid": secrets.token_hex(8), "upgrades": [], **timing}))
        try:
            async for message in socket:
                if message.type is WSMsgType.TEXT:
                    await self._packet(socket, message.data)
        finally:
            self._sockets.discard(socket)
        return socket

    async def tell(self, name: str, payload: dict[str, Any]) -> None:
        """Emit one event to everybody."""
        if self.muted:
            return
        for socket in list(self._sockets):
            try:
                await socket.send_str(EVENT + json.dumps([name, payload]))
            except (ConnectionError, RuntimeError):
                self._sockets.discard(socket)

    async def drop(self) -> None:
        """Close every connection."""
        for socket in list(self._sockets):
            await socket.close(code=1011)

    async def _packet(self, socket: web.WebSocketResponse, text: str) -> None:
        if text.startswith(CONNECT):
            told = json.loads(text[2:] or "{}")
            if not self._allowed(str(told.get("token", ""))):
                await socket.send_str(REFUSED + json.dumps({"message": "Unauthorized"}))
                return
            await socket.send_str(CONNECT + json.dumps({"sid": secrets.token_hex(8)}))
            self._sockets.add(socket)
        elif text == "2":
            await socket.send_str("3")
