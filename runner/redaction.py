"""Masks known secret values in text, also across chunk borders (DESIGN 3.11)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final

MASK: Final = "[secret]"
_SHORTEST: Final = 6
_DEEPEST: Final = 200


def without_password(url: str) -> str:
    """A URL for people: its user, password and options are left out."""
    scheme, mark, rest = url.partition("://")
    if not mark or rest.startswith("/"):
        return url
    return f"{scheme}{mark}{rest.rpartition('@')[2].partition('?')[0]}"


class Redactor:
    """Replaces each known secret value by ``[secret]``.

    Values shorter than 6 characters are not masked: they would blank ordinary words.
    """

    def __init__(self, values: Iterable[str] = ()) -> None:
        forms: set[str] = set()
        for value in values:
            if len(value) >= _SHORTEST:
                forms.update((value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]))
        self._values = sorted(forms, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._values))) if self._values else None

    def __bool__(self) -> bool:
        return self._pattern is not None

    def text(self, text: str) -> str:
        """``text`` with every whole secret value masked."""
        return text if self._pattern is None else self._pattern.sub(MASK, text)

    def tree(self, value: Any) -> Any:
        """A JSON value with every string in it masked, keys included; the same object when nothing is known.

        What is nested deeper than 200 levels becomes ``"…"``, as in ``wire.codec.to_json``.
        """
        return value if self._pattern is None else self._tree(value, _DEEPEST)

    def _tree(self, value: Any, levels: int) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list | dict) and levels == 0:
            return "…"
        if isinstance(value, list):
            return [self._tree(item, levels - 1) for item in value]
        if isinstance(value, dict):
            return {self.text(key): self._tree(item, levels - 1) for key, item in value.items()}
        return value

    def held(self, text: str, start: int = 0) -> int:
        """How many trailing characters behind ``start`` may be the beginning of a secret and must wait."""
        longest = 0
        for value in self._values:
            at = max(start, len(text) - len(value) + 1)
            while (at := text.find(value[0], at)) != -1 and len(text) - at > longest:
                if value.startswith(text[at:]):
                    longest = len(text) - at
                at += 1
        return longest

    def split(self, text: str) -> tuple[str, str]:
        """Masked text that no later character can change, and the raw rest that must wait for what follows."""
        if self._pattern is None:
            return text, ""
        cut, done = len(text) - self.held(text), 0
        parts: list[str] = []
        for found in self._pattern.finditer(text):
            if found.start() >= cut:
                break
            parts += (text[done : found.start()], MASK)
            done = found.end()
            if done > cut:
                cut = len(text) - self.held(text, done)
        return "".join(parts) + text[done:cut], text[cut:]


class StreamRedactor:
    """Masks one stream of text chunks as ``Redactor.text`` masks the whole, wherever the chunks are cut."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._tail = ""

    def feed(self, chunk: str) -> str:
        """Masked text that is safe to show now; what may be the start of a secret is held back."""
        text, self._tail = self._redactor.split(self._tail + chunk)
        return text

    def flush(self) -> str:
        """What was still held back when the stream ended."""
        text, self._tail = self._redactor.text(self._tail), ""
        return text
