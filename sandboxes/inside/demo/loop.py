"""One thread: JSON lines in, bytes out, and turns that run as generators between them."""

from __future__ import annotations

import json
import os
import select
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Any

_CHUNK = 262_144
ROOM = 1_048_576


class Wait:
    """What a paused generator waits for; any one of them resumes it.

    Args:
        seconds: time from now.
        fds: descriptors, one of them readable.
        reply: the client's answer to a request, see ``Loop.request``.
        room: the output buffer is below ``ROOM`` bytes.
    """

    __slots__ = ("fds", "reply", "room", "until")

    def __init__(
        self, seconds: float | None = None, fds: tuple[int, ...] = (), reply: Reply | None = None, room: bool = False
    ) -> None:
        self.until = None if seconds is None else time.monotonic() + seconds
        self.fds = fds
        self.reply = reply
        self.room = room


class Reply:
    """The answer to a request of ours: ``message`` is None until it came."""

    __slots__ = ("id", "message")

    def __init__(self, identity: int) -> None:
        self.id = identity
        self.message: dict[str, Any] | None = None


class Loop:
    """Owns stdin and stdout; stdout never blocks it, so a cancel is always seen."""

    def __init__(self, receive: Callable[[dict[str, Any]], None]) -> None:
        self._receive = receive
        self._rest = b""
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._replies: dict[int, Reply] = {}
        self._next_id = 0
        self._names = 0
        self._running: dict[Generator[Wait], Wait | None] = {}
        os.set_blocking(1, False)

    def run(self) -> None:
        """Serve until stdin ends; what still runs is closed then."""
        poll = select.poll()
        poll.register(0, select.POLLIN)
        while True:
            timeout, watched = self._interest(poll)
            ready = {fd for fd, _ in poll.poll(timeout)}
            for fd in watched:
                poll.unregister(fd)
            if 1 in ready:
                self.flush()
            if 0 in ready and not self._read():
                break
            self._advance(ready)
        for work in list(self._running):
            self.stop(work)
        self.flush()

    def start(self, work: Generator[Wait]) -> None:
        """Run a generator up to its first wait; it goes on from ``run``."""
        self._running[work] = None
        self._resume(work)

    def stop(self, work: Generator[Wait]) -> None:
        """Close a generator: its ``finally`` parts run before this returns."""
        self._running.pop(work, None)
        work.close()

    def send(self, data: bytes) -> None:
        """Queue bytes; they go out at the next ``flush``."""
        self._unsent.append(data)
        self._unsent_bytes += len(data)

    def send_message(self, message: dict[str, Any]) -> None:
        """Queue one JSON-RPC message."""
        self.send(json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n")

    def request(self, method: str, params: dict[str, Any]) -> Reply:
        """Queue a request to the client; wait for the result with ``Wait(reply=…)``."""
        self._next_id += 1
        reply = self._replies[self._next_id] = Reply(self._next_id)
        self.send_message({"jsonrpc": "2.0", "id": reply.id, "method": method, "params": params})
        return reply

    def new_name(self, kind: str) -> str:
        """A name that this process gave to nothing else."""
        self._names += 1
        return f"{kind}-{self._names}"

    def flush(self) -> None:
        """Write as much as the pipe takes now."""
        if not self._unsent:
            return
        data = b"".join(self._unsent) if len(self._unsent) > 1 else self._unsent[0]
        view, sent = memoryview(data), 0
        try:
            while sent < len(data):
                sent += os.write(1, view[sent : sent + _CHUNK])
        except BlockingIOError:
            pass
        except OSError:
            sent = len(data)
        self._unsent = [data[sent:]] if sent < len(data) else []
        self._unsent_bytes = len(data) - sent

    def flush_all(self) -> None:
        """Write all that is queued, however long the client takes."""
        while self._unsent:
            select.select([], [1], [])
            self.flush()

    def _interest(self, poll: select.poll) -> tuple[float | None, list[int]]:
        watched = []
        soonest: float | None = None
        if self._unsent:
            poll.register(1, select.POLLOUT)
            watched.append(1)
        for wait in self._running.values():
            if wait is None or (wait.room and self._unsent_bytes < ROOM) or (wait.reply and wait.reply.message):
                soonest = 0.0
                continue
            for fd in wait.fds:
                poll.register(fd, select.POLLIN)
                watched.append(fd)
            if wait.until is not None and (soonest is None or wait.until < soonest):
                soonest = wait.until
        return None if soonest is None else max(0.0, (soonest - time.monotonic()) * 1000 + 0.5), watched

    def _read(self) -> bool:
        data = os.read(0, _CHUNK)
        *lines, self._rest = (self._rest + data).split(b"\n") if self._rest else data.split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if not isinstance(message, dict):
                continue
            reply = self._replies.pop(message.get("id", 0), None) if "method" not in message else None
            if reply is not None:
                reply.message = message
            elif "method" in message:
                self._receive(message)
        self.flush()
        return bool(data)

    def _advance(self, ready: set[int]) -> None:
        now = time.monotonic()
        for work, wait in list(self._running.items()):
            if work in self._running and (
                wait is None
                or (wait.until is not None and now >= wait.until)
                or (wait.room and self._unsent_bytes < ROOM)
                or (wait.reply is not None and wait.reply.message is not None)
                or not ready.isdisjoint(wait.fds)
            ):
                self._resume(work)
        self.flush()

    def _resume(self, work: Generator[Wait]) -> None:
        try:
            self._running[work] = next(work)
        except StopIteration:
            self._running.pop(work, None)
