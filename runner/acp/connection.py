"""Our connection to one agent: client calls, answers to its calls, one ordered inbox per agent session."""

from __future__ import annotations

import asyncio
import codecs
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from runner import __version__
from runner.acp.inbox import (
    AgentError,
    Closed,
    Inbox,
    Item,
    PermissionAsked,
    PermissionWithdrawn,
    PromptAnswered,
    Updates,
)
from runner.acp.peer import MIB, Peer, response_id
from runner.acp.transport import ExitInfo, Transport
from runner.clock import Clock, SystemClock
from runner.errors import RunnerError
from runner.redaction import Redactor, StreamRedactor

__all__ = [
    "AgentConnection",
    "AgentError",
    "AgentInfo",
    "Closed",
    "Inbox",
    "Item",
    "NewSession",
    "PermissionAsked",
    "PermissionWithdrawn",
    "PromptAnswered",
    "Updates",
]

PROTOCOL_VERSION: Final = 1
TAIL_CHARS: Final = 8 * 1024
INBOX_BYTES: Final = 8 * MIB
METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602
INVALID_REQUEST: Final = -32600
CANCELLED: Final = -32800
AUTH_REQUIRED: Final = -32000
CAPABILITIES: Final[dict[str, Any]] = {"fs": {"readTextFile": False, "writeTextFile": False}, "terminal": False}


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """What ``initialize`` answered."""

    protocol_version: int
    name: str | None
    version: str | None
    capabilities: dict[str, Any] = field(default_factory=dict)
    auth_methods: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class NewSession:
    """What ``session/new`` answered."""

    agent_session_id: str
    modes: dict[str, Any] | None
    config_options: list[dict[str, Any]] | None


class StderrTail:
    """The last part of an agent's stderr, masked, bounded."""

    def __init__(self, redactor: Redactor) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace")
        self._mask = StreamRedactor(redactor)
        self._text = ""

    def feed(self, data: bytes) -> None:
        """A chunk, cut anywhere."""
        self._text = (self._text + self._mask.feed(self._decode.decode(data)))[-TAIL_CHARS:]

    def read(self) -> str:
        """The tail as it is now."""
        return self._text


