"""Bytes to lines under a hard cap, and what is remembered of lines that were no messages (cases E1, E3, E4)."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

import orjson

NOISE_LINES: Final = 5
NOISE_BYTES: Final = 1024
BAD_LINES: Final = 1000
HEAD_BYTES: Final = 1024
END_BYTES: Final = 256
FLOOD_FACTOR: Final = 8
"""A line that many times longer than the cap ends the connection: there may be no end to wait for (case E3)."""

_SCALAR: Final = rb'"(id|method|jsonrpc)"\s*:\s*("(?:[^"\\]|\\.)*"|-?\d+)\s*'
_FIRST: Final = re.compile(rb"\s*" + _SCALAR + rb",")
_LAST: Final = re.compile(rb"((?:,\s*" + _SCALAR + rb")+)\}\s*$")
_MEMBER: Final = re.compile(_SCALAR)
_SESSION: Final = re.compile(rb'"params"\s*:\s*\{\s*"sessionId"\s*:\s*("(?:[^"\\]|\\.)*")')


class Noise:
    """Lines that were no messages: counted, the first and last few kept, each cut to 1 KiB.

    Attributes:
        count: bad lines, oversized ones included.
        consecutive: how many of them came since the last message.
        oversized: lines above the cap.
        blank: empty lines; they are no fault.
        altered: messages with a NUL, which was replaced.
    """

    def __init__(self) -> None:
        self.count = 0
        self.consecutive = 0
        self.oversized = 0
        self.blank = 0
        self.altered = 0
        self._first: list[bytes] = []
        self._last: deque[bytes] = deque(maxlen=NOISE_LINES)

    def add(self, line: bytes) -> None:
        """Remember one bad line."""
        self.count += 1
        self.consecutive += 1
        kept = line[:NOISE_BYTES]
        if len(self._first) < NOISE_LINES:
            self._first.append(kept)
        self._last.append(kept)

    def sample(self) -> list[str]:
        """First and last bad lines, in order; may hold secrets."""
        overlap = max(0, len(self._first) + len(self._last) - self.count)
        return [line.decode("utf-8", "replace") for line in (*self._first, *list(self._last)[overlap:])]

    def last(self) -> list[str]:
        """The last bad lines; may hold secrets."""
        return [line.decode("utf-8", "replace") for line in self._last]


@dataclass(frozen=True, slots=True)
class Oversized:
    """A line above the cap: only its ends were kept."""

    head: bytes
    end: bytes
    size: int

    def stand_in(self) -> dict[str, Any] | None:
        """A small message in its place, so that who waits for it is not left waiting; None when it cannot be told.

        A response becomes an error response, a request one with empty params, an update one of kind ``oversized_line``.
        Only members of the outermost object are read, at its beginning and at its end.
        """
        found = self._members()
        method = found.get("method")
        if method == "session/update":
            session = _SESSION.search(self.head)
            update = {"sessionUpdate": "oversized_line", "bytes": self.size}
            return {
                "method": method,
                "params": {"sessionId": orjson.loads(session[1]) if session else None, "update": update},
            }
        if isinstance(method, str):
            return {**found, "params": {}}
        if "id" in found:
            return {**found, "error": {"code": -32603, "message": f"The answer was too large: {self.size} bytes."}}
        return None

    def _members(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        head = self.head.lstrip()
        if not head.startswith(b"{"):
            return found
        at = 1
        pairs: list[tuple[bytes, bytes]] = []
        while (member := _FIRST.match(head, at)) is not None:
            pairs.append((member[1], member[2]))
            at = member.end()
        last = _LAST.search(self.end)
        if last is not None:
            pairs.extend(_MEMBER.findall(last[1]))
        for name, value in pairs:
            try:
                found[name.decode()] = orjson.loads(value)
            except ValueError:
                continue
        return found


class Splitter:
    """Cuts a byte stream into lines; one above the cap is discarded exactly, in bounded memory.

    Args:
        max_line_bytes: longest line that is kept, without its newline.
    """

    def __init__(self, max_line_bytes: int) -> None:
        self._cap = max_line_bytes
        self._held = bytearray()
        self._skipped = 0
        self._head = b""
        self._end = b""

    def feed(self, data: bytes) -> list[bytes | Oversized]:
        """Complete lines, in order, without their newlines."""
        pieces = data.split(b"\n")
        tail = pieces.pop()
        lines: list[bytes | Oversized] = pieces  # type: ignore[assignment]
        if pieces and (self._held or self._skipped):
            lines[0] = self._finish(pieces[0])
        if tail:
            self._hold(tail)
        if len(data) > self._cap:
            return [self._checked(line) for line in lines]
        return lines

    def _checked(self, line: bytes | Oversized) -> bytes | Oversized:
        if isinstance(line, Oversized) or len(line) <= self._cap:
            return line
        return Oversized(line[:HEAD_BYTES], line[-END_BYTES:], len(line))

    def _finish(self, rest: bytes) -> bytes | Oversized:
        if not self._skipped and len(self._held) + len(rest) <= self._cap:
            self._held += rest
            line = bytes(self._held)
            self._held = bytearray()
            return line
        self._hold(rest, overflow=True)
        whole = self.skipping
        assert whole is not None
        self._skipped = 0
        return whole

    def _hold(self, part: bytes, *, overflow: bool = False) -> None:
        if self._skipped:
            self._skipped += len(part)
            self._head += part[: HEAD_BYTES - len(self._head)]
            self._end = (self._end + part[-END_BYTES:])[-END_BYTES:]
            return
        self._held += part
        if overflow or len(self._held) > self._cap:
            self._skipped = len(self._held)
            self._head = bytes(self._held[:HEAD_BYTES])
            self._end = bytes(self._held[-END_BYTES:])
            self._held = bytearray()

    @property
    def partial(self) -> bool:
        """Whether something came behind the last newline."""
        return bool(self._held or self._skipped)

    @property
    def skipping(self) -> Oversized | None:
        """The unfinished line when it is being discarded."""
        return Oversized(self._head, self._end, self._skipped) if self._skipped else None
