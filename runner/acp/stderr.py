"""The bounded, masked tail of an agent's stderr (cases E5, E6, K2)."""

from __future__ import annotations

import codecs
from typing import Final

from runner.redaction import Redactor, StreamRedactor

TAIL_BYTES: Final = 8 * 1024
WORDS: Final = 500


class StderrTail:
    """The last 8 KiB of what an agent wrote to stderr.

    A trailing piece that may be the start of a secret is left out, at the end too: half a secret is one.
    """

    def __init__(self, redactor: Redactor) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace")
        self._mask = StreamRedactor(redactor)
        self._text = ""

    def feed(self, data: bytes) -> None:
        """A chunk, cut anywhere."""
        text = self._decode.decode(data).replace("\0", "\ufffd")
        self._text = (self._text + self._mask.feed(text))[-TAIL_BYTES:]

    def read(self) -> str:
        """The tail as it is now, at most 8 KiB as UTF-8."""
        return _last_bytes(self._text, TAIL_BYTES)

    def words(self) -> str:
        """The last few lines, for a sentence."""
        return self.read().strip()[-WORDS:]


def shown(redactor: Redactor, text: str, characters: int) -> str:
    """Text that was cut somewhere, masked, without the start of a secret at the cut."""
    masked = redactor.text(text)
    held = redactor.held(masked) if redactor else 0
    return masked[: len(masked) - held][:characters]


def _last_bytes(text: str, size: int) -> str:
    encoded = text.encode("utf-8", "replace")
    return encoded[-size:].decode("utf-8", "ignore") if len(encoded) > size else text
