"""A client below HTTP libraries: it can stop anywhere, and need not read."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from tests.e2e.server import SECONDS, Server


class RawClient:
    """One connection.

    Args:
        server: to connect to.
        receive_bytes: the size of the socket's receive buffer, small for a client that does not read.
    """

    def __init__(self, server: Server, receive_bytes: int | None = None) -> None:
        self._server = server
        self._socket = socket.socket()
        if receive_bytes is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self._socket.setblocking(False)
        self.got = b""

    async def connect(self) -> None:
        await asyncio.get_running_loop().sock_connect(self._socket, self._server.address)

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> bytes:
        """The bytes of one request."""
        content = b"" if body is None else json.dumps(body).encode()
        host, port = self._server.address
        lines = [
            f"{method} {path} HTTP/1.1",
            f"Host: {host}:{port}",
            f"Authorization: Bearer {self._server.token}",
            "Content-Type: application/json",
            f"Content-Length: {len(content)}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + content

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def read_until(self, wanted: bytes) -> None:
        """Read until the bytes so far hold ``wanted``."""
        async with asyncio.timeout(SECONDS):
            while wanted not in self.got:
                data = await asyncio.get_running_loop().sock_recv(self._socket, 4096)
                assert data, f"the connection ended without {wanted!r}: {self.got[-500:]!r}"
                self.got += data

    async def read_to_end(self) -> bool:
        """Read everything; True when the server ended the connection by a reset."""
        try:
            async with asyncio.timeout(SECONDS):
                while data := await asyncio.get_running_loop().sock_recv(self._socket, 256 * 1024):
                    self.got += data
        except ConnectionResetError:
            return True
        return False

    def close(self, *, reset: bool = False) -> None:
        """Close; with ``reset`` by RST, as a client that was killed."""
        if reset:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self._socket.close()
