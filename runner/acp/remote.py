"""The transport to an agent behind a bridge: its stdio and its init's control channel over one link."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from runner.acp import link
from runner.acp.transport import ExitInfo, Receiver
from runner.acp.websocket import BridgeConnection, Find

HIGH_MARK: Final = 1024 * 1024
LOW_MARK: Final = 256 * 1024
EXIT_WAIT_SECONDS: Final = 2.0
CLOSED: Final = "its streams were closed"
DEAF: Final = "it closed its stdin"


class RemoteTransport:
    """An agent's stdio through a bridge; what the agent's stdin has not taken counts as unsent.

    Args:
        find, secret, resume_seconds: see ``BridgeConnection``.
        on_control: called with every line of the init's control channel.
        on_over: called once when the init is gone (its exit code) or the link was lost (None), with a sentence.
        exit_wait_seconds, high_mark, low_mark: see ``StdioTransport``.
    """

    def __init__(
        self,
        find: Find,
        secret: str,
        *,
        resume_seconds: float,
        on_control: Callable[[bytes], None],
        on_over: Callable[[int | None, str], None],
        exit_wait_seconds: float = EXIT_WAIT_SECONDS,
        high_mark: int = HIGH_MARK,
        low_mark: int = LOW_MARK,
    ) -> None:
        self.connection = BridgeConnection(
            find,
            secret,
            resume_seconds=resume_seconds,
            on_frame=self._frame,
            on_acked=self._acked,
            on_lost=lambda why: self._end(None, why),
        )
        self._link = self.connection.link
        self._on_control, self._on_over = on_control, on_over
        self._exit_wait, self._high, self._low = exit_wait_seconds, high_mark, low_mark
        self._loop = asyncio.get_running_loop()
        self._receiver: Receiver | None = None
        self._held: deque[bytes] = deque()
        self._stderr: deque[bytes] = deque()
        self._paused = False
        self._eof_held = False
        self._eof_told = False
        self._full = False
        self._owed = False
        self._stdin_closed = False
        self._over = False
        self._exit: ExitInfo | None = None
        self._told = False
        self._timer: asyncio.TimerHandle | None = None

    async def open(self, seconds: float) -> None:
        """Reach the bridge; see ``BridgeConnection.open``."""
        await self.connection.open(seconds)

    def control(self, line: bytes) -> None:
        """Send one line to the init; dropped when it is gone."""
        if not self._over:
            self._link.send(link.CONTROL, line)
            self.connection.flush()

    @property
    def over(self) -> bool:
        """The init is gone or the link was lost."""
        return self._over

    # -- the port ----------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """The agent has no process id on this machine."""
        return None

    def connect(self, receiver: Receiver) -> None:
        """See ``transport.Transport.connect``."""
        self._receiver = receiver
        self._loop.call_soon(self._deliver)

    def send(self, data: bytes) -> bool:
        """See ``transport.Transport.send``."""
        if self._stdin_closed or self._over:
            raise ConnectionError("the agent's stdin is closed")
        self._link.send_stream(data)
        self.connection.flush()
        self._full, self._owed = self._full or self.unsent > self._high, True
        return not self._full

    @property
    def unsent(self) -> int:
        """Bytes that are not known to be in the agent's stdin."""
        return self._link.unconsumed

    def pause_reading(self) -> None:
        """See ``transport.Transport.pause_reading``; the bridge stops when the window is full."""
        self._paused = True

    def resume_reading(self) -> None:
        """See ``transport.Transport.resume_reading``."""
        self._paused = False
        if self._receiver is not None:
            self._loop.call_soon(self._deliver)

    def close_stdin(self) -> None:
        """See ``transport.Transport.close_stdin``."""
        if not self._stdin_closed:
            self._stdin_closed = True
            self._link.end_stream()
            self.connection.flush()

    def close(self) -> None:
        """See ``transport.Transport.close``; the link itself is closed by ``aclose``."""
        self._stdin_closed = True
        self._held.clear()
        self._stderr.clear()
        self._await_report(CLOSED)

    async def aclose(self) -> None:
        """Give the link up; bounded. Who waits for the init is told: it can be asked nothing any more."""
        await self.connection.close()
        self._end(None, "its link was closed")

    # -- what the bridge says ----------------------------------------------------------------------------------------

    def _frame(self, kind: bytes, payload: bytes) -> None:
        if kind == link.STREAM:
            self._held.append(payload)
            self._deliver()
        elif kind == link.STREAM_END:
            self._eof_held = True
            self._deliver()
        elif kind == link.STDERR:
            self._stderr.append(payload)
            self._deliver()
        elif kind == link.CONTROL:
            self._on_control(payload)
        elif kind == link.DEAF:
            self._stdin_closed = True
            self._await_report(DEAF)
        elif kind == link.OVER:
            self._end(int(payload), "the sandbox's init is gone")

    def _acked(self) -> None:
        taken = self._owed and not self.unsent
        if taken or (self._full and self.unsent <= self._low):
            self._full, self._owed = False, not taken
            if self._receiver is not None:
                self._receiver.writable()

    def _end(self, code: int | None, why: str) -> None:
        if not self._over:
            self._over = True
            self._on_over(code, why)

    def _deliver(self) -> None:
        """Hand over what is held; an exit takes everything with it, as the last words of a process."""
        if self._receiver is None:
            return
        while self._stderr and self._receiver is not None:
            self._receiver.stderr_received(self._stderr.popleft())
        while self._held and (not self._paused or self._exit is not None):
            data = self._held.popleft()
            self._link.consume(len(data))
            self._receiver.data_received(data)
        self.connection.flush()
        if self._held or not (self._eof_held or self._exit is not None):
            return
        if not self._eof_told:
            self._eof_told = True
            self._receiver.eof_received()
        if self._exit is None:
            self._await_report(CLOSED)
        elif not self._told:
            self._told = True
            if self._timer is not None:
                self._timer.cancel()
            self._receiver.exited(self._exit)

    def _await_report(self, reason: str) -> None:
        if self._timer is None and self._exit is None:
            self._timer = self._loop.call_later(self._exit_wait, lambda: self.process_exited(ExitInfo(reason=reason)))

    def process_exited(self, info: ExitInfo) -> None:
        """The agent is gone; the first report counts."""
        if self._exit is None:
            self._exit = info
        self._deliver()
