"""The only way out of a cell with ``network = proxy``: an HTTP proxy of the runner's, on the cell's own loopback.

The cell's init makes the listening sockets inside and hands them over; the runner accepts on them and connects from
its own network. Nothing relays inside, and a cell that is gone has taken its sockets along.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from runner.rules.egress import AllowList, Target
from runner.rules.forwarding import ESTABLISHED, MAX_HEAD, Asked, BadHead, answer, refusal, request
from runner.sandbox.control import ControlChannel
from runner.tasks import Tasks

PROXY_PORT: Final = 3128
CLOSE_SECONDS: Final = 1.0
AGAIN_SECONDS: Final = 1.0
LOOKUPS: Final = 4
"""Names that one cell has looked up at a time; the system may take long over each, and cannot be stopped."""
MOST_TOLD: Final = 100
"""How many different refusals of one cell stand in the log."""
_LOOPBACK: Final = "127.0.0.1"
_CHUNK: Final = 64 * 1024
Place = tuple[socket.AddressFamily, tuple[str, int]]
log = logging.getLogger("runner.sandbox")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one cell's way out, in connections and seconds.

    ``idle``: neither side of an open connection says anything.
    """

    connections: int = 128
    head: float = 30.0
    connect: float = 15.0
    idle: float = 3600.0


BOUNDS: Final = Bounds()


def variables(port: int = PROXY_PORT) -> dict[str, str]:
    """What tells programs of a proxy on this port of theirs. Their own loopback they reach without it."""
    url, loopback = f"http://{_LOOPBACK}:{port}", "localhost,127.0.0.1,::1"
    found = {"NODE_USE_ENV_PROXY": "1"}
    for name, value in (("HTTP_PROXY", url), ("HTTPS_PROXY", url), ("ALL_PROXY", url), ("NO_PROXY", loopback)):
        found |= {name: value, name.lower(): value}
    return found


