"""ACP updates to our events (DESIGN 4.1), grouped so that a run of text chunks is handled as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from runner.rules.bounds import word
from runner.wire.codec import to_json

NOTICE_BYTES: Final = 8 * 1024
TEXT_KINDS: Final = {"agent_message_chunk": "message", "agent_thought_chunk": "thought"}
TOOL_KINDS: Final = frozenset({"tool_call", "tool_call_update"})

Group = tuple[str, str | None, Any]
"""``(kind, message_id, payload)``: kind is ``message`` or ``thought`` with a list of texts, ``tool`` with the fields
of a tool call, or the name of an event type with its data."""


def grouped(batch: list[dict[str, Any]]) -> Iterator[Group]:
    """The batch as groups, in order. Never raises: what cannot be understood becomes a ``notice``."""
    texts: list[str] = []
    open_kind: str | None = None
    open_id: str | None = None
    for update in batch:
        name = update.get("sessionUpdate")
        kind = TEXT_KINDS.get(name) if isinstance(name, str) else None
        content = update.get("content") if kind is not None else None
        if isinstance(content, dict) and content.get("type") == "text" and isinstance(content.get("text"), str):
            message_id = update.get("messageId")
            if message_id is not None and not isinstance(message_id, str):
                message_id = None
            if texts and (kind != open_kind or message_id != open_id):
                yield open_kind or "message", open_id, texts
                texts = []
            open_kind, open_id = kind, message_id
            texts.append(content["text"])
            continue
        if texts:
            yield open_kind or "message", open_id, texts
            texts = []
        group = _single(name, update)
        if group is not None:
            yield group
    if texts:
        yield open_kind or "message", open_id, texts


def _single(name: Any, update: dict[str, Any]) -> Group | None:
    if not isinstance(name, str):
        return _notice(name, update)
    if name in TOOL_KINDS:
        fields = tool_of(update)
        return ("tool", None, fields) if fields is not None else _notice(name, update)
    if name == "user_message_chunk":
        return None
    make = MAKERS.get(name)
    made = make(update) if make is not None else None
    return (made[0], None, made[1]) if made is not None else _notice(name, update)


def tool_of(given: Any) -> dict[str, Any] | None:
    """The fields of a tool call that are there, under our names; None when it has no id."""
    if not isinstance(given, dict) or not isinstance(given.get("toolCallId"), str):
        return None
    fields: dict[str, Any] = {"tool_call_id": word(given["toolCallId"])}
    if isinstance(given.get("title"), str):
        fields["title"] = given["title"]
    for name in ("kind", "status"):
        if isinstance(given.get(name), str):
            fields[name] = word(given[name])
    if given.get("rawInput") is not None:
        fields["raw_input"] = given["rawInput"]
    for name in ("content", "locations"):
        if isinstance(given.get(name), list):
            fields[name] = given[name]
    if given.get("rawOutput") is not None:
        fields["raw_output"] = given["rawOutput"]
    return fields


def stop_reason(result: dict[str, Any]) -> str | None:
    """Why the agent says that it stopped, in its own word; None when it does not say."""
    said = result.get("stopReason")
    return word(said) if isinstance(said, str) else None


def _plan(update: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    entries = update.get("entries")
    return ("plan", {"entries": entries}) if isinstance(entries, list) else None


def _usage(update: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    known: dict[str, Any] = {name: update[name] for name in ("used", "size", "cost") if update.get(name) is not None}
    return ("usage", known) if known else None


def _mode(update: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    mode = update.get("currentModeId")
    return ("session_info", {"mode": mode}) if isinstance(mode, str) else None


def _options(update: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    options = update.get("configOptions")
    return ("session_info", {"config_options": options}) if isinstance(options, list) else None


def _commands(update: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    commands = update.get("availableCommands")
    return ("session_info", {"available_commands": commands}) if isinstance(commands, list) else None


def _info(update: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "session_info", {name: value for name, value in update.items() if name not in ("sessionUpdate", "_meta")}


MAKERS: Final[dict[str, Callable[[dict[str, Any]], tuple[str, dict[str, Any]] | None]]] = {
    "plan": _plan,
    "usage_update": _usage,
    "current_mode_update": _mode,
    "config_option_update": _options,
    "available_commands_update": _commands,
    "session_info_update": _info,
}


def _notice(name: Any, update: dict[str, Any]) -> Group:
    """An update that has no event of its own, bounded: unknown kinds, content that is no text, malformed ones."""
    raw = to_json(update)
    data: dict[str, Any] = {"kind": name[:100] if isinstance(name, str) else "unknown"}
    if len(raw) <= NOTICE_BYTES:
        data["update"] = update
    else:
        data["truncated"] = True
    return "notice", None, data
