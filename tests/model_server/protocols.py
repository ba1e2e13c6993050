"""The three wire protocols: reading a conversation, writing an answer.

Every encoder turns the same four calls (start, text, tool, end) into the bytes of its protocol's
event stream; ``whole`` gives the answer of a request that did not ask for a stream.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from tests.model_server.script import Item, ToolCall

USAGE_IN = 11
USAGE_OUT = 7


class Encoder(Protocol):
    """Writes one answer; each method gives the bytes to send next."""

    def start(self) -> bytes: ...

    def text(self, chunk: str) -> bytes: ...

    def tool(self, call: ToolCall) -> bytes: ...

    def end(self) -> bytes: ...

    def whole(self, chunks: Sequence[str], call: ToolCall | None) -> dict[str, Any]: ...


class Wire(Protocol):
    """One protocol."""

    name: str

    def items(self, body: Mapping[str, Any]) -> list[Item]: ...

    def tools(self, body: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]: ...

    def encoder(self, body: Mapping[str, Any], number: int) -> Encoder: ...

    def error(self, status: int) -> dict[str, Any]: ...


def dumps(value: object) -> str:
    """Compact JSON."""
    return json.dumps(value, separators=(",", ":"))


def sse(payload: Mapping[str, Any], event: str | None = None) -> bytes:
    """One server-sent event."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {dumps(payload)}\n\n".encode()


def plain_text(content: object) -> str:
    """The text of a string or of a list of content blocks."""
    return "\n".join(texts(content))


def texts(content: object) -> list[str]:
    """Every text in a string or a list of content blocks, in order."""
    if isinstance(content, str):
        return [content]
    found: list[str] = []
    for block in content if isinstance(content, list) else []:
        if isinstance(block, str):
            found.append(block)
        elif isinstance(block, dict) and isinstance(block.get("text"), str):
            found.append(block["text"])
    return found


def user_items(content: object) -> Iterable[Item]:
    """One item for each text block, so that a reminder block cannot hide the prompt."""
    return (Item("user", text) for text in texts(content))


def openai_error(status: int) -> dict[str, Any]:
    """The error body of both OpenAI protocols."""
    return {"error": {"message": f"scripted error {status}", "type": "scripted", "code": status}}
