"""Anthropic Messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.model_server.protocols import USAGE_IN, USAGE_OUT, dumps, plain_text, sse, user_items
from tests.model_server.script import Item, ToolCall


class AnthropicMessages:
    """``POST */messages``."""

    name = "anthropic"

    def items(self, body: Mapping[str, Any]) -> list[Item]:
        found: list[Item] = []
        for message in body.get("messages", []):
            content = message.get("content")
            if message.get("role") == "assistant":
                found.append(Item("assistant", plain_text(content)))
            elif isinstance(content, list):
                for block in content:
                    if block.get("type") == "tool_result":
                        found.append(Item("tool_result", plain_text(block.get("content"))))
                    else:
                        found.extend(user_items([block]))
            else:
                found.extend(user_items(content))
        return found

    def tools(self, body: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        return {tool["name"]: tool.get("input_schema") or {} for tool in body.get("tools") or [] if "name" in tool}

    def encoder(self, body: Mapping[str, Any], number: int) -> AnthropicEncoder:
        return AnthropicEncoder(str(body.get("model", "model")), number)

    def error(self, status: int) -> dict[str, Any]:
        return {"type": "error", "error": {"type": "api_error", "message": f"scripted {status}"}}


class AnthropicEncoder:
    """Blocks are numbered; a block is open until another kind or the end closes it."""

    def __init__(self, model: str, number: int) -> None:
        self._model = model
        self._number = number
        self._index = -1
        self._open = False
        self._stop = "end_turn"

    def start(self) -> bytes:
        return self._event("message_start", {"message": self._message([], None)})

    def text(self, chunk: str) -> bytes:
        head = b"" if self._open else self._begin({"type": "text", "text": ""})
        self._open = True
        return head + self._delta({"type": "text_delta", "text": chunk})

    def tool(self, call: ToolCall) -> bytes:
        block = {"type": "tool_use", "id": self._tool_id(), "name": call.name, "input": {}}
        head = self._close() + self._begin(block)
        self._open = True
        self._stop = "tool_use"
        return head + self._delta({"type": "input_json_delta", "partial_json": dumps(call.arguments)})

    def end(self) -> bytes:
        ending = {
            "delta": {"stop_reason": self._stop, "stop_sequence": None},
            "usage": {"output_tokens": USAGE_OUT},
        }
        return self._close() + self._event("message_delta", ending) + self._event("message_stop", {})

    def whole(self, chunks: Sequence[str], call: ToolCall | None) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        if chunks:
            content.append({"type": "text", "text": "".join(chunks)})
        if call is not None:
            use = {"type": "tool_use", "id": self._tool_id(), "name": call.name}
            content.append({**use, "input": dict(call.arguments)})
        return self._message(content, "tool_use" if call else "end_turn")

    def _message(self, content: list[dict[str, Any]], stop: str | None) -> dict[str, Any]:
        return {
            "id": f"msg_{self._number}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": stop,
            "stop_sequence": None,
            "usage": {"input_tokens": USAGE_IN, "output_tokens": USAGE_OUT if stop else 1},
        }

    def _tool_id(self) -> str:
        return f"toolu_{self._number}_{self._index + 1}"

    def _begin(self, block: dict[str, Any]) -> bytes:
        self._index += 1
        return self._event("content_block_start", {"index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return self._event("content_block_delta", {"index": self._index, "delta": delta})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open = False
        return self._event("content_block_stop", {"index": self._index})

    @staticmethod
    def _event(kind: str, data: dict[str, Any]) -> bytes:
        return sse({"type": kind, **data}, kind)
