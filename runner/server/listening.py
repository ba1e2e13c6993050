"""What a listening port takes from those who have said nothing yet: so many connections, and so long for a first head.

Whoever reaches the port, an agent in a cell with the machine's network too, could else keep all descriptors of this
process with connections on which nothing comes; no token is needed for that.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any, Final, cast

from aiohttp import web

HEAD_SECONDS: Final = 30.0
LEAST: Final = 64
UNLIMITED: Final = 1 << 16
_END: Final = b"\r\n\r\n"


def most_connections(share: int) -> int:
    """Of one port, which gets one in ``share`` of the descriptors that this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(LEAST, (UNLIMITED if soft == resource.RLIM_INFINITY else soft) // share)


class Listener(web.AppRunner):
    """An ``AppRunner`` whose connections are counted, and watched until their first head is there."""

    def __init__(self, app: web.Application, most: int, **options: Any) -> None:
        super().__init__(app, **options)
        self._most = most
        self._open = _Open()

    @property
    def server(self) -> web.Server | None:
        """What makes the protocol of a connection."""
        made = super().server
        return cast(Any, lambda: _Connection(made(), self._open, self._most)) if made is not None else None


class _Open:
    """The connections of one port: all, and those that said nothing yet, the oldest first."""

    def __init__(self) -> None:
        self.all: set[asyncio.Transport] = set()
        self.mute: dict[asyncio.Transport, None] = {}

    def discard(self, transport: asyncio.Transport) -> None:
        """It is gone, or as good as."""
        self.all.discard(transport)
        self.mute.pop(transport, None)


class _Connection(asyncio.Protocol):
    """Passes all on to the protocol of a connection, and ends one on which no head comes."""

    def __init__(self, inner: asyncio.Protocol, others: _Open, most: int) -> None:
        self._inner = inner
        self._others = others
        self._most = most
        self._taken = False
        self._tail = b""
        self._timer: asyncio.TimerHandle | None = None
        self._heard = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """With one too many the oldest that said nothing gives way, else this one; nobody hears why."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if len(self._others.all) >= self._most:
            last = next(iter(self._others.mute), transport)
            last.abort()
            self._others.discard(last)
            if last is transport:
                return
        self._taken = True
        self._others.all.add(transport)
        self._others.mute[transport] = None
        self._timer = asyncio.get_running_loop().call_later(HEAD_SECONDS, transport.abort)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``; the end of a head may come in pieces."""
        if not self._heard:
            self._tail = self._tail[-len(_END) + 1 :] + data
            self._heard = _END in self._tail
            if self._heard and self._timer is not None:
                self._timer.cancel()
                self._others.mute.pop(self._transport, None)
        if self._taken:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """See ``asyncio.Protocol``."""
        return self._inner.eof_received() if self._taken else None

    def pause_writing(self) -> None:
        """See ``asyncio.Protocol``."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """See ``asyncio.Protocol``."""
        self._inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        self._others.discard(self._transport)
        if self._timer is not None:
            self._timer.cancel()
        if self._taken:
            self._inner.connection_lost(error)
