"""A follower of a session that changes hands: it goes on behind its last cursor, wherever the session is held now."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final, Protocol
from urllib.parse import urlencode

from aiohttp import web
from multidict import CIMultiDict

from runner.errors import RunnerError
from runner.rules.pool import Key
from runner.server.upstream import (
    FORWARDED,
    Broken,
    Chunks,
    Peers,
    Unreached,
    Whereabouts,
    error_in,
    held_by,
    whole,
)
from runner.session.owners import Elsewhere
from runner.session.port import Caller, Reader, ReaderCut, ReaderEnded, Sessions
from runner.wire.codec import PING, last_cursor

CHECK_SECONDS: Final = 1.0
RETRY_SECONDS: Final = 0.5
FORGOTTEN_SECONDS: Final = 6.0
KEPT_HOLDERS: Final = 10_000
TRIES: Final = 4
MAX_LINE_BYTES: Final = 256 * 1024 * 1024
OVER: Final = frozenset({"not_found", "session_ended"})
_PING: Final = PING.rstrip()
_WITHOUT_CURSOR: Final = b'{"kind":"event","turn_id":'
_LAST_WORDS: Final = (b'"type":"resync"', b'"reason":')


class Followed(Protocol):
    """Followers over a live bus; ``runner.session.mirror.Mirrors`` answers."""

    def serves(self, owner: str) -> bool:
        """Whether ``follow`` is better than HTTP now."""
        ...

    async def follow(self, key: Key, owner: str, after: str | None) -> Reader | None:
        """A reader of what ``owner`` has of a session; None: not over the bus."""
        ...


class Relay:
    """Opens readers that survive a change of the owner.

    Args:
        owners: who holds what.
        peers: connections to the others.
        sessions: this replica's own, over the shared store.
        mirrors: followers over a live bus, which need no connection to the owner; None: over HTTP.
    """

    def __init__(self, owners: Whereabouts, peers: Peers, sessions: Sessions, mirrors: Followed | None = None) -> None:
        self.owners = owners
        self.peers = peers
        self.sessions = sessions
        self.mirrors = mirrors
        self._holders: OrderedDict[Key, tuple[float, Elsewhere | None]] = OrderedDict()

    async def holder(self, key: Key, age: float = 0.0) -> Elsewhere | None:
        """Who else holds a session, as it was at most ``age`` seconds ago: followers of one session share a look.

        Raises:
            RunnerError: nobody can say.
        """
        now = asyncio.get_running_loop().time()
        at, owner = self._holders.get(key, (float("-inf"), None))
        if now - at >= age:
            owner = await self.owners.elsewhere(*key)
            self._holders[key] = (now, owner)
            self._holders.move_to_end(key)
            while len(self._holders) > KEPT_HOLDERS:
                self._holders.popitem(last=False)
        return owner

    async def follow(
        self, caller: Caller, session_id: str, after: str | None, headers: Mapping[str, str]
    ) -> RelayReader:
        """A reader of history behind ``after`` and of live events.

        Args:
            caller: who asks.
            session_id: a valid id.
            after: the last cursor that the client has seen.
            headers: of the request; its token goes along, and one that was forwarded is answered here or broken off.

        Raises:
            RunnerError: ``not_found``, ``session_ended``, ``owned_elsewhere``.
        """
        reader = RelayReader(self, caller, session_id, after, headers)
        await reader.attach()
        return reader


class RelayReader:
    """Implements ``session.port.Reader`` over whichever replica holds the session."""

    ended = False

    def __init__(
        self, relay: Relay, caller: Caller, session_id: str, after: str | None, headers: Mapping[str, str]
    ) -> None:
        self._relay = relay
        self._caller = caller
        self._session_id = session_id
        self._key = (caller.project, session_id)
        self._cursor = after
        self._authorization = headers.get("Authorization", "")
        self._anchored = FORWARDED in headers
        self._source: Reader | None = None
        self._owner: Elsewhere | None = None
        self._quiet = True
        self._due = 0.0
        self._unheld: float | None = None

    async def attach(self) -> None:
        """Read from whoever holds the session now; from the shared store when nobody does.

        Raises:
            RunnerError: it cannot be read there.
        """
        for _ in range(TRIES):
            owner = await self._look()
            if owner is None and await self._forgotten():
                raise RunnerError("plane_unavailable", "Nobody holds this session for now. Try again.", retry_after=1)
            source = await self._reader(owner)
            if source is not None:
                self._source, self._owner, self._quiet = source, owner, True
                self._due = asyncio.get_running_loop().time() + CHECK_SECONDS
                return
        raise RunnerError("plane_unavailable", "Owner after owner of this session went away. Try again.", retry_after=1)

    async def _reader(self, owner: Elsewhere | None) -> Reader | None:
        if owner is None:
            sessions = self._relay.sessions
            return await sessions.follow(self._caller, self._session_id, self._cursor, True)
        if self._anchored:
            raise held_by(owner)
        mirrors = self._relay.mirrors
        over_bus = self._over_bus(owner)
        if mirrors is not None and over_bus:
            live = await mirrors.follow(self._key, owner.replica_id, self._cursor)
            if live is not None:
                return live
        try:
            return await self._upstream(owner)
        except RunnerError as error:
            if mirrors is None or over_bus or error.code != "owned_elsewhere":
                raise
            live = await mirrors.follow(self._key, owner.replica_id, self._cursor)
            if live is None:
                raise
            return live

    async def _look(self, age: float = 0.0) -> Elsewhere | None:
        owner = await self._relay.holder(self._key, age)
        if owner is not None:
            self._unheld = None
        return owner

    async def _forgotten(self) -> bool:
        """Whether the owner that was followed may be there although the plane does not name it.

        One that a plane forgot renews within a beat; what it has shown meanwhile is not in the store yet.
        """
        now = asyncio.get_running_loop().time()
        if self._owner is None:
            return False
        if self._unheld is None:
            self._unheld = now
        return now - self._unheld < FORGOTTEN_SECONDS and await self._relay.owners.unsettled(*self._key)

    async def _upstream(self, owner: Elsewhere) -> Reader | None:
        """None: the owner is provably gone, so the next look finds another or none."""
        query = {"follow": "1", **({"after": self._cursor} if self._cursor else {})}
        path = f"/v1/sessions/{self._session_id}/events?{urlencode(query)}"
        headers = CIMultiDict({"Accept": "application/x-ndjson", "Authorization": self._authorization})
        try:
            response = await self._relay.peers.ask(owner, "GET", path, headers)
        except Unreached:
            if await self._relay.owners.gone(owner.replica_id):
                return None
            raise held_by(owner) from None
        if response.status == 200:
            return _Upstream(Chunks(response))
        raise error_in(await whole(Chunks(response)), owner)

    async def next(self, seconds: float) -> bytes | None:
        """See ``session.port.Reader``; it is never cut: a client that falls behind gets blocks for frames."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while True:
            if self._source is None:
                await self._again()
            wait = max(0.0, min(deadline, self._due) - loop.time())
            if self._source is None:
                await asyncio.sleep(wait)
            else:
                try:
                    lines = await self._source.next(wait)
                except (Broken, ReaderCut, RunnerError):
                    # What is not kept there any more is read from the store, as soon as that can be used.
                    self._leave()
                    continue
                if lines:
                    self._cursor = last_cursor(lines) or self._cursor
                    self._quiet = False
                    return lines
                if loop.time() >= self._due:
                    await self._check()
            if loop.time() >= deadline:
                return None

    async def _again(self) -> None:
        if asyncio.get_running_loop().time() < self._due:
            return
        try:
            await self.attach()
        except RunnerError as error:
            if error.code in OVER:
                raise ReaderEnded from None
            if self._anchored:
                raise ConnectionError("another replica holds the session") from None
            self._due = asyncio.get_running_loop().time() + RETRY_SECONDS

    async def _check(self) -> None:
        """Leave a source that another replica has overtaken, or that does not show what the store has."""
        try:
            owner = await self._look(CHECK_SECONDS / 2)
            leave = await self._has_moved(owner)
        except RunnerError:
            leave = False
        if leave:
            self._leave()
        self._quiet = True
        self._due = asyncio.get_running_loop().time() + (0 if leave else CHECK_SECONDS)

    async def _has_moved(self, owner: Elsewhere | None) -> bool:
        if owner is None and self._owner is not None:
            return not await self._forgotten()
        if owner is None:
            return self._quiet and await self._missed()
        return _id(owner) != _id(self._owner) or (isinstance(self._source, _Upstream) and self._over_bus(owner))

    def _over_bus(self, owner: Elsewhere) -> bool:
        mirrors = self._relay.mirrors
        return mirrors is not None and mirrors.serves(owner.replica_id)

    async def _missed(self) -> bool:
        try:
            page = await self._relay.sessions.records(self._caller, self._session_id, self._cursor, 1)
        except RunnerError as error:
            return error.code in OVER
        return bool(page["items"])

    def _leave(self) -> None:
        if self._source is not None:
            self._source.close()
        self._source = None
        self._due = asyncio.get_running_loop().time() + (RETRY_SECONDS if self._quiet else 0)

    def close(self, *, cut: bool = False) -> None:
        """See ``session.port.Reader``."""
        if self._source is not None:
            self._source.close(cut=cut)
        self._source = None


