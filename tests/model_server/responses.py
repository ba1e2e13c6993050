"""OpenAI Responses, with the full set of events that strict clients need."""

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

_RESULTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
_CALLS = ("function_call", "custom_tool_call", "local_shell_call", "reasoning")


class OpenAIResponses:
    """``POST */responses``."""

    name = "responses"

    def items(self, body: Mapping[str, Any]) -> list[Item]:
        given = body.get("input")
        if isinstance(given, str):
            return [Item("user", given)]
        found: list[Item] = []
        for entry in given or []:
            kind = entry.get("type", "message")
            if kind in _RESULTS:
                output = entry.get("output")
                text = output if isinstance(output, str) else plain_text(output) or dumps(output)
                found.append(Item("tool_result", text))
            elif kind in _CALLS or entry.get("role") == "assistant":
                found.append(Item("assistant", plain_text(entry.get("content"))))
            elif entry.get("role") == "user":
                found.extend(user_items(entry.get("content")))
        return found

    def tools(self, body: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        return {tool["name"]: tool.get("parameters") or {} for tool in body.get("tools") or [] if "name" in tool}

    def encoder(self, body: Mapping[str, Any], number: int) -> ResponsesEncoder:
        return ResponsesEncoder(str(body.get("model", "model")), number)

    def error(self, status: int) -> dict[str, Any]:
        return openai_error(status)


class ResponsesEncoder:
    """Output items are numbered; the message item collects the text until it is done."""

    def __init__(self, model: str, number: int) -> None:
        self._model = model
        self._number = number
        self._sequence = -1
        self._done: list[dict[str, Any]] = []
        self._said: list[str] | None = None

    def start(self) -> bytes:
        response = self._response("in_progress", None)
        return self._event("response.created", {"response": response}) + self._event(
            "response.in_progress", {"response": response}
        )

    def text(self, chunk: str) -> bytes:
        head = b""
        if self._said is None:
            self._said = []
            head = self._added(self._message("in_progress", [])) + self._event(
                "response.content_part.added", {**self._at(), "part": _part("")}
            )
        self._said.append(chunk)
        delta = {**self._at(), "delta": chunk, "logprobs": []}
        return head + self._event("response.output_text.delta", delta)

    def tool(self, call: ToolCall) -> bytes:
        head = self._finish_text()
        item = self._call(call, "completed")
        where = {"item_id": item["id"], "output_index": len(self._done)}
        out = head + self._added({**item, "arguments": "", "status": "in_progress"})
        out += self._event("response.function_call_arguments.delta", {**where, "delta": item["arguments"]})
        out += self._event("response.function_call_arguments.done", {**where, "arguments": item["arguments"]})
        return out + self._item_done(item)

    def end(self) -> bytes:
        out = self._finish_text()
        done = self._response("completed", _USAGE)
        return out + self._event("response.completed", {"response": done})

    def whole(self, chunks: Sequence[str], call: ToolCall | None) -> dict[str, Any]:
        if chunks:
            self._done.append(self._message("completed", [_part("".join(chunks))]))
        if call is not None:
            self._done.append(self._call(call, "completed"))
        return self._response("completed", _USAGE)

    def _finish_text(self) -> bytes:
        if self._said is None:
            return b""
        text = "".join(self._said)
        part = {**self._at(), "part": _part(text)}
        said = {**self._at(), "text": text, "logprobs": []}
        out = self._event("response.output_text.done", said)
        out += self._event("response.content_part.done", part)
        self._said = None
        return out + self._item_done(self._message("completed", [_part(text)]))

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self._item_id("msg"), "type": "message", "role": "assistant"}
        return {**head, "status": status, "content": content}

    def _call(self, call: ToolCall, status: str) -> dict[str, Any]:
        return {
            "id": self._item_id("fc"),
            "type": "function_call",
            "status": status,
            "call_id": self._item_id("call"),
            "name": call.name,
            "arguments": dumps(call.arguments),
        }

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._number}_{len(self._done)}"

    def _at(self) -> dict[str, Any]:
        index = len(self._done)
        return {"item_id": self._item_id("msg"), "output_index": index, "content_index": 0}

    def _added(self, item: dict[str, Any]) -> bytes:
        return self._event("response.output_item.added", {"output_index": len(self._done), "item": item})

    def _item_done(self, item: dict[str, Any]) -> bytes:
        out = self._event("response.output_item.done", {"output_index": len(self._done), "item": item})
        self._done.append(item)
        return out

    def _response(self, status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": f"resp_{self._number}",
            "object": "response",
            "created_at": 0,
            "status": status,
            "model": self._model,
            "output": list(self._done),
            "parallel_tool_calls": False,
            "tool_choice": "auto",
            "tools": [],
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "usage": usage,
        }

    def _event(self, kind: str, data: dict[str, Any]) -> bytes:
        self._sequence += 1
        return sse({"type": kind, "sequence_number": self._sequence, **data}, kind)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


_USAGE = {
    "input_tokens": USAGE_IN,
    "input_tokens_details": {"cached_tokens": 0},
    "output_tokens": USAGE_OUT,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": USAGE_IN + USAGE_OUT,
}
