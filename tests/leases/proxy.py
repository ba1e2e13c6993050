"""A TCP proxy on loopback whose replies can be held back, and that can go silent or cut every connection."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Proxy:
    """Relays to a port of 127.0.0.1; ``replies`` closed holds what the server says, ``requests`` what it is asked."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self.connections = 0
        self.replies = asyncio.Event()
        self.requests = asyncio.Event()
        self.replies.set()
        self.requests.set()
        self.held = asyncio.Event()
        self._target = target
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Drop every connection that is open."""
        for writer in self._writers:
            writer.close()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        there, server = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers |= {writer, server}
        for source, sink, gate in ((reader, server, self.requests), (there, writer, self.replies)):
            task = asyncio.create_task(self._relay(source, sink, gate))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _relay(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, gate: asyncio.Event) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                if not gate.is_set():
                    self.held.set()
                    await gate.wait()
                sink.write(data)
                await sink.drain()
        sink.close()
