"""Masks known secret values in text, also across chunk borders (DESIGN 3.11)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final

MASK: Final = "[secret]"
_SHORTEST: Final = 6


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
        """A JSON value with every string in it masked, keys included; the same object when nothing is known."""
        if self._pattern is None:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.tree(item) for item in value]
        if isinstance(value, dict):
            return {self.text(key): self.tree(item) for key, item in value.items()}
        return value

    def held(self, text: str) -> int:
        """How many trailing characters may be the beginning of a secret and must wait for the next chunk."""
        longest = 0
        for value in self._values:
            for size in range(min(len(value) - 1, len(text)), longest, -1):
                if text.endswith(value[:size]):
                    longest = size
                    break
        return longest


class StreamRedactor:
    """Masks one stream of text chunks; holds back what may be the start of a secret until it is decided."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._tail = ""

    def feed(self, chunk: str) -> str:
        """Masked text that is safe to show now."""
        if not self._redactor:
            return chunk
        text = self._redactor.text(self._tail + chunk)
        hold = self._redactor.held(text)
        self._tail = text[len(text) - hold :] if hold else ""
        return text[: len(text) - hold]

    def flush(self) -> str:
        """What was still held back when the stream ended."""
        text, self._tail = self._tail, ""
        return text
