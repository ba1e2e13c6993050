"""Replicas side by side for the server's tests: real sockets, sessions by hand, and one book of who holds what."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack
from typing import Any

from aiohttp import ClientSession, TCPConnector

from runner.config import Settings
from runner.errors import RunnerError
from runner.leases.port import ReplicaInfo
from runner.server.app import build_app, start_site, stop_site
from runner.server.relay import Followed
from runner.session.owners import Elsewhere
from tests.server.double import TOKENS, FakeSessions, auth


class Book:
    """Who holds session ``s1``, where everybody is, who is provably dead, and whether a turn of it is ``unsettled``."""

    def __init__(self) -> None:
        self.holder: str | None = None
        self.urls: dict[str, str | None] = {}
        self.dead: set[str] = set()
        self.looks = 0
        self.unsettled = False


class FakeOwners:
    """What one replica knows of the others."""

    shared = True

    def __init__(self, book: Book, replica_id: str) -> None:
        self._book = book
        self._id = replica_id

    @property
    def me(self) -> ReplicaInfo:
        return ReplicaInfo(self._id, self._book.urls.get(self._id))

    async def elsewhere(self, project: str, session_id: str) -> Elsewhere | None:
        self._book.looks += 1
        holder = self._book.holder
        if holder in (None, self._id) or (project, session_id) != ("default", "s1"):
            return None
        assert holder is not None
        return Elsewhere(holder, self._book.urls.get(holder))

    async def unsettled(self, project: str, session_id: str) -> bool:
        return self._book.unsettled

    async def gone(self, replica_id: str) -> bool:
        if replica_id in self._book.dead:
            if self._book.holder == replica_id:
                self._book.holder = None
            return True
        return False


class Neighbours:
    """Replicas ``a`` and ``b``, and more that do what no good one does."""

    def __init__(self) -> None:
        self.book = Book()
        self.sessions: dict[str, FakeSessions] = {}
        self.clients: dict[str, ClientSession] = {}
        self._stack = AsyncExitStack()
        self._sites: dict[str, Any] = {}

    async def add(
        self, name: str, *, gateway: bool = False, mirrors: Followed | None = None, **server: Any
    ) -> FakeSessions:
        """A replica with an HTTP server; ``mirrors``: a live bus."""
        settings = Settings.model_validate({"server": {"ping_seconds": 0.05, "max_body_bytes": 100_000, **server}})
        sessions = FakeSessions()
        owners = FakeOwners(self.book, name)
        place = self._place if gateway else None
        app = build_app(sessions, settings, TOKENS, owners=owners, place=place, mirrors=mirrors)
        site, url = await start_site(app, "127.0.0.1", 0, close_seconds=1)
        self._sites[name] = site
        self._stack.push_async_callback(self.stop, name)
        self.book.urls[name] = url
        self.sessions[name] = sessions
        self.clients[name] = await self._stack.enter_async_context(_client(url))
        return sessions

    async def _place(self, project: str, session_id: str, failed: Collection[str]) -> Elsewhere:
        for name in sorted(self.book.urls):
            if name.startswith("r") and name not in failed:
                return Elsewhere(name, self.book.urls[name])
        raise RunnerError("plane_unavailable", "No runner is connected.", retry_after=1)

    async def odd(self, name: str, talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]) -> None:
        """A replica that answers with ``talk``; it holds the session from now on."""
        writers: list[asyncio.StreamWriter] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)
            try:
                await talk(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)

        async def close() -> None:
            server.close()
            for writer in writers:
                writer.transport.abort()
            await server.wait_closed()

        self._stack.push_async_callback(close)
        port = server.sockets[0].getsockname()[1]
        self.book.urls[name] = f"http://127.0.0.1:{port}"
        self.book.holder = name

    def nowhere(self, name: str) -> None:
        """A replica whose port refuses; it holds the session from now on."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.book.urls[name] = f"http://127.0.0.1:{port}"
        self.book.holder = name

    async def stop(self, name: str) -> None:
        """Close a replica's server; idempotent."""
        site = self._sites.pop(name, None)
        if site is not None:
            await stop_site(site)

    async def close(self) -> None:
        await self._stack.aclose()


def _client(url: str) -> ClientSession:
    return ClientSession(url, headers=auth(), connector=TCPConnector(limit=0))
