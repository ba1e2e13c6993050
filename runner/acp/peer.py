"""The sans-I/O core: bytes to JSON-RPC messages and back, whatever the other side does (cases E1, E3, E4)."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import orjson

from runner.acp.lines import BAD_LINES, FLOOD_FACTOR, HEAD_BYTES, Noise, Oversized, Splitter
from runner.wire.codec import to_json

MIB: Final = 1024 * 1024
BOM: Final = b"\xef\xbb\xbf"
_NUL: Final = b"\\u0000"
_NUL_ESCAPE: Final = re.compile(rb"(?<!\\)((?:\\\\)*)\\u0000")

Message = tuple[dict[str, Any], int]
"""A JSON object and the size of its line in bytes."""


class Peer:
    """One end of a JSON-RPC connection over newline-delimited JSON.

    The messages do not depend on how the bytes were cut into chunks.

    Args:
        max_line_bytes: a longer line is discarded; what waits for it gets a stand-in (``lines.Oversized``).
        max_bad_lines: so many in a row that are no messages end the connection.
    """

    def __init__(self, max_line_bytes: int = 64 * MIB, max_bad_lines: int = BAD_LINES) -> None:
        self.noise = Noise()
        self._splitter = Splitter(max_line_bytes)
        self._flood_bytes = max(FLOOD_FACTOR * max_line_bytes, HEAD_BYTES)
        self._max_bad_lines = max_bad_lines
        self._next_id = 0
        self.failure: str | None = None
        """Why nothing can be expected any more, or None; once set, ``feed`` returns nothing."""

    def feed(self, data: bytes) -> list[Message]:
        """Messages that are complete now, in order."""
        messages: list[Message] = []
        if self.failure is not None:
            return messages
        joined = self._splitter.partial
        lines = self._splitter.feed(data)
        dirty = _may_hold_nul(data) or (joined and bool(lines) and _may_hold_nul(lines[0]))
        clean = None if dirty else _all_objects(lines)
        if clean is None:
            messages = self._one_by_one(lines, dirty=dirty)
        elif clean:
            messages = clean
            self.noise.consecutive = 0
        self._look_for_flood()
        return messages

    def _look_for_flood(self) -> None:
        unfinished = self._splitter.skipping
        if self.failure is None and unfinished is not None and unfinished.size > self._flood_bytes:
            self._rescued(unfinished)
            self._bad(unfinished)

    def _one_by_one(self, lines: list[bytes | Oversized], *, dirty: bool) -> list[Message]:
        messages: list[Message] = []
        good = 0
        for line in lines:
            try:
                message: Any = orjson.loads(line)  # type: ignore[arg-type]
            except ValueError:
                message = self._rescued(line)
            if isinstance(message, dict):
                if dirty:
                    message = self._without_nul(message, line)
                messages.append((message, len(line) if isinstance(line, bytes) else 0))
                continue
            if len(messages) > good:
                self.noise.consecutive = 0
                good = len(messages)
            if self._bad(line):
                return messages
        if len(messages) > good:
            self.noise.consecutive = 0
        return messages

    def _rescued(self, line: bytes | Oversized) -> Any:
        if isinstance(line, bytes):
            return _decode_slowly(line)
        self.noise.oversized += 1
        if line.size > self._flood_bytes:
            self.failure = f"It wrote a line of more than {self._flood_bytes} bytes."
            return None
        message = line.stand_in()
        if message is not None:
            self.noise.add(line.head)
        return message

    def _bad(self, line: bytes | Oversized) -> bool:
        """Count it; whether the connection is over."""
        content = line if isinstance(line, bytes) else line.head
        if content.strip() in (b"", BOM):
            self.noise.blank += 1
            return self.failure is not None
        self.noise.add(content)
        if self.noise.consecutive >= self._max_bad_lines and self.failure is None:
            self.failure = f"It wrote {self.noise.consecutive} lines in a row that are no messages."
        return self.failure is not None

    def _without_nul(self, message: dict[str, Any], line: bytes | Oversized) -> dict[str, Any]:
        """An update with U+FFFD for each NUL, which stores refuse; any other message as it is."""
        if isinstance(line, Oversized) or _NUL not in line or message.get("method") != "session/update":
            return message
        cleaned = _NUL_ESCAPE.sub(rb"\1\\ufffd", line)
        if cleaned == line:
            return message
        self.noise.altered += 1
        try:
            altered = orjson.loads(cleaned)
        except ValueError:
            altered = _decode_slowly(cleaned)
        return altered if isinstance(altered, dict) else message

    def close(self) -> list[Message]:
        """The stream ended: a last line without a newline still counts when it is a message."""
        return self.feed(b"\n") if self._splitter.partial else []

    def request(self, method: str, params: Any) -> tuple[int, bytes]:
        """A request frame and its id: integers from 1."""
        self._next_id += 1
        frame = {"jsonrpc": "2.0", "id": self._next_id, "method": method, "params": params}
        return self._next_id, encode(frame)

    @staticmethod
    def notification(method: str, params: Any) -> bytes:
        """A notification frame."""
        return encode({"jsonrpc": "2.0", "method": method, "params": params})

    @staticmethod
    def result(request_id: Any, result: Any) -> bytes:
        """The answer to a request; the id is echoed as it came."""
        return encode({"jsonrpc": "2.0", "id": request_id, "result": result})

    @staticmethod
    def error(request_id: Any, code: int, message: str) -> bytes:
        """The refusal of a request."""
        return encode({"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": message}})


def _all_objects(lines: list[bytes | Oversized]) -> list[Message] | None:
    """All lines parsed without a step of Python each; None when one of them is no plain JSON object."""
    try:
        parsed = list(map(orjson.loads, lines))  # type: ignore[arg-type]
    except ValueError:
        return None
    return list(zip(parsed, map(len, lines), strict=True)) if set(map(type, parsed)) <= {dict} else None  # type: ignore[arg-type]


def encode(frame: dict[str, Any]) -> bytes:
    """One line; text that is not valid Unicode is written with U+FFFD in its place."""
    return to_json(frame) + b"\n"


def _may_hold_nul(raw: bytes | Oversized) -> bool:
    """Most text has no backslash, and one byte is found many times faster than six."""
    return isinstance(raw, bytes) and b"\\" in raw and _NUL in raw


def _decode_slowly(line: bytes) -> Any:
    """What the strict parser refuses and can be saved: a byte order mark, lone surrogates, bad UTF-8, raw controls."""
    text = line.removeprefix(BOM).strip()
    if not text.startswith(b"{") or not text.endswith(b"}"):
        return None
    try:
        value = json.loads(text.decode("utf-8", "replace"), strict=False, parse_constant=lambda name: None)
        message = orjson.loads(to_json(value))
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        _keep_halves(message, value)
    return message


def _keep_halves(message: dict[str, Any], raw: dict[str, Any]) -> None:
    """A character that an agent tore in two lies at the ends of two chunks: whoever joins them needs both halves."""
    content = _chunk(message)
    text = str((_chunk(raw) or {}).get("text"))
    if content is None or not isinstance(content.get("text"), str):
        return
    first, last = text[:1] if "\udc00" <= text[:1] <= "\udfff" else "", text[-1:]
    if first:
        content["text"] = first + content["text"][1:]
    if "\ud800" <= last <= "\udbff":
        content["text"] = content["text"][:-1] + last


def _chunk(message: dict[str, Any]) -> dict[str, Any] | None:
    """The content of an update that is a chunk of text."""
    params = message.get("params")
    update = params.get("update") if isinstance(params, dict) else None
    content = update.get("content") if isinstance(update, dict) else None
    return content if isinstance(content, dict) and content.get("type") == "text" else None


def response_id(message: dict[str, Any]) -> int | None:
    """The id of a response to one of our requests, also when the agent made it a string; None when it cannot be one."""
    value = message.get("id")
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 16:
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) else None
