"""Our connection to one agent: client calls, answers to its calls, one ordered inbox per agent session."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, Final

from runner import __version__
from runner.acp.answers import PROTOCOL_VERSION, AgentInfo, NewSession, agent_info, config_options, login_needed
from runner.acp.answers import new_session as _new_session
from runner.acp.inbound import Inbound, copy_of
from runner.acp.inbox import (
    AgentError,
    Asked,
    Closed,
    ElicitationAsked,
    ElicitationCompleted,
    Inbox,
    Item,
    PermissionAsked,
    PermissionWithdrawn,
    PromptAnswered,
    Updates,
)
from runner.acp.peer import MIB, Message, Peer
from runner.acp.replay import Reopened
from runner.acp.stderr import StderrTail, shown
from runner.acp.transport import ExitInfo, Transport
from runner.clock import Clock, SystemClock
from runner.errors import RunnerError
from runner.redaction import Redactor

__all__ = [
    "AgentConnection",
    "AgentError",
    "AgentInfo",
    "Asked",
    "Closed",
    "ElicitationAsked",
    "ElicitationCompleted",
    "Inbox",
    "Item",
    "NewSession",
    "PermissionAsked",
    "PermissionWithdrawn",
    "PromptAnswered",
    "Updates",
]

INBOX_BYTES: Final = 8 * MIB
UNREAD_BYTES: Final = 64 * MIB
REPORT_SECONDS: Final = 1.0
NOISE_CHARS: Final = 300
DOES_NOT_READ: Final = "The agent does not read its input"
CAPABILITIES: Final[dict[str, Any]] = {
    "fs": {"readTextFile": False, "writeTextFile": False},
    "terminal": False,
    "elicitation": {"form": {}, "url": {}},
}


class AgentConnection:
    """One agent process's connection. All calls on the event loop's thread; no background task is made.

    Args:
        transport: its bytes; connected here.
        max_line_bytes: longest line that is accepted.
        redactor: masks secrets in what is kept of stderr and noise.
        clock: for ``last_activity`` and ``flush``.
        inbox_bytes: how much may be queued unread in one inbox before reading stops; read on below half.
        unread_bytes: a frame that meets more than that unread by the agent is refused, and the connection ends.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        max_line_bytes: int = 64 * MIB,
        redactor: Redactor | None = None,
        clock: Clock | None = None,
        inbox_bytes: int = INBOX_BYTES,
        unread_bytes: int = UNREAD_BYTES,
    ) -> None:
        self._transport = transport
        self._clock = clock or SystemClock()
        self._redactor = redactor or Redactor()
        self._peer = Peer(max_line_bytes)
        self._stderr = StderrTail(self._redactor)
        self._inbound = Inbound(self._try_send, self._drained)
        self._inbox_bytes = inbox_bytes
        self._unread_bytes = unread_bytes
        self._reading_paused = False
        self._does_not_read = False
        self._flushers: set[asyncio.Future[None]] = set()
        self._error: RunnerError | None = None
        self.last_activity = self._clock.monotonic()
        """``clock.monotonic()`` of the last bytes that completed a message of any kind (case E10)."""
        transport.connect(self)

    # Client calls.

    async def call(self, method: str, params: dict[str, Any], *, seconds: float) -> Any:
        """Send a request and wait for its result, at most ``seconds``.

        Giving up (time-out, or cancellation of the caller) tells the agent by ``$/cancel_request`` and forgets the
        request: a late answer is dropped and counted.

        Raises:
            AgentError: the agent answered with an error.
            RunnerError: ``harness_exited`` or what else ended the connection.
            TimeoutError: no answer in time.
        """
        if self._error is not None:
            raise self.exit_error()
        request_id, frame = self._peer.request(method, params)
        sent = self._try_send(frame)
        answer = self._inbound.calls[request_id] = asyncio.get_running_loop().create_future()
        try:
            # Without stdin no answer can come, but the exit report with its code is likely on its way.
            async with asyncio.timeout(seconds if sent else min(seconds, REPORT_SECONDS)):
                return await answer
        except (TimeoutError, asyncio.CancelledError) as error:
            if not sent and isinstance(error, TimeoutError):
                raise self.exit_error() from None
            self._try_send(Peer.notification("$/cancel_request", {"requestId": request_id}))
            raise
        finally:
            del self._inbound.calls[request_id]
            if answer.done() and not answer.cancelled():
                answer.exception()

    async def initialize(self, *, seconds: float = 90.0) -> AgentInfo:
        """Negotiate the protocol: version 1, elicitations as form and URL, no file system, no terminals.

        Raises:
            RunnerError: ``harness_protocol_error`` when the agent does not speak version 1 (case E11),
                ``harness_auth_required``.
            AgentError, TimeoutError: as ``call``.
        """
        params = {
            "protocolVersion": PROTOCOL_VERSION,
            "clientCapabilities": CAPABILITIES,
            "clientInfo": {"name": "acp-runner", "title": "acp-runner", "version": __version__},
        }
        return agent_info(await self._call_or_login("initialize", params, seconds))

    async def new_session(self, cwd: str, mcp_servers: list[dict[str, Any]], *, seconds: float = 90.0) -> NewSession:
        """Open an agent session; its inbox exists from the moment its id is known.

        Raises:
            RunnerError: ``harness_auth_required``, ``harness_protocol_error``.
            AgentError, TimeoutError: as ``call``.
        """
        params = {"cwd": cwd, "mcpServers": mcp_servers}
        return _new_session(await self._call_or_login("session/new", params, seconds))

    async def load_session(
        self, agent_session_id: str, cwd: str, mcp_servers: list[dict[str, Any]], *, seconds: float = 90.0
    ) -> Reopened:
        """Load an agent session of an earlier process, when ``AgentInfo.loads``; its replay is dropped (case G13).

        The replay window is open from the request until the answer and a quiet gap behind it, or our first prompt.

        Raises:
            ValueError: the session is live in this connection already (case D3).
            RunnerError: ``harness_auth_required``, ``harness_exited``.
            AgentError, TimeoutError: as ``call``; then the session has no inbox.
        """
        params = {"sessionId": agent_session_id, "cwd": cwd, "mcpServers": mcp_servers}
        request = self._call_or_login("session/load", params, seconds)
        return await self._inbound.replay(agent_session_id, self._clock, request)

    async def resume_session(
        self, agent_session_id: str, cwd: str, mcp_servers: list[dict[str, Any]], *, seconds: float = 90.0
    ) -> Reopened:
        """As ``load_session``, when ``AgentInfo.resumes``: what an agent replays all the same is dropped too."""
        params = {"sessionId": agent_session_id, "cwd": cwd, "mcpServers": mcp_servers}
        request = self._call_or_login("session/resume", params, seconds)
        return await self._inbound.replay(agent_session_id, self._clock, request)

    async def _call_or_login(self, method: str, params: dict[str, Any], seconds: float) -> Any:
        try:
            return await self.call(method, params, seconds=seconds)
        except AgentError as error:
            login = login_needed(error)
            if login is None:
                raise
            raise login from None

    async def close_session(self, agent_session_id: str, *, seconds: float = 5.0) -> None:
        """Close an agent session; its inbox is gone once the agent agreed. Raises as ``call``."""
        await self.call("session/close", {"sessionId": agent_session_id}, seconds=seconds)
        self._inbound.forget(agent_session_id)
        self._drained()

    async def set_mode(self, agent_session_id: str, mode: str, *, seconds: float = 10.0) -> None:
        """Set a mode. Raises as ``call``."""
        await self.call("session/set_mode", {"sessionId": agent_session_id, "modeId": mode}, seconds=seconds)

    async def set_config_option(
        self, agent_session_id: str, name: str, value: str | bool, *, seconds: float = 10.0
    ) -> list[dict[str, Any]] | None:
        """Set a config option; the agent's complete new list when it answers one. Raises as ``call``."""
        params: dict[str, Any] = {"sessionId": agent_session_id, "configId": name, "value": value}
        if isinstance(value, bool):
            params["type"] = "boolean"
        return config_options(await self.call("session/set_config_option", params, seconds=seconds))

    def prompt(self, agent_session_id: str, blocks: list[dict[str, Any]]) -> int:
        """Queue the ``session/prompt`` frame; its answer comes through the inbox as ``PromptAnswered``.

        Returns:
            The request id.

        Raises:
            ConnectionError: nothing was queued.
        """
        self._inbound.prompting(agent_session_id)
        request_id, frame = self._peer.request("session/prompt", {"sessionId": agent_session_id, "prompt": blocks})
        self._send(frame)
        self._inbound.prompts[request_id] = agent_session_id
        return request_id

    def cancel(self, agent_session_id: str) -> bool:
        """Queue ``session/cancel``; never blocks, even when the agent stopped reading.

        Returns:
            Whether the kernel has taken it already; else ``flush`` tells.

        Raises:
            ConnectionError: nothing was queued.
        """
        self._send(Peer.notification("session/cancel", {"sessionId": agent_session_id}))
        return self._transport.unsent == 0

    async def flush(self, seconds: float) -> bool:
        """Wait until the kernel has taken everything that was queued; False when it did not within ``seconds``."""
        deadline = self._clock.monotonic() + seconds
        while self._transport.unsent and self._error is None:
            left = deadline - self._clock.monotonic()
            if left <= 0:
                return False
            taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._flushers.add(taken)
            try:
                await asyncio.wait({taken}, timeout=left)
            finally:
                self._flushers.discard(taken)
        return self._error is None and self._transport.unsent == 0

    # Answers to the agent's questions.

    def respond(self, key: int, result: dict[str, Any]) -> bool:
        """Answer a question; False when it was answered or withdrawn before. Raises ``ConnectionError``."""
        for raw_id in self._inbound.asked.answered(key):
            self._send(Peer.result(raw_id, result))
            return True
        return False

    def respond_error(self, key: int, code: int, message: str) -> bool:
        """Refuse a question with a JSON-RPC error; as ``respond``."""
        for raw_id in self._inbound.asked.answered(key):
            self._send(Peer.error(raw_id, code, message))
            return True
        return False

    # What a turn reads.

    def inbox(self, agent_session_id: str) -> Inbox:
        """The session's inbox; what arrives for a session without one is counted and dropped (case E8)."""
        inbox = self._inbound.open(agent_session_id)
        if self._error is not None:
            inbox.put(Closed(self._error))
        return inbox

    @property
    def counts(self) -> Counter[str]:
        """What was dropped, declined or ignored, by name."""
        return self._inbound.counts

    def stderr_tail(self) -> str:
        """The last 8 KiB of stderr, masked."""
        return self._stderr.read()

    def last_words(self) -> str:
        """A sentence with the end of stderr, else with the last noise on stdout; empty when there was none (case E9).

        It starts with a space, masked and bounded: append it to an error's message.
        """
        words = self._stderr.words()
        if words:
            return f" Last stderr: {words}"
        noise = " | ".join(shown(self._redactor, line, NOISE_CHARS) for line in self._peer.noise.last())
        return f" Last output: {noise}" if noise else ""

    def exit_error(self) -> RunnerError:
        """Why the connection is over, as a new object each time."""
        if self._error is not None:
            return copy_of(self._error)
        if self._does_not_read:
            return RunnerError("harness_unresponsive", f"{DOES_NOT_READ}.{self.last_words()}")
        return RunnerError("harness_exited", f"The agent closed its stdin.{self.last_words()}")

    def diagnostics(self) -> dict[str, Any]:
        """Counters and a bounded, masked sample of noise."""
        noise = self._peer.noise
        return {
            **self.counts,
            "noise": noise.count,
            "blank_lines": noise.blank,
            "oversized": noise.oversized,
            "altered": noise.altered,
            "noise_sample": [shown(self._redactor, line, NOISE_CHARS) for line in noise.sample()],
        }

    # The transport's calls.

    def data_received(self, data: bytes) -> None:
        """Bytes of stdout."""
        if self._error is None:
            self._take(self._peer.feed(data))

    def _take(self, messages: list[Message]) -> None:
        if messages:
            self.last_activity = self._clock.monotonic()
            touched = self._inbound.take(messages)
            for inbox in touched:
                inbox.notify()
            if not self._reading_paused and any(inbox.queued_bytes > self._inbox_bytes for inbox in touched):
                self._reading_paused = True
                self._transport.pause_reading()
        if self._peer.failure is not None:
            self._end(RunnerError("harness_protocol_error", f"{self._peer.failure}{self.last_words()}"))

    def stderr_received(self, data: bytes) -> None:
        """Bytes of stderr."""
        self._stderr.feed(data)

    def eof_received(self) -> None:
        """Stdout ended."""
        if self._error is None:
            self._take(self._peer.close())

    def exited(self, info: ExitInfo) -> None:
        """The agent is gone: every open call fails at once, and each inbox ends (case E5)."""
        self.counts["unsent_bytes"] = self._transport.unsent
        tail = self.stderr_tail()
        self._end(
            RunnerError(
                "sandbox_lost" if info.lost else "harness_exited",
                f"The agent ended: {info}.{self.last_words()}",
                exit_code=info.code,
                signal=info.signal,
                stderr_tail=tail,
            )
        )

    def writable(self) -> None:
        """The transport's buffer drained."""
        for taken in self._flushers:
            if not taken.done():
                taken.set_result(None)

    # Inside.

    def _send(self, frame: bytes) -> None:
        if self._error is not None:
            raise ConnectionError(self._error.message)
        if self._transport.unsent > self._unread_bytes:
            if not self._does_not_read:
                self._does_not_read = True
                # Not from here: the sender must not find its inbox called back by its own call.
                asyncio.get_running_loop().call_soon(lambda: self._end(self.exit_error()))
            raise ConnectionError(DOES_NOT_READ)
        self._transport.send(frame)

    def _try_send(self, frame: bytes) -> bool:
        try:
            self._send(frame)
        except ConnectionError:
            self.counts["unsent"] += 1
            return False
        return True

    def _end(self, error: RunnerError) -> None:
        if self._error is not None:
            return
        self._error = error
        self._transport.pause_reading()
        self.writable()
        self._inbound.close(error)

    def _drained(self) -> None:
        low = self._inbox_bytes // 2
        if self._error is not None:
            return
        if self._reading_paused and all(inbox.queued_bytes <= low for inbox in self._inbound.inboxes.values()):
            self._reading_paused = False
            self._transport.resume_reading()
