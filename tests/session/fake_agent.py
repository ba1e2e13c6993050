"""An agent in memory that a test drives frame by frame: it does nothing that the test does not say."""

from __future__ import annotations

import asyncio
from typing import Any

from runner.acp.memory import MemoryTransport
from runner.acp.transport import ExitInfo


class FakeAgent:
    """Answers ``initialize`` and ``session/new`` unless told not to; keeps every other frame for the test."""

    def __init__(self, pid: int, manners: dict[str, Any]) -> None:
        self.transport = MemoryTransport(pid)
        self.pid = pid
        self.manners = manners
        self.frames: list[dict[str, Any]] = []
        self.new_params: dict[str, Any] = {}
        self._arrived = asyncio.Condition()
        self._task = asyncio.get_running_loop().create_task(self._read(), name=f"agent {pid}")

    @property
    def _wire(self) -> Any:
        return self.transport.agent

    async def _read(self) -> None:
        while (frame := await self._wire.read_frame()) is not None:
            async with self._arrived:
                self.frames.append(frame)
                self._arrived.notify_all()
            await self._manners(frame)

    async def _manners(self, frame: dict[str, Any]) -> None:
        method = frame.get("method")
        gate = self.manners.get(f"gate:{method}")
        if gate is not None:
            await gate.wait()
        if method == "initialize" and self.manners.get("initialize", True):
            capabilities = self.manners.get("capabilities", {})
            info = {"name": "fake", "version": "1"}
            self.result(frame["id"], {"protocolVersion": 1, "agentInfo": info, "agentCapabilities": capabilities})
        elif method == "session/new" and self.manners.get("session/new", True):
            self.new_params = frame["params"]
            answer = {"id": frame["id"], "result": {"sessionId": "agent-session", **self.manners.get("new", {})}}
            banner = self.manners.get("banner")
            self.send(answer, *([text_frame(banner)] if banner else []))
        elif method in ("session/load", "session/resume") and method in self.manners:
            self._reopen(frame["id"], **self.manners[method])
        elif method in ("session/set_mode", "session/set_config_option"):
            self.result(frame["id"], {})

    def _reopen(
        self,
        request_id: Any,
        replay: int = 0,
        late: int = 0,
        answer: Any = None,
        error: str | None = None,
        silent: bool = False,
        leaves: bool = False,
    ) -> None:
        """Load as the manners say: so many updates before the answer and so many behind it, or no good one."""
        if silent:
            return
        if leaves:
            self.exit(9)
        elif error is not None:
            self.error(request_id, -32002, error)
        else:
            answered = {"id": request_id, "result": answer}
            self.send(*[text_frame("of old ")] * replay, answered, *[text_frame("late ")] * late)

    # -- what the agent says -----------------------------------------------------------------------------------------

    def send(self, *frames: dict[str, Any]) -> None:
        """Frames in one burst."""
        self._wire.send(*({"jsonrpc": "2.0", **frame} for frame in frames))

    def result(self, request_id: Any, result: Any) -> None:
        """Answer a request."""
        self.send({"id": request_id, "result": result})

    def error(self, request_id: Any, code: int, message: str = "error") -> None:
        """Refuse a request."""
        self.send({"id": request_id, "error": {"code": code, "message": message}})

    def update(self, **update: Any) -> None:
        """One ``session/update``."""
        self.send(update_frame(**update))

    def say(self, text: str) -> None:
        """A message chunk."""
        self.send(text_frame(text))

    def answer(self, prompt: dict[str, Any], stop_reason: str = "end_turn") -> None:
        """End the turn."""
        self.result(prompt["id"], {"stopReason": stop_reason})

    async def finish(self, nth: int = 1, text: str = "ok") -> None:
        """Answer the ``nth`` prompt with a text."""
        frame = await self.prompt(nth)
        self.say(text)
        self.answer(frame)

    def ask(
        self,
        request_id: Any,
        tool_call_id: str = "t1",
        options: list[dict[str, Any]] | None = None,
        **tool_call: Any,
    ) -> None:
        """Ask for permission; ``tool_call`` says what of the call is not as usual."""
        self.send(permission_frame(request_id, tool_call_id, options, **tool_call))

    def elicit(self, request_id: Any, **members: Any) -> None:
        """Ask with a form, or as ``members`` say."""
        self.send(elicitation_frame(request_id, **members))

    def exit(self, code: int = 1) -> None:
        """Exit."""
        self._wire.exit(ExitInfo(code=code))

    # -- what the agent heard ----------------------------------------------------------------------------------------

    async def heard(self, method: str, count: int = 1) -> dict[str, Any]:
        """The ``count``-th frame of this method, once it is there."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.all(method)) >= count)
        return self.all(method)[count - 1]

    async def answered(self, request_id: Any) -> dict[str, Any]:
        """The client's answer to one of the agent's requests."""

        def there() -> list[dict[str, Any]]:
            return [frame for frame in self.frames if "method" not in frame and frame.get("id") == request_id]

        async with self._arrived:
            await self._arrived.wait_for(lambda: bool(there()))
        return there()[0]

    def all(self, method: str) -> list[dict[str, Any]]:
        """Every frame of this method so far."""
        return [frame for frame in self.frames if frame.get("method") == method]

    async def prompt(self, count: int = 1) -> dict[str, Any]:
        """The ``count``-th prompt."""
        return await self.heard("session/prompt", count)


def update_frame(**update: Any) -> dict[str, Any]:
    """A ``session/update`` notification."""
    return {"method": "session/update", "params": {"sessionId": "agent-session", "update": update}}


def text_frame(text: str, **more: Any) -> dict[str, Any]:
    """A message chunk."""
    return update_frame(sessionUpdate="agent_message_chunk", content={"type": "text", "text": text}, **more)


OPTIONS = [
    {"optionId": "yes", "name": "Allow once", "kind": "allow_once"},
    {"optionId": "always", "name": "Always", "kind": "allow_always"},
    {"optionId": "no", "name": "Reject", "kind": "reject_once"},
]


def permission_frame(
    request_id: Any, tool_call_id: str = "t1", options: list[dict[str, Any]] | None = None, **more: Any
) -> dict[str, Any]:
    """A ``session/request_permission`` request."""
    tool_call = {"toolCallId": tool_call_id, "title": "run it", "kind": "execute", "rawInput": {"command": "rm x"}}
    tool_call |= more
    params = {"sessionId": "agent-session", "toolCall": tool_call, "options": OPTIONS if options is None else options}
    return {"id": request_id, "method": "session/request_permission", "params": params}


FORM = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "count": {"type": "integer"}},
    "required": ["name"],
}


def elicitation_frame(request_id: Any, **members: Any) -> dict[str, Any]:
    """An ``elicitation/create`` request; a member that is None is left out."""
    params = {
        "sessionId": "agent-session",
        "mode": "form",
        "message": "Which name?",
        "requestedSchema": FORM,
        **members,
    }
    params = {name: value for name, value in params.items() if value is not None}
    return {"id": request_id, "method": "elicitation/create", "params": params}
