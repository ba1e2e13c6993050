"""A connection with a scripted agent at its other end, in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from runner.acp.connection import AgentConnection, Inbox, Item, Updates
from runner.acp.memory import MemoryAgent, MemoryTransport
from runner.clock import Clock
from runner.redaction import Redactor
from tests.acp.oracle import Oracle

SESSION = "s1"


def text_update(text: str, session: str = SESSION) -> dict[str, Any]:
    """A frame with one chunk of message text."""
    update = {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": text}}
    return {"jsonrpc": "2.0", "method": "session/update", "params": {"sessionId": session, "update": update}}


def permission(request_id: Any, tool_call_id: str = "t1", session: str = SESSION) -> dict[str, Any]:
    """A frame with a permission request."""
    return {
        "jsonrpc": "2.0",
        "id": request_id,
        "method": "session/request_permission",
        "params": {
            "sessionId": session,
            "toolCall": {"toolCallId": tool_call_id, "title": "run", "kind": "execute"},
            "options": [
                {"optionId": "yes", "name": "Yes", "kind": "allow_once"},
                {"optionId": "no", "name": "No", "kind": "reject_once"},
            ],
        },
    }


def line(frame: dict[str, Any]) -> bytes:
    return orjson.dumps(frame) + b"\n"


def texts(items: list[Item]) -> list[str]:
    """The chunks of message text in items."""
    return [
        update["content"]["text"]
        for item in items
        if isinstance(item, Updates)
        for update in item.updates
        if update.get("sessionUpdate") == "agent_message_chunk"
    ]


class Bed:
    """``connection`` and ``agent`` of one memory transport; ``close`` has every sent frame judged by the schema."""

    def __init__(self, clock: Clock, **limits: Any) -> None:
        self.transport = MemoryTransport(pid=4711)
        self.agent: MemoryAgent = self.transport.agent
        limits.setdefault("redactor", Redactor(["hunter2-secret"]))
        self.connection = AgentConnection(self.transport, clock=clock, **limits)
        self.oracle = Oracle()

    def says(self, *frames: dict[str, Any]) -> None:
        """The agent writes frames in one burst."""
        for frame in frames:
            self.oracle.agent_sent(frame)
        self.agent.send(*frames)

    async def reads(self, method: str | None = None) -> dict[str, Any]:
        """The next frame that the agent reads; of ``method`` when given."""
        frame = await self.agent.read_frame()
        assert frame is not None
        if method is not None:
            assert frame.get("method") == method
        return frame

    async def answers(self, method: str, result: Any) -> dict[str, Any]:
        """Read a request of ``method`` and answer it."""
        frame = await self.reads(method)
        self.says({"jsonrpc": "2.0", "id": frame["id"], "result": result})
        return frame

    def inbox(self, session: str = SESSION) -> Inbox:
        return self.connection.inbox(session)

    async def items(self, enough: Callable[[list[Item]], object] = bool, session: str = SESSION) -> list[Item]:
        """Drain the inbox until ``enough`` of what came."""
        inbox = self.inbox(session)
        got: list[Item] = []
        while not enough(got):
            await inbox.wait()
            got.extend(inbox.drain())
        return got

    def judge(self) -> None:
        for frame in self.agent.received:
            self.oracle.judge(frame)
