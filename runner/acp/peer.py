"""The sans-I/O core: bytes to JSON-RPC messages and back, whatever the other side does (cases E1, E3, E4)."""

from __future__ import annotations

import json
from collections import deque
from typing import Any, Final

import orjson

from runner.wire.codec import to_json

MIB: Final = 1024 * 1024
NOISE_LINES: Final = 5
NOISE_CHARS: Final = 300
BAD_LINES: Final = 1000
BOM: Final = b"\xef\xbb\xbf"


class Noise:
    """Lines that were no messages: counted, the first and last few kept."""

    def __init__(self) -> None:
        self.count = 0
        self.consecutive = 0
        self.oversized = 0
        self.first: list[str] = []
        self.last: deque[str] = deque(maxlen=NOISE_LINES)

    def add(self, line: bytes) -> None:
        """Remember one bad line."""
        self.count += 1
        self.consecutive += 1
        text = line[:NOISE_CHARS].decode("utf-8", "replace")
        if len(self.first) < NOISE_LINES:
            self.first.append(text)
        self.last.append(text)

    def sample(self) -> list[str]:
        """First and last bad lines, bounded."""
        overlap = max(0, len(self.first) + len(self.last) - self.count)
        return [*self.first, *list(self.last)[overlap:]]


class Splitter:
    """Cuts a byte stream into lines; a line above the cap is discarded exactly, in bounded memory.

    Args:
        max_line_bytes: longest line that is kept, without its newline.
        noise: where an oversized line is counted.
    """

    def __init__(self, max_line_bytes: int, noise: Noise) -> None:
        self._cap = max_line_bytes
        self._noise = noise
        self._parts: list[bytes] = []
        self._size = 0
        self._skipping = False

    def feed(self, data: bytes) -> list[bytes]:
        """Complete lines, in order, without their newlines."""
        lines = data.split(b"\n")
        tail = lines.pop()
        if lines:
            lines[0] = self._joined(lines[0])
            if self._skipping:
                self._skipping = False
                del lines[0]
        self._hold(tail)
        longest = max(map(len, lines), default=0)
        return lines if longest <= self._cap else self._without_oversized(lines)

    def _joined(self, end: bytes) -> bytes:
        if not self._parts:
            return end
        line = b"".join((*self._parts, end))
        self._parts.clear()
        self._size = 0
        return line

    def _hold(self, tail: bytes) -> None:
        if not tail or self._skipping:
            return
        self._parts.append(tail)
        self._size += len(tail)
        if self._size > self._cap:
            self._oversized(self._parts[0])
            self._parts.clear()
            self._size = 0
            self._skipping = True

    def _without_oversized(self, lines: list[bytes]) -> list[bytes]:
        kept = []
        for line in lines:
            if len(line) > self._cap:
                self._oversized(line)
            else:
                kept.append(line)
        return kept

    def _oversized(self, start: bytes) -> None:
        self._noise.oversized += 1
        self._noise.add(start[:NOISE_CHARS] + b"... (line too long)")

    @property
    def partial(self) -> bytes:
        """What came behind the last newline."""
        return b"".join(self._parts)


class Peer:
    """One end of a JSON-RPC connection over newline-delimited JSON."""

    def __init__(self, max_line_bytes: int = 64 * MIB) -> None:
        self.noise = Noise()
        self._splitter = Splitter(max_line_bytes, self.noise)
        self._next_id = 0

    def feed(self, data: bytes) -> list[tuple[dict[str, Any], int]]:
        """Messages that are complete now, each with the size of its line in bytes."""
        messages: list[tuple[dict[str, Any], int]] = []
        for line in self._splitter.feed(data):
            message = decode(line)
            if message is not None:
                messages.append((message, len(line)))
                self.noise.consecutive = 0
            elif line.strip() and line.strip() != BOM:
                self.noise.add(line)
        return messages

    def close(self) -> list[tuple[dict[str, Any], int]]:
        """The stream ended: a last line without a newline still counts when it is a message."""
        rest = self._splitter.partial
        return self.feed(b"\n") if rest else []

    @property
    def hopeless(self) -> bool:
        """Whether so many lines in a row were bad that nothing can be expected any more."""
        return self.noise.consecutive >= BAD_LINES

    def request(self, method: str, params: Any) -> tuple[int, bytes]:
        """A request frame and its id."""
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


def encode(frame: dict[str, Any]) -> bytes:
    """One line; text that is not valid Unicode is written with U+FFFD in its place."""
    return to_json(frame) + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """A JSON object, or None for anything else."""
    try:
        value = orjson.loads(line)
    except ValueError:
        value = _decode_slowly(line)
    return value if isinstance(value, dict) else None


def _decode_slowly(line: bytes) -> Any:
    """What the strict parser refuses and can be saved: a byte order mark, lone surrogates, bad UTF-8 inside strings."""
    text = line.removeprefix(BOM).strip()
    if not text.startswith(b"{") or not text.endswith(b"}"):
        return None
    try:
        return orjson.loads(to_json(json.loads(text.decode("utf-8", "replace"), parse_constant=lambda name: None)))
    except (ValueError, RecursionError):
        return None


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