class _Upstream:
    """The lines of another replica's follower; half a line never leaves it (case H5)."""

    ended = False

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self._pending: list[bytes] = []
        self._size = 0

    async def next(self, seconds: float) -> bytes | None:
        """Whole lines, without pings and without the words that announce a cut.

        Raises:
            ReaderEnded: the session has ended.
            Broken: the other replica is gone or gave the stream up.
        """
        chunk = await self._chunks.next(seconds)
        if chunk is None:
            return None
        if not chunk:
            if self._pending:
                raise Broken("the stream ended in the middle of a line")
            raise ReaderEnded
        head, newline, rest = chunk.rpartition(b"\n")
        if not newline:
            self._keep(chunk)
            return None
        whole = b"".join([*self._pending, head, newline])
        self._pending, self._size = [], 0
        self._keep(rest)
        return _shown(whole) or None

    def _keep(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > MAX_LINE_BYTES:
            raise Broken("a line without an end")
        if piece:
            self._pending.append(piece)

    def close(self, *, cut: bool = False) -> None:
        self._chunks.close()


def _shown(lines: bytes) -> bytes:
    if _PING not in lines and _WITHOUT_CURSOR not in lines:
        return lines
    kept = [line for line in lines.split(b"\n") if line and line != _PING and not _is_last_words(line)]
    return b"".join(line + b"\n" for line in kept)


def _is_last_words(line: bytes) -> bool:
    return line.startswith(_WITHOUT_CURSOR) and all(part in line for part in _LAST_WORDS)


def _id(owner: Elsewhere | None) -> str | None:
    return owner.replica_id if owner is not None else None


RELAY: Final = web.AppKey("relay", Relay)