class AgentConnection:
    """One agent process's connection. All calls on the event loop's thread.

    Args:
        transport: its bytes; connected here.
        max_line_bytes: longest line that is accepted.
        redactor: masks secrets in what is kept of stderr and noise.
        clock: for ``last_activity``.
        inbox_bytes: how much may be queued unread before reading stops.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        max_line_bytes: int = 64 * MIB,
        redactor: Redactor | None = None,
        clock: Clock | None = None,
        inbox_bytes: int = INBOX_BYTES,
    ) -> None:
        self._transport = transport
        self._clock = clock or SystemClock()
        self._redactor = redactor or Redactor()
        self._peer = Peer(max_line_bytes)
        self._stderr = StderrTail(self._redactor)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._prompts: dict[int, str] = {}
        self._inboxes: dict[str, Inbox] = {}
        self._asked: dict[int, tuple[Any, str]] = {}
        self._next_key = 0
        self._inbox_bytes = inbox_bytes
        self._reading_paused = False
        self._drain_waiters: list[asyncio.Future[None]] = []
        self._error: RunnerError | None = None
        self.counts: Counter[str] = Counter()
        self.last_activity = self._clock.monotonic()
        transport.connect(self)

    # -- client calls ------------------------------------------------------------------------------------------------

    async def call(self, method: str, params: dict[str, Any], *, seconds: float) -> Any:
        """Send a request and wait for its answer, at most ``seconds``.

        Giving up (time-out, or cancellation of the caller) tells the agent by ``$/cancel_request``.

        Raises:
            AgentError: the agent answered with an error.
            RunnerError: ``harness_exited`` or what else ended the connection.
            TimeoutError: no answer in time.
        """
        request_id, frame = self._peer.request(method, params)
        answer = self._calls[request_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(frame)
            async with asyncio.timeout(seconds):
                return await answer
        except ConnectionError:
            raise self.exit_error() from None
        except (TimeoutError, asyncio.CancelledError):
            self._abandon(request_id)
            raise
        finally:
            self._calls.pop(request_id, None)

    def _abandon(self, request_id: int) -> None:
        try:
            self._send(self._peer.notification("$/cancel_request", {"requestId": request_id}))
        except ConnectionError:
            self.counts["abandoned_unsent"] += 1

    async def initialize(self, *, seconds: float = 90.0) -> AgentInfo:
        """Negotiate the protocol.

        Raises:
            RunnerError: ``harness_protocol_error`` when the agent does not speak version 1 (case E11).
            AgentError, TimeoutError: as ``call``.
        """
        params = {
            "protocolVersion": PROTOCOL_VERSION,
            "clientCapabilities": CAPABILITIES,
            "clientInfo": {"name": "acp-runner", "title": "acp-runner", "version": __version__},
        }
        answer = await self.call("initialize", params, seconds=seconds)
        if not isinstance(answer, dict):
            raise RunnerError("harness_protocol_error", "The agent answered initialize without an object.")
        version = answer.get("protocolVersion")
        if isinstance(version, bool) or version != PROTOCOL_VERSION or not isinstance(version, int):
            raise RunnerError(
                "harness_protocol_error",
                f"The agent speaks protocol version {version!r}; this runner speaks {PROTOCOL_VERSION}.",
            )
        info = _dict(answer.get("agentInfo"))
        methods = answer.get("authMethods")
        return AgentInfo(
            version,
            _text(info.get("name")),
            _text(info.get("version")),
            _dict(answer.get("agentCapabilities")),
            methods if isinstance(methods, list) else [],
        )

    async def new_session(self, cwd: str, mcp_servers: list[dict[str, Any]], *, seconds: float = 90.0) -> NewSession:
        """Open an agent session; its inbox exists from the moment its id is known.

        Raises:
            RunnerError: ``harness_auth_required``, ``harness_protocol_error``.
            AgentError, TimeoutError: as ``call``.
        """
        try:
            answer = await self.call("session/new", {"cwd": cwd, "mcpServers": mcp_servers}, seconds=seconds)
        except AgentError as error:
            if error.code == AUTH_REQUIRED:
                raise RunnerError("harness_auth_required", f"The agent needs a login: {error.message}") from None
            raise
        given = _dict(answer)
        agent_session_id = given.get("sessionId")
        if not isinstance(agent_session_id, str) or not agent_session_id:
            raise RunnerError("harness_protocol_error", "The agent answered session/new without a session id.")
        options = given.get("configOptions")
        known = [option for option in options if isinstance(option, dict)] if isinstance(options, list) else None
        return NewSession(agent_session_id, _dict(given.get("modes")) or None, known)

    async def close_session(self, agent_session_id: str, *, seconds: float = 5.0) -> None:
        """Close an agent session. Raises as ``call``."""
        await self.call("session/close", {"sessionId": agent_session_id}, seconds=seconds)
        self._inboxes.pop(agent_session_id, None)

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
        answer = _dict(await self.call("session/set_config_option", params, seconds=seconds))
        options = answer.get("configOptions")
        return [option for option in options if isinstance(option, dict)] if isinstance(options, list) else None

    def prompt(self, agent_session_id: str, blocks: list[dict[str, Any]]) -> int:
        """Queue the ``session/prompt`` frame; its answer comes through the inbox as ``PromptAnswered``.

        Returns:
            The request id.

        Raises:
            ConnectionError: nothing was queued.
        """
        request_id, frame = self._peer.request("session/prompt", {"sessionId": agent_session_id, "prompt": blocks})
        self._send(frame)
        self._prompts[request_id] = agent_session_id
        return request_id

    def cancel(self, agent_session_id: str) -> None:
        """Queue ``session/cancel``; never blocks, even when the agent stopped reading. Raises ``ConnectionError``."""
        self._send(self._peer.notification("session/cancel", {"sessionId": agent_session_id}))

    async def flush(self, seconds: float) -> bool:
        """Wait until the kernel has taken everything that was queued; False when it did not within ``seconds``."""
        deadline = self._clock.monotonic() + seconds
        while self._transport.unsent and self._error is None:
            left = deadline - self._clock.monotonic()
            if left <= 0:
                return False
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._drain_waiters.append(waiter)
            await asyncio.wait({waiter}, timeout=left)
        return self._transport.unsent == 0

    # -- answers to the agent's calls --------------------------------------------------------------------------------

    def respond(self, key: int, result: dict[str, Any]) -> bool:
        """Answer a permission request; False when it was answered or withdrawn before. Raises ``ConnectionError``."""
        asked = self._asked.pop(key, None)
        if asked is None:
            return False
        self._send(self._peer.result(asked[0], result))
        return True

    def respond_error(self, key: int, code: int, message: str) -> bool:
        """Refuse a permission request with a JSON-RPC error; as ``respond``."""
        asked = self._asked.pop(key, None)
        if asked is None:
            return False
        self._send(self._peer.error(asked[0], code, message))
        return True

    # -- what a turn reads -------------------------------------------------------------------------------------------

    def inbox(self, agent_session_id: str) -> Inbox:
        """The session's inbox; what arrives for a session without one is counted and dropped."""
        inbox = self._inboxes.get(agent_session_id)
        if inbox is None:
            inbox = self._inboxes[agent_session_id] = Inbox(self._drained)
            if self._error is not None:
                inbox.put(Closed(self._error))
        return inbox

    def stderr_tail(self) -> str:
        """The last 8 KiB of stderr, masked."""
        return self._stderr.read()

    def exit_error(self) -> RunnerError:
        """Why the connection is over."""
        return self._error or RunnerError("harness_exited", "The agent closed its stdin.")

    def diagnostics(self) -> dict[str, Any]:
        """Counters and a bounded sample of noise."""
        noise = self._peer.noise
        sample = [self._redactor.text(line) for line in noise.sample()]
        return {**self.counts, "noise": noise.count, "oversized": noise.oversized, "noise_sample": sample}

    # -- the transport's calls ---------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Bytes of stdout."""
        if self._error is not None:
            return
        messages = self._peer.feed(data)
        if messages:
            self.last_activity = self._clock.monotonic()
            self._take(messages)
        if self._peer.hopeless:
            last = " | ".join(self._peer.noise.last)
            self._fail(RunnerError("harness_protocol_error", self._redactor.text(f"No messages, only: {last}")))

    def _take(self, messages: list[tuple[dict[str, Any], int]]) -> None:
        touched: set[Inbox] = set()
        for message, size in messages:
            method = message.get("method")
            if method == "session/update":
                inbox = self._update(message, size)
            elif isinstance(method, str):
                inbox = self._request(message, method, size) if "id" in message else self._notified(message, method)
            else:
                inbox = self._response(message, size)
            if inbox is not None:
                touched.add(inbox)
        for inbox in touched:
            inbox.notify()
        if not self._reading_paused and any(inbox.queued_bytes > self._inbox_bytes for inbox in touched):
            self._reading_paused = True
            self._transport.pause_reading()

    def stderr_received(self, data: bytes) -> None:
        """Bytes of stderr."""
        self._stderr.feed(data)

    def eof_received(self) -> None:
        """Stdout ended."""
        rest = self._peer.close()
        if rest and self._error is None:
            self._take(rest)

    def exited(self, info: ExitInfo) -> None:
        """The agent is gone."""
        tail = self.stderr_tail().strip()
        shown = f" Its last words: {tail[-500:]}" if tail else ""
        error = RunnerError(
            "harness_exited",
            f"The agent ended: {info}.{shown}",
            exit_code=info.code,
            signal=info.signal,
            stderr_tail=tail,
        )
        self._fail(error)

    def writable(self) -> None:
        """The transport's buffer drained."""
        waiters, self._drain_waiters = self._drain_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _send(self, frame: bytes) -> None:
        if self._error is not None:
            raise ConnectionError(self._error.message)
        self._transport.send(frame)

    def _fail(self, error: RunnerError) -> None:
        if self._error is not None:
            return
        self._error = error
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)
        self._asked.clear()
        self._prompts.clear()
        self.writable()
        for inbox in self._inboxes.values():
            inbox.put(Closed(error))
            inbox.notify()

    def _drained(self) -> None:
        if self._reading_paused and all(box.queued_bytes <= self._inbox_bytes // 2 for box in self._inboxes.values()):
            self._reading_paused = False
            self._transport.resume_reading()

    def _update(self, message: dict[str, Any], size: int) -> Inbox | None:
        params = message.get("params")
        if not isinstance(params, dict):
            self.counts["malformed"] += 1
            return None
        update = params.get("update")
        inbox = self._inbox_of(params)
        if inbox is None or not isinstance(update, dict):
            self.counts["stray_updates" if inbox is None else "malformed"] += 1
            return None
        inbox.put_update(update, size)
        return inbox

    def _inbox_of(self, params: dict[str, Any]) -> Inbox | None:
        agent_session_id = params.get("sessionId")
        return self._inboxes.get(agent_session_id) if isinstance(agent_session_id, str) else None

    def _notified(self, message: dict[str, Any], method: str) -> Inbox | None:
        if method != "$/cancel_request":
            self.counts["unknown_notifications"] += 1
            return None
        wanted = _dict(message.get("params")).get("requestId")
        for key, (raw_id, agent_session_id) in list(self._asked.items()):
            if type(raw_id) is type(wanted) and raw_id == wanted:
                self.respond_error(key, CANCELLED, "Request cancelled")
                inbox = self._inboxes.get(agent_session_id)
                if inbox is not None:
                    inbox.put(PermissionWithdrawn(key))
                return inbox
        return None

    def _request(self, message: dict[str, Any], method: str, size: int) -> Inbox | None:
        request_id = message["id"]
        params = _dict(message.get("params"))
        if request_id is None or isinstance(request_id, bool | dict | list):
            self.counts["malformed"] += 1
            return None
        if method == "session/request_permission":
            return self._permission(request_id, params, size)
        try:
            if method == "elicitation/create":
                self.counts["elicitations_declined"] += 1
                self._send(self._peer.result(request_id, {"action": "decline"}))
            else:
                self.counts["unknown_requests"] += 1
                self._send(self._peer.error(request_id, METHOD_NOT_FOUND, f"Method not found: {method}"))
        except ConnectionError:
            self.counts["unanswered"] += 1
        return None

    def _permission(self, request_id: Any, params: dict[str, Any], size: int) -> Inbox | None:
        inbox = self._inbox_of(params)
        problem = _permission_problem(params) if inbox is not None else "unknown session"
        if any(type(raw) is type(request_id) and raw == request_id for raw, _ in self._asked.values()):
            problem = "this request id is still open"
        if problem is not None or inbox is None:
            self.counts["malformed"] += 1
            try:
                self._send(self._peer.error(request_id, INVALID_PARAMS, f"Invalid params: {problem}"))
            except ConnectionError:
                self.counts["unanswered"] += 1
            return None
        self._next_key += 1
        self._asked[self._next_key] = (request_id, params["sessionId"])
        inbox.put(PermissionAsked(self._next_key, params), size)
        return inbox

    def _response(self, message: dict[str, Any], size: int) -> Inbox | None:
        request_id = response_id(message)
        if request_id is None or ("result" not in message and "error" not in message):
            self.counts["malformed"] += 1
            return None
        error = _agent_error(message.get("error"))
        agent_session_id = self._prompts.pop(request_id, None)
        if agent_session_id is not None:
            return self._prompt_answered(request_id, agent_session_id, message.get("result"), error, size)
        call = self._calls.get(request_id)
        if call is None or call.done():
            self.counts["duplicate_terminals"] += 1
        elif error is not None:
            call.set_exception(error)
        else:
            call.set_result(message.get("result"))
            self._open_inbox(message.get("result"))
        return None

    def _open_inbox(self, result: Any) -> None:
        """The answer to ``session/new`` opens the inbox at once: what follows in the same chunk is not lost."""
        agent_session_id = _dict(result).get("sessionId")
        if isinstance(agent_session_id, str):
            self.inbox(agent_session_id)

    def _prompt_answered(
        self, request_id: int, agent_session_id: str, result: Any, error: AgentError | None, size: int
    ) -> Inbox | None:
        inbox = self._inboxes.get(agent_session_id)
        if inbox is not None:
            inbox.put(PromptAnswered(request_id, result if isinstance(result, dict) else None, error), size)
        return inbox


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _agent_error(value: Any) -> AgentError | None:
    if value is None:
        return None
    given = _dict(value)
    code = given.get("code")
    message = given.get("message")
    return AgentError(
        code if isinstance(code, int) and not isinstance(code, bool) else -32603,
        message if isinstance(message, str) else str(value)[:500],
        given.get("data"),
    )


def _permission_problem(params: dict[str, Any]) -> str | None:
    options = params.get("options")
    if not isinstance(options, list) or not all(
        isinstance(option, dict) and isinstance(option.get("optionId"), str) for option in options
    ):
        return "options must be a list of objects with an optionId"
    tool_call = params.get("toolCall")
    if not isinstance(tool_call, dict) or not isinstance(tool_call.get("toolCallId"), str):
        return "toolCall must have a toolCallId"
    return None
