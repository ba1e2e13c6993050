"""The agent side of ACP version 1: which request does what."""

from __future__ import annotations

import os
import signal

from demo import history
from demo.commands import COMMANDS, hang, work_for
from demo.loading import LoadFailed, reopen
from demo.loop import Loop, Wait
from demo.session import MODELS, MODES, Session, Turn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any

VERSION = "1"
PROTOCOL_VERSION = 1
RECORD = "<conversation_record>"
RESTARTED = "The runner had to restart you"


class Refused(Exception):
    """A request that is answered with a JSON-RPC error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Agent:
    """Answers requests at once; prompts run as turns."""

    def __init__(self) -> None:
        self.loop = Loop(self.receive)
        self.sessions: dict[str, Session] = {}

    def receive(self, message: dict[str, Any]) -> None:
        """One request or notification of the client."""
        method, params = message["method"], message.get("params")
        params = params if isinstance(params, dict) else {}
        if "id" not in message:
            if method == "session/cancel":
                self._cancel(self.sessions.get(params.get("sessionId", "")))
            elif method == "$/cancel_request":
                self._cancel_request(params.get("requestId"))
            return
        handler = _REQUESTS.get(method)
        try:
            if handler is None:
                raise Refused(-32601, f"method not found: {method}")
            result = handler(self, params, message["id"])
        except Refused as refusal:
            error = {"code": refusal.code, "message": str(refusal)}
            self.loop.send_message({"jsonrpc": "2.0", "id": message["id"], "error": error})
            return
        if result is not None:
            self.loop.send_message({"jsonrpc": "2.0", "id": message["id"], "result": result})
            if method in ("session/new", "session/load", "session/resume"):
                self._announce(self.sessions[result.get("sessionId") or params["sessionId"]])

    def _announce(self, session: Session) -> None:
        commands = [
            {"name": name, "description": (work.__doc__ or "").splitlines()[0]} for name, work in COMMANDS.items()
        ]
        session.update("available_commands_update", availableCommands=commands)

    def _initialize(self, params: dict[str, Any], identity: Any) -> dict[str, Any]:
        return {
            "protocolVersion": PROTOCOL_VERSION,
            "agentInfo": {"name": "demo", "title": "Demo agent", "version": VERSION},
            "agentCapabilities": {
                "loadSession": True,
                "promptCapabilities": {"image": True, "audio": False, "embeddedContext": True},
                "sessionCapabilities": {"close": {}, "resume": {}, "list": {}},
            },
            "authMethods": [],
        }

    def _authenticate(self, params: dict[str, Any], identity: Any) -> dict[str, Any]:
        raise Refused(-32602, "the demo agent needs no authentication")

    def _new(self, params: dict[str, Any], identity: Any) -> dict[str, Any]:
        session = self._open(params, None)
        return {"sessionId": session.id, **session.setup}

    def _load(self, params: dict[str, Any], identity: Any) -> dict[str, Any] | None:
        return self._reopen(params, identity, loading=True)

    def _resume(self, params: dict[str, Any], identity: Any) -> dict[str, Any] | None:
        return self._reopen(params, identity, loading=False)

    def _reopen(self, params: dict[str, Any], identity: Any, loading: bool) -> dict[str, Any] | None:
        wanted = str(params.get("sessionId"))
        if not history.known(wanted):
            raise Refused(-32002, f"no such session: {wanted}")
        session = self._open(params, wanted)
        try:
            return reopen(session, identity, session.setup, loading)
        except LoadFailed as failure:
            del self.sessions[session.id]
            raise Refused(-32603, str(failure)) from None

    def _open(self, params: dict[str, Any], identity: str | None) -> Session:
        cwd = params.get("cwd")
        if not isinstance(cwd, str) or not cwd.startswith("/"):
            raise Refused(-32602, "cwd must be an absolute path")
        session = Session(self.loop, cwd, identity)
        self.sessions[session.id] = session
        return session

    def _list(self, params: dict[str, Any], identity: Any) -> dict[str, Any]:
        cwd = params.get("cwd")
        return {"sessions": [item for item in history.listing() if cwd in (None, item["cwd"])]}

    def _close(self, params: dict[str, Any], identity: Any) -> dict[str, Any]:
        session = self._session(params)
        self._cancel(session, forced=True)
        session.journal.close()
        del self.sessions[session.id]
        return {}

    def _set_mode(self, params: dict[str, Any], identity: Any) -> dict[str, Any]:
        session, mode = self._session(params), params.get("modeId")
        if mode not in MODES:
            raise Refused(-32602, f"unknown mode: {mode}")
        session.mode = mode
        return {}

    def _set_config_option(self, params: dict[str, Any], identity: Any) -> dict[str, Any]:
        session = self._session(params)
        name, value = params.get("configId"), params.get("value")
        choices = {"mode": MODES, "model": MODELS}.get(str(name))
        if choices is None or value not in choices:
            raise Refused(-32602, f"unknown option or value: {name} = {value}")
        setattr(session, str(name), value)
        return {"configOptions": session.config_options}

    def _prompt(self, params: dict[str, Any], identity: Any) -> None:
        session = self._session(params)
        if session.turn is not None:
            raise Refused(-32600, "another prompt is running in this session")
        told, blocks = _told(params.get("prompt"))
        text = _text_of(blocks)
        if session.unfinished and text.startswith(RESTARTED):
            text = session.unfinished
        session.unfinished = ""
        session.turn = Turn(identity, text, told)
        session.told = told or session.told
        session.prompts += 1
        session.turn.work = self._run(session, session.turn, text)
        self.loop.start(session.turn.work)

    def _run(self, session: Session, turn: Turn, text: str) -> Generator[Wait]:
        yield from hang(session, "") if session.silent else work_for(session, text)
        self._settle(session, turn)

    def _settle(self, session: Session, turn: Turn) -> None:
        """Keep what was said, then answer the open prompt: an answered turn is remembered after a kill."""
        session.turn = None
        session.keep(turn)
        answer = {"error": turn.error} if turn.error else {"result": {"stopReason": turn.stop_reason}}
        self.loop.send_message({"jsonrpc": "2.0", "id": turn.id, **answer})
        if turn.exit_afterwards:
            self.loop.start(_exit_soon())

    def _cancel(self, session: Session | None, forced: bool = False, error: dict[str, Any] | None = None) -> None:
        turn = session.turn if session is not None else None
        if session is None or turn is None or turn.work is None or (turn.deaf and not forced):
            return
        self.loop.stop(turn.work)
        turn.stop_reason, turn.error = "cancelled", error
        self._settle(session, turn)

    def _cancel_request(self, identity: Any) -> None:
        for session in list(self.sessions.values()):
            if session.turn is not None and session.turn.id == identity:
                self._cancel(session, error={"code": -32800, "message": "the request was cancelled"})

    def _session(self, params: dict[str, Any]) -> Session:
        session = self.sessions.get(str(params.get("sessionId")))
        if session is None:
            raise Refused(-32602, f"no such session: {params.get('sessionId')}")
        return session


def _exit_soon() -> Generator[Wait]:
    yield Wait(seconds=0.1)
    os._exit(0)


def _told(prompt: Any) -> tuple[str, Any]:
    """What the client writes of an earlier conversation, which this agent does not know, and the other blocks."""
    if not isinstance(prompt, list):
        return "", prompt
    texts = [str(block.get("text", "")) if isinstance(block, dict) else "" for block in prompt]
    is_told = [text.startswith(RECORD) for text in texts]
    told = "\n".join(text for text, known in zip(texts, is_told, strict=True) if known)
    return told, [block for block, known in zip(prompt, is_told, strict=True) if not known]


def _text_of(prompt: Any) -> str:
    """The text blocks of a prompt; other kinds are named in brackets."""
    if not isinstance(prompt, list):
        raise Refused(-32602, "prompt must be a list of content blocks")
    parts = []
    for block in prompt:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            parts.append(str(block.get("text", "")))
        else:
            parts.append(f"[{kind} {block.get('uri', '')}]" if isinstance(block, dict) else "[?]")
    return "\n".join(parts)


_REQUESTS = {
    "initialize": Agent._initialize,
    "authenticate": Agent._authenticate,
    "session/new": Agent._new,
    "session/load": Agent._load,
    "session/resume": Agent._resume,
    "session/list": Agent._list,
    "session/close": Agent._close,
    "session/set_mode": Agent._set_mode,
    "session/set_config_option": Agent._set_config_option,
    "session/prompt": Agent._prompt,
}


def main() -> None:
    """Serve stdin and stdout until stdin ends."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    Agent().loop.run()
