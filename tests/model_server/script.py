"""What to answer: a pure function from the conversation to one step.

Directives stand in the user's prompt. The last one after the last assistant item wins; nothing
inside a tool result counts.

=====================  ==========================================================================
``[[text:hi]]``        answer ``hi``
``[[stream:N]]``       answer N chunks, ``0 1 2 ...`` (N up to 100,000)
``[[empty]]``          end without any output
``[[hold]]``           first text chunk (``HELD_TEXT``), then held until released, then the rest
``[[hold0]]``          held before the response headers
``[[shell:CMD]]``      call the harness's shell tool
``[[insist:CMD]]``     the same, again and again until the command had a result that is no interruption
``[[esc:CMD]]``        the same, asking for escalation where the tool has such an argument
``[[tool:NAME JSON]]`` call the named tool with these arguments
``[[http:500]]``       an HTTP error with that status
``[[cut:x]]``          send text ``x``, then drop the connection
=====================  ==========================================================================

A tool result without a later directive is answered ``TOOL_DONE`` and its text. Requests that
offer no tools are auxiliary (titles) and get ``AUXILIARY_TEXT``, which is what a title request wants.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

AUXILIARY_TEXT = '{"title": "Auxiliary"}'
HELD_TEXT = "holding"
RELEASED_TEXT = " released"
TOOL_DONE = "TOOLDONE"

MAX_CHUNKS = 100_000
MAX_ECHO = 2_000

_DIRECTIVE = re.compile(
    r"\[\[(?P<name>text|stream|empty|hold0|hold|shell|insist|esc|tool|http|cut)(?::(?P<value>.*?))?\]\]",
    re.DOTALL,
)

_INTERRUPTED = re.compile(r"aborted|interrupted", re.IGNORECASE)

_SHELL_TOOLS = (
    "Bash",
    "exec_command",
    "shell_command",
    "shell",
    "bash",
    "run_shell_command",
    "execute",
)


@dataclass(frozen=True, slots=True)
class Item:
    """One thing of the conversation, in the order of the request."""

    kind: Literal["user", "assistant", "tool_result"]
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool the model wants run."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """One answer: ``chunks`` are the text, ``tool`` the call that follows it.

    ``hold`` says where the answer waits for a release: nowhere, before the headers, or after the
    first chunk. ``status`` other than 200 is an HTTP error without a stream; ``cut`` drops the
    connection after the chunks.
    """

    directive: str
    chunks: tuple[str, ...] = ()
    tool: ToolCall | None = None
    hold: Literal["none", "headers", "stream"] = "none"
    status: int = 200
    cut: bool = False


def decide(items: Sequence[Item], tools: Mapping[str, Mapping[str, Any]]) -> Step:
    """Choose the answer to one request.

    Args:
        items: the whole conversation, oldest first.
        tools: the offered tools, name to JSON schema of the arguments.
    """
    if not tools:
        return Step("auxiliary", (AUXILIARY_TEXT,))
    fresh = _after_last(items, "assistant")
    asked = _after_last(fresh, "tool_result")
    for item in reversed(asked):
        found = list(_DIRECTIVE.finditer(item.text))
        if found:
            return _step(found[-1]["name"], found[-1]["value"] or "", tools)
    insisted = _insisted(items)
    if insisted is not None:
        return _shell_step("insist", insisted, tools)
    results = [item.text for item in fresh if item.kind == "tool_result"]
    if results:
        return Step("tool_done", (f"{TOOL_DONE} {results[-1][:MAX_ECHO]}",))
    said = asked[-1].text[:MAX_ECHO] if asked else ""
    return Step("echo", (f"echo: {said}",))


def _insisted(items: Sequence[Item]) -> str | None:
    """The command of the last ``insist``, unless it had a result."""
    for index in range(len(items) - 1, -1, -1):
        item = items[index]
        if item.kind == "tool_result" and not _INTERRUPTED.search(item.text):
            return None
        found = list(_DIRECTIVE.finditer(item.text)) if item.kind == "user" else []
        if found:
            return found[-1]["value"] if found[-1]["name"] == "insist" else None
    return None


def _after_last(items: Sequence[Item], kind: str) -> Sequence[Item]:
    for index in range(len(items) - 1, -1, -1):
        if items[index].kind == kind:
            return items[index + 1 :]
    return items


def _step(name: str, value: str, tools: Mapping[str, Mapping[str, Any]]) -> Step:
    match name:
        case "text":
            return Step(name, (value,))
        case "stream":
            return Step(name, tuple(f"{n} " for n in range(min(int(value), MAX_CHUNKS))))
        case "empty":
            return Step(name)
        case "hold":
            return Step(name, (value or HELD_TEXT, RELEASED_TEXT), hold="stream")
        case "hold0":
            return Step(name, (value or HELD_TEXT, RELEASED_TEXT), hold="headers")
        case "http":
            return Step(name, status=int(value))
        case "cut":
            return Step(name, (value or HELD_TEXT,), cut=True)
        case "tool":
            tool_name, _, arguments = value.partition(" ")
            return Step(name, tool=ToolCall(tool_name, json.loads(arguments or "{}")))
        case _:
            return _shell_step(name, value, tools)


def _shell_step(name: str, command: str, tools: Mapping[str, Mapping[str, Any]]) -> Step:
    tool = next((known for known in _SHELL_TOOLS if known in tools), None)
    if tool is None:
        return Step(name, (f"no shell tool among: {', '.join(sorted(tools))}",))
    known = tools[tool].get("properties", {})
    arguments: dict[str, Any]
    if tool == "exec_command":
        arguments = {"cmd": command}
    elif tool == "shell":
        arguments = {"command": ["bash", "-lc", command]}
    else:
        arguments = {"command": command}
    optional = {"description": "Run a command", "is_background": False, "yield_time_ms": 30_000}
    arguments |= {key: filler for key, filler in optional.items() if key in known}
    if name == "esc" and "sandbox_permissions" in known:
        arguments |= {"sandbox_permissions": "require_escalated", "justification": "asked to"}
    return Step(name, tool=ToolCall(tool, arguments))
