"""How large what an agent says may become in events and records; what is cut says so (DESIGN 3.9).

| what | at most | then |
|---|---|---|
| title of a tool call | ``TITLE_CHARS`` | its beginning, ``…[truncated: N characters]`` |
| id, kind, status of the agent's choice | ``WORD_CHARS`` | its beginning and a digest: two stay two |
| each of a tool call's other parts | ``VALUE_BYTES`` of JSON | ``bounded`` |
| data of another event | ``VALUE_BYTES`` of JSON | ``bounded`` |
| options, or form, of a question | ``QUESTION_BYTES`` of JSON | ``bounded`` |
| a text frame; a message or thought | ``FRAME_CHARS``; ``BLOCK_CHARS`` | the next one goes on, no text is cut |
| the text of a result | ``TEXT_CHARS`` | its beginning, and a ``notice`` before the ending |

What a client sent is bounded by ``[server] max_body_bytes`` and never cut.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Final

TITLE_CHARS: Final = 1000
WORD_CHARS: Final = 200
VALUE_BYTES: Final = 1024 * 1024
QUESTION_BYTES: Final = 8 * 1024 * 1024
"""More than a tool call has at most: what an approval covers is told whole, or by its parts' digests."""
FRAME_CHARS: Final = 256 * 1024
BLOCK_CHARS: Final = 4 * 1024 * 1024
TEXT_CHARS: Final = 16 * 1024 * 1024
_DEEPEST: Final = 64
_DIGEST_CHARS: Final = 16


def cut(text: str, chars: int) -> str:
    """A text of at most so many characters, else its beginning and how long it was."""
    return text if len(text) <= chars else f"{text[:chars]}…[truncated: {len(text)} characters]"


def word(text: str) -> str:
    """An id or name that an agent chose, as it is stored: short, and another one for another text."""
    if "\0" in text:
        text = text.replace("\0", "\ufffd")
    if len(text) <= WORD_CHARS:
        return text
    digest = sha256(text.encode("utf-8", "replace")).hexdigest()[:_DIGEST_CHARS]
    return f"{text[: WORD_CHARS - _DIGEST_CHARS - 1]}~{digest}"


def bounded(value: Any, encoded: bytes) -> Any:
    """A JSON value that is too large, about ``VALUE_BYTES`` of it: its shape, long texts cut, what is last left out.

    The marker ``{"truncated": true, "bytes": N, "sha256": …}`` is a member of it, of a list the last item, of a text
    the last words; two that begin alike stay two.

    Args:
        value: the whole, with secrets masked already: half of one could not be recognised any more.
        encoded: its JSON.
    """
    digest = sha256(encoded).hexdigest()
    if isinstance(value, str):
        return f"{value[: VALUE_BYTES // 4]}…[truncated: {len(encoded)} bytes, sha256 {digest}]"
    marker = {"truncated": True, "bytes": len(encoded), "sha256": digest}
    fitted = _Fit(VALUE_BYTES).of(value, 0)
    if isinstance(fitted, dict):
        return {**marker, **fitted, **marker}
    return [*(fitted if isinstance(fitted, list) else []), {"type": "truncated", **marker}]


class _Fit:
    """Takes of a value what there is room for, in its order."""

    def __init__(self, room: int) -> None:
        self._left = room
        self._longest = room // 4

    def of(self, value: Any, depth: int) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict | list):
            if depth == _DEEPEST:
                return "…"
            return self._members(value, depth) if isinstance(value, dict) else self._items(value, depth)
        self._left -= 8
        return value

    def _text(self, text: str) -> str:
        # A character may take several bytes: what is kept is measured, not counted.
        kept = text[: max(0, min(self._longest, self._left))]
        size = len(kept.encode("utf-8", "replace"))
        if size > self._longest:
            kept = kept.encode("utf-8", "replace")[: self._longest].decode("utf-8", "ignore")
            size = self._longest
        self._left -= size + 8
        return text if len(kept) == len(text) else cut(text, len(kept))

    def _members(self, value: dict[str, Any], depth: int) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for name, item in value.items():
            if self._left <= 0:
                kept["left_out"] = len(value) - len(kept)
                break
            short = word(name)
            self._left -= len(short) + 8
            kept[short] = self.of(item, depth + 1)
        return kept

    def _items(self, value: list[Any], depth: int) -> list[Any]:
        kept: list[Any] = []
        for item in value:
            if self._left <= 0:
                kept.append({"type": "left_out", "left_out": len(value) - len(kept)})
                break
            self._left -= 4
            kept.append(self.of(item, depth + 1))
        return kept
