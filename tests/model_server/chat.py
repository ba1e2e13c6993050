"""OpenAI Chat Completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.model_server.protocols import (
    USAGE_IN,
    USAGE_OUT,
    dumps,
    openai_error,
    plain_text,
    sse,
    user_items,
)
from tests.model_server.script import Item, ToolCall


class ChatCompletions:
    """``POST */chat/completions``."""

    name = "chat"

    def items(self, body: Mapping[str, Any]) -> list[Item]:
        found: list[Item] = []
        for message in body.get("messages", []):
            content = message.get("content")
            match message.get("role"):
                case "assistant":
                    found.append(Item("assistant", plain_text(content)))
                case "tool":
                    found.append(Item("tool_result", plain_text(content)))
                case "user":
                    found.extend(user_items(content))
        return found

    def tools(self, body: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        functions = [tool.get("function") or {} for tool in body.get("tools") or []]
        return {f["name"]: f.get("parameters") or {} for f in functions if "name" in f}

    def encoder(self, body: Mapping[str, Any], number: int) -> ChatEncoder:
        return ChatEncoder(str(body.get("model", "model")), number)

    def error(self, status: int) -> dict[str, Any]:
        return openai_error(status)


class ChatEncoder:
    """Chunks with deltas, then the finish reason, the usage and ``[DONE]``."""

    def __init__(self, model: str, number: int) -> None:
        self._model = model
        self._number = number
        self._finish = "stop"

    def start(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def text(self, chunk: str) -> bytes:
        return self._chunk({"content": chunk})

    def tool(self, call: ToolCall) -> bytes:
        self._finish = "tool_calls"
        return self._chunk({"tool_calls": [{"index": 0, **self._call(call)}]})

    def end(self) -> bytes:
        last = self._chunk({}, self._finish)
        usage = sse({**self._head("chat.completion.chunk"), "choices": [], "usage": _USAGE})
        return last + usage + b"data: [DONE]\n\n"

    def whole(self, chunks: Sequence[str], call: ToolCall | None) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(chunks) or None}
        if call is not None:
            message["tool_calls"] = [self._call(call)]
        finish = "tool_calls" if call else "stop"
        choice = {"index": 0, "message": message, "finish_reason": finish}
        return {**self._head("chat.completion"), "choices": [choice], "usage": _USAGE}

    def _call(self, call: ToolCall) -> dict[str, Any]:
        function = {"name": call.name, "arguments": dumps(call.arguments)}
        return {"id": f"call_{self._number}", "type": "function", "function": function}

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return sse({**self._head("chat.completion.chunk"), "choices": [choice]})

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self._number}",
            "object": kind,
            "created": 0,
            "model": self._model,
        }


_USAGE = {
    "prompt_tokens": USAGE_IN,
    "completion_tokens": USAGE_OUT,
    "total_tokens": USAGE_IN + USAGE_OUT,
}
