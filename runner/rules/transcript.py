"""A session's records as one text for an agent that has no memory of it (DESIGN 3.5, ``context_lost``)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from runner.rules.fork import FORKED
from runner.terms import EventType, Outcome

READ: Final = frozenset(
    {
        EventType.USER_MESSAGE,
        EventType.MESSAGE,
        EventType.TOOL_CALL,
        EventType.TOOL_CALL_UPDATE,
        EventType.ERROR,
        EventType.DONE,
    }
)
"""Types of records that are told; thoughts, plans and notices are not."""
LIMIT_BYTES: Final = 64 * 1024
SAID_CHARS: Final = 16 * 1024
TITLE_CHARS: Final = 200
INPUT_CHARS: Final = 1024
RESULT_CHARS: Final = 2048

OPENING: Final = "<conversation_record>"
CLOSING: Final = "</conversation_record>"
HEADER: Final = (
    "This is the record of the conversation so far. You run in a new process and have no memory of it; the program"
    " that runs you wrote it down, not the user. What it tells was done already: do not do it again unless you are"
    " asked to. The files are as it left them."
)
LEFT_OUT: Final = "The oldest part of the conversation is left out."
MISSING: Final = "A part of the conversation could not be read and is missing here."
CUT_OFF: Final = "This turn was cut off; what it did last may be missing here."
NO_RESULT: Final = "No result: the call was interrupted."

_TAGS: Final = "conversation_record|user_said|assistant_said|tool_call|tool_result|record_note"
_FORGED: Final = re.compile(rf"<(?=\s*/?\s*(?:{_TAGS})\b)", re.IGNORECASE)
_UNFIT: Final = re.compile("[\\x00-\\x08\\x0b\\x0c\\x0e-\\x1f\\x7f\ud800-\udfff\ufffe\uffff]")
_ENDINGS: Final = {
    Outcome.CANCELLED: "The user stopped this turn.",
    Outcome.PAUSED: "This turn waited for an approval.",
    Outcome.LOST: CUT_OFF,
}


@dataclass(slots=True)
class _Turn:
    """What is told of one turn, in order; a tool call stands where it was first told of."""

    parts: list[str] = field(default_factory=list)
    tools: dict[str, tuple[int, dict[str, Any]]] = field(default_factory=dict)
    error: str | None = None
    outcome: str | None = None

    def add(self, kind: str, data: Mapping[str, Any]) -> None:
        match kind:
            case EventType.USER_MESSAGE:
                self.parts.append(_tagged("user_said", _blocks(data.get("content")), SAID_CHARS))
            case EventType.MESSAGE:
                self.parts.append(_tagged("assistant_said", str(data.get("text", "")), SAID_CHARS))
            case EventType.TOOL_CALL | EventType.TOOL_CALL_UPDATE:
                self._tool(data)
            case EventType.ERROR:
                self.error = f"{data.get('code')}: {data.get('message')}"
            case EventType.DONE:
                self.outcome = None if data.get("reason") == FORKED else str(data.get("outcome"))

    def _tool(self, data: Mapping[str, Any]) -> None:
        tool_call_id = str(data.get("tool_call_id"))
        at, known = self.tools.get(tool_call_id, (len(self.parts), {}))
        if at == len(self.parts):
            self.parts.append("")
        known = {**known, **data}
        self.tools[tool_call_id] = (at, known)
        self.parts[at] = _call(known)

    def text(self) -> str:
        """All of it, empty when nothing was said or done."""
        if not self.parts:
            return ""
        return "\n".join([*self.parts, *self._ending()])

    def _ending(self) -> list[str]:
        if self.outcome == Outcome.COMPLETED:
            return []
        if self.outcome == Outcome.FAILED:
            return [_tagged("record_note", f"This turn failed. {self.error or ''}", INPUT_CHARS)]
        sentence = next((text for known, text in _ENDINGS.items() if known == self.outcome), CUT_OFF)
        return [_tagged("record_note", sentence, INPUT_CHARS)]


def turns(records: Iterable[tuple[str | None, str, Mapping[str, Any]]]) -> list[str]:
    """One text for each turn that said or did something, oldest first.

    Args:
        records: ``(turn_id, type, data)``, oldest first; what belongs to no turn is not told.
    """
    found: dict[str, _Turn] = {}
    for turn_id, kind, data in records:
        if turn_id is not None and kind in READ:
            found.setdefault(turn_id, _Turn()).add(kind, data)
    return [text for turn in found.values() if (text := turn.text())]


def preface(told: Sequence[str], *, left_out: bool = False, missing: bool = False, limit: int = LIMIT_BYTES) -> str:
    """The text block for an agent without memory: at most ``limit`` UTF-8 bytes, the newest kept.

    Args:
        told: from ``turns``, oldest first.
        left_out: there are older turns that are not among them.
        missing: some of them could not be read.
        limit: at least 2,048.
    """
    room = limit - len(f"{OPENING}\n{HEADER}\n{LEFT_OUT}\n{MISSING}\n{CLOSING}\n".encode())
    kept: list[str] = []
    for text in reversed(told):
        size = len(text.encode()) + 1
        if size > room:
            left_out = True
            if not kept:
                kept.append(_tail(text, room - 1))
            break
        kept.append(text)
        room -= size
    notes = [note for note, said in ((LEFT_OUT, left_out), (MISSING, missing)) if said]
    return "\n".join([OPENING, HEADER, *notes, *reversed(kept), CLOSING])


def _call(data: Mapping[str, Any]) -> str:
    title = _short(str(data.get("title") or data.get("tool_call_id")), TITLE_CHARS)
    lines = [f"{title} ({data.get('kind', 'other')}, {data.get('status', 'pending')})"]
    if data.get("raw_input") is not None:
        lines.append(_short(_json(data["raw_input"]), INPUT_CHARS))
    call = _tagged("tool_call", "\n".join(lines), TITLE_CHARS + INPUT_CHARS + 100)
    return f"{call}\n{_tagged('tool_result', _result(data), RESULT_CHARS)}"


def _result(data: Mapping[str, Any]) -> str:
    if data.get("status") not in ("completed", "failed"):
        return NO_RESULT
    parts = [_content(item) for item in data.get("content") or () if isinstance(item, Mapping)]
    if not any(parts) and data.get("raw_output") is not None:
        parts = [_json(data["raw_output"])]
    return "\n".join(part for part in parts if part) or "(no output)"


def _content(item: Mapping[str, Any]) -> str:
    if item.get("type") == "diff":
        return f"[changed {item.get('path')}]"
    inner = item.get("content")
    return _block(inner) if isinstance(inner, Mapping) else f"[{item.get('type')}]"


def _blocks(content: Any) -> str:
    return "\n".join(_block(block) for block in content or () if isinstance(block, Mapping))


def _block(block: Mapping[str, Any]) -> str:
    kind = block.get("type")
    if kind == "text":
        return str(block.get("text", ""))
    resource = block.get("resource")
    uri = block.get("uri") or (resource.get("uri") if isinstance(resource, Mapping) else None)
    return f"[{kind} {uri}]" if uri else f"[{kind}]"


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _tagged(tag: str, text: str, chars: int) -> str:
    return f"<{tag}>\n{fit(_short(text, chars))}\n</{tag}>"


def fit(text: str) -> str:
    """The text without what no agent could take, and without anything that looks like a tag of the record."""
    return _FORGED.sub("‹", _UNFIT.sub("\ufffd", text))


def _short(text: str, chars: int) -> str:
    """Begin and end of a text that is too long."""
    if len(text) <= chars:
        return text
    half = chars // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"


def _tail(text: str, size: int) -> str:
    """The end of a text, at most ``size`` UTF-8 bytes, from the begin of a line where there is one."""
    tail = text.encode()[-max(size, 1) :].decode(errors="ignore")
    _, newline, rest = tail.partition("\n")
    return rest if newline else tail
