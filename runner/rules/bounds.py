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

from collections.abc import Callable
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


def bounded(value: Any, encoded: bytes, mask: Callable[[Any], Any]) -> Any:
    """A JSON value that is too large, about ``VALUE_BYTES`` of it: its shape, long texts cut, what is last left out.

    The marker ``{"truncated": true, "bytes": N, "sha256": …}`` is a member of it, of a list the last item, of a text
    the last words; two that begin alike stay two.

    Args:
        value: the whole.
        encoded: its JSON, masked: the digest of a secret is not to be told either.
        mask: masks a value's secrets. Texts are cut behind it: half of a secret could not be recognised any more.
    """
    digest = sha256(encoded).hexdigest()
    longest = VALUE_BYTES // 4
    if isinstance(value, str):
        kept = _beginning(mask(value), longest - 200)
        return f"{kept}…[truncated: {len(encoded)} bytes, sha256 {digest}]"
    marker = {"truncated": True, "bytes": len(encoded), "sha256": digest}
    fitted = _with_short_texts(mask(_Fit(VALUE_BYTES, longest).of(value, 0)), longest)
    if isinstance(fitted, dict):
        return {**marker, **fitted, **marker}
    return [*(fitted if isinstance(fitted, list) else []), {"type": "truncated", **marker}]


class _Fit:
    """Takes of a value the members that there is room for, in their order; a long text counts as it will be cut."""

    def __init__(self, room: int, longest: int) -> None:
        self._left = room
        self._longest = longest

    def of(self, value: Any, depth: int) -> Any:
        if isinstance(value, dict | list):
            if depth == _DEEPEST:
                return "…"
            return self._members(value, depth) if isinstance(value, dict) else self._items(value, depth)
        self._left -= 8 + (_size(value, self._longest) if isinstance(value, str) else 0)
        return value

    def _members(self, value: dict[str, Any], depth: int) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for name, item in value.items():
            if self._left <= 0:
                kept["left_out"] = len(value) - len(kept)
                break
            self._left -= 8 + _size(name, WORD_CHARS)
            kept[name] = self.of(item, depth + 1)
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


def _size(text: str, longest: int) -> int:
    """Its bytes, at most so many."""
    return min(longest, len(text) if text.isascii() else len(text[:longest].encode("utf-8", "replace")))


def _beginning(text: str, size: int) -> str:
    """As much of a text as fits into so many bytes."""
    if text.isascii():
        return text[:size]
    return text[:size].encode("utf-8", "replace")[:size].decode("utf-8", "ignore")


def _with_short_texts(value: Any, longest: int) -> Any:
    if isinstance(value, str):
        return cut(value, len(_beginning(value, longest)))
    if isinstance(value, list):
        return [_with_short_texts(item, longest) for item in value]
    if isinstance(value, dict):
        return {word(name): _with_short_texts(item, longest) for name, item in value.items()}
    return value