class Refused(Exception):
    """The proxy's own answer."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Egress:
    """One cell's way out.

    Args:
        name: of the cell, for the log.
        allowed: where to.
        own: loopback ports of the runner that every cell may use.
        bounds: limits.

    Attributes:
        ports: what it listens on inside: the proxy's, then those of this machine's loopback that are open.
    """

    def __init__(self, name: str, allowed: AllowList, own: Sequence[int] = (), bounds: Bounds = BOUNDS) -> None:
        self._name = name
        self._allowed = allowed
        self._forwarded = tuple(dict.fromkeys((*own, *allowed.loopback_ports())))
        free = next(port for port in range(PROXY_PORT, 65536) if port not in self._forwarded)
        self.ports = (free, *self._forwarded)
        self._bounds = bounds
        self._tasks = Tasks(f"egress {name}")
        self._listeners: list[socket.socket] = []
        self._told: set[str] = set()
        # Threads of its own: those that all share would wait for names that somebody in here chose.
        self._lookups = ThreadPoolExecutor(LOOKUPS, f"lookup-{name}")
        self._closed = False

    @property
    def connections(self) -> int:
        """How many are open now."""
        return max(0, len(self._tasks) - len(self._listeners))

    @property
    def variables(self) -> dict[str, str]:
        """What tells programs of the proxy."""
        return variables(self.ports[0])

    async def open(self, control: ControlChannel) -> str:
        """Let the init listen inside, and accept on its sockets; before the agent, whose first connection finds it.

        Returns:
            Why there is no way out; empty when there is one.
        """
        found = await control.request("listen", ports=list(self.ports))
        listeners = [socket.socket(fileno=fd) for fd in control.passed()]
        if self._closed or found is None or not found.get("ok") or len(listeners) != len(self.ports):
            for listener in listeners:
                listener.close()
            return "it was closed" if found is None or self._closed else str(found.get("error"))
        for listener, port in zip(listeners, (None, *self._forwarded), strict=True):
            listener.setblocking(False)
            self._listeners.append(listener)
            self._tasks.spawn("accept", self._accept(listener, port))
        return ""

    async def _accept(self, listener: socket.socket, port: int | None) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("the cell %s cannot connect: %s", self._name, error)
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            if self.connections >= self._bounds.connections:
                client.close()
                continue
            self._tasks.spawn("connection", self._connection(client, port))

    async def _connection(self, client: socket.socket, port: int | None) -> None:
        reader, writer = await asyncio.open_connection(sock=client, limit=MAX_HEAD)
        _undelayed(writer)
        try:
            if port is None:
                await self._proxied(reader, writer)
            else:
                there = await self._dial([(socket.AF_INET, (_LOOPBACK, port))], f"port {port} of the machine")
                await self._joined(reader, writer, *there)
        except Refused as error:
            self._tell(error)
            with suppress(OSError, TimeoutError):
                writer.write(refusal(error.status, str(error)) if port is None else b"")
                async with asyncio.timeout(self._bounds.head):
                    await writer.drain()
                    writer.write_eof()
                    # Closing over what it still sends would reset the connection before it has read why.
                    await _discarded(reader)
        except (OSError, TimeoutError, EOFError):
            pass
        finally:
            await _closed(writer)

    def _tell(self, error: Refused) -> None:
        if len(self._told) < MOST_TOLD and str(error) not in self._told:
            self._told.add(str(error))
            log.info("cell %s: %d: %s", self._name, error.status, error)

    async def _proxied(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await self._asked(reader)
        there, out = await self._dial(await self._addresses(asked.target), asked.target.authority)
        try:
            if asked.head is None:
                writer.write(ESTABLISHED)
                await self._joined(reader, writer, there, out)
                return
            out.write(asked.head)
            await self._joined(reader, writer, there, out, heads=True)
        finally:
            await _closed(out)

    async def _asked(self, reader: asyncio.StreamReader) -> Asked:
        try:
            async with asyncio.timeout(self._bounds.head):
                return request(await reader.readuntil(b"\r\n\r\n"))
        except asyncio.LimitOverrunError:
            raise Refused(400, f"a head of more than {MAX_HEAD} bytes") from None
        except BadHead as error:
            raise Refused(400, str(error)) from None

    async def _addresses(self, target: Target) -> list[Place]:
        """Looked up once; who is connected to is who was checked."""
        why = self._allowed.refusal(target)
        if why is not None:
            raise Refused(403, why)
        try:
            async with asyncio.timeout(self._bounds.connect):
                found = await asyncio.get_running_loop().run_in_executor(self._lookups, _looked_up, target)
        except (OSError, UnicodeError) as error:
            if isinstance(error, TimeoutError):
                raise Refused(504, f"{target.host} was not found in time") from None
            raise Refused(502, f"{target.host} was not found") from None
        addresses = [(family, (host, target.port)) for family, host in found]
        allowed: list[Place] = [
            (family, place)
            for family, place in dict.fromkeys(addresses)
            if self._allowed.address_allowed(target, ipaddress.ip_address(place[0].partition("%")[0]))
        ]
        if not allowed:
            raise Refused(403, f"{target.host} has no address that [local] allow_hosts allows")
        return allowed

    async def _dial(self, places: Sequence[Place], what: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        late = False
        for family, (host, port) in places:
            try:
                async with asyncio.timeout(self._bounds.connect):
                    there, out = await asyncio.open_connection(host, port, family=family, limit=MAX_HEAD)
                _undelayed(out)
                return there, out
            except TimeoutError:
                late = True
            except OSError:
                continue
        raise Refused(504 if late else 502, f"{what} cannot be reached")

    async def _joined(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        there: asyncio.StreamReader,
        out: asyncio.StreamWriter,
        *,
        heads: bool = False,
    ) -> None:
        """Pass on both ways until both have ended; each end alone is passed on alone.

        ``heads``: what comes back begins with heads of answers.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pumped(reader, out))
                group.create_task(self._answered(there, writer) if heads else self._pumped(there, writer))
        except* (OSError, TimeoutError, EOFError):
            pass
        finally:
            await _closed(out)

    async def _answered(self, there: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        last = False
        while not last:
            try:
                async with asyncio.timeout(self._bounds.idle):
                    head, last = answer(await there.readuntil(b"\r\n\r\n"))
            except (BadHead, asyncio.LimitOverrunError, asyncio.IncompleteReadError):
                writer.write(refusal(502, "the answer is no HTTP"))
                writer.write_eof()
                raise EOFError from None
            async with asyncio.timeout(self._bounds.idle):
                writer.write(head)
                await writer.drain()
        await self._pumped(there, writer)

    async def _pumped(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while True:
            async with asyncio.timeout(self._bounds.idle):
                data = await source.read(_CHUNK)
                if not data:
                    break
                sink.write(data)
                await sink.drain()
        if sink.can_write_eof() and not sink.is_closing():
            sink.write_eof()

    async def close(self) -> None:
        """End all: listeners and connections, at once."""
        self._closed = True
        await self._tasks.close()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        self._lookups.shutdown(wait=False, cancel_futures=True)


def _looked_up(target: Target) -> list[tuple[socket.AddressFamily, str]]:
    found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return [(family, str(place[0])) for family, _, _, _, place in found]


async def _discarded(reader: asyncio.StreamReader) -> None:
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS):
            while await reader.read(_CHUNK):
                pass


async def _closed(writer: asyncio.StreamWriter) -> None:
    """Give the descriptor back now. What is passed on to its end was drained before; anything else is dropped."""
    writer.transport.abort()
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS):
            await writer.wait_closed()


def _undelayed(writer: asyncio.StreamWriter) -> None:
    """``drain`` waits until all is with the kernel, and no small chunk waits for a bigger one."""
    writer.transport.set_write_buffer_limits(0)
    own = writer.get_extra_info("socket")
    if own is not None:
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
