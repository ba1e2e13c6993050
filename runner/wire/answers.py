"""What a client makes of the server's answers: refusals as errors, bodies as lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

MAX_LINE_BYTES: Final = 256 * 1024 * 1024


class ApiError(Exception):
    """The server refused, or could not be understood.

    Attributes:
        code: of the problem document; ``unreachable`` without a server, ``stream_broken`` when a stream ended
            without its end, ``unexpected_answer`` for an error that is no problem document.
        status: HTTP status, 0 without an answer.
        problem: the document, empty without one.
    """

    def __init__(self, code: str, status: int, message: str, problem: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.message = message
        self.problem = dict(problem or {})

    @property
    def retryable(self) -> bool:
        """What the server said; a connection that failed may be tried again."""
        return bool(self.problem.get("retryable", self.code in ("unreachable", "stream_broken")))


class LineParser:
    """Cuts one response's body into JSON lines. One per connection: half a line never meets another stream (H5)."""

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._pending: list[bytes] = []
        self._size = 0
        self._max = max_line_bytes

    def feed(self, chunk: bytes) -> list[dict[str, Any]]:
        """The lines that ``chunk`` completed.

        Raises:
            ApiError: ``unexpected_answer`` for what is no JSON object, or for a line beyond the bound.
        """
        head, newline, rest = chunk.rpartition(b"\n")
        if not newline:
            self._keep(chunk)
            return []
        whole = b"".join([*self._pending, head])
        self._pending.clear()
        self._size = 0
        self._keep(rest)
        return [_line(part) for part in whole.split(b"\n") if part.strip()]

    def _keep(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > self._max:
            raise ApiError("unexpected_answer", 200, f"The server sent a line of more than {self._max} bytes.")
        if piece:
            self._pending.append(piece)

    @property
    def unfinished(self) -> bool:
        """Whether half a line is waiting for its rest."""
        return bool(self._pending)


def _line(part: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(part)
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise ApiError("unexpected_answer", 200, "The server sent a line that is no JSON object.")
    return value
