"""How many tokens a model's answer cost, read from its body as it passes (DESIGN 3.10).

Three protocols: Anthropic messages, OpenAI chat completions, OpenAI responses; each as one JSON object or as
server-sent events. What is not understood counts nothing, and no more is kept than one line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

MOST_BYTES: Final = 8 * 1024 * 1024
"""A longer line, or a longer object, is not looked into."""
MAX_COUNT: Final = 2**53
Tokens = dict[str, int]
"""Counts by kind: ``input``, ``output``, ``thought``, ``cached_read``, ``cached_write``; no token is in two."""


def tokens_of(usage: Any) -> Tokens:
    """The counts of one ``usage`` object of any of the three protocols."""
    if not isinstance(usage, Mapping):
        return {}
    if "prompt_tokens" in usage or "completion_tokens" in usage:
        return _of_openai(usage, "prompt_tokens", "completion_tokens")
    if "input_tokens_details" in usage or "output_tokens_details" in usage:
        return _of_openai(usage, "input_tokens", "output_tokens")
    return _counts(
        {
            "input": usage.get("input_tokens"),
            "output": usage.get("output_tokens"),
            "cached_read": usage.get("cache_read_input_tokens"),
            "cached_write": usage.get("cache_creation_input_tokens"),
        }
    )


def _of_openai(usage: Mapping[str, Any], into: str, out: str) -> Tokens:
    """Theirs count what was cached, or thought, in the sums too."""
    cached = _detail(usage.get(f"{into}_details"), "cached_tokens")
    thought = _detail(usage.get(f"{out}_details"), "reasoning_tokens")
    found = _counts({"input": usage.get(into), "output": usage.get(out), "cached_read": cached, "thought": thought})
    for whole, part in (("input", "cached_read"), ("output", "thought")):
        if whole in found:
            found[whole] = max(0, found[whole] - found.get(part, 0))
    return found


def _detail(details: Any, name: str) -> Any:
    return (details.get(name) or None) if isinstance(details, Mapping) else None


def _counts(given: Mapping[str, Any]) -> Tokens:
    return {
        kind: count
        for kind, count in given.items()
        if isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= MAX_COUNT
    }


def _usage_in(event: Any) -> Any:
    """Where an answer or an event of one has its ``usage``."""
    if not isinstance(event, Mapping):
        return None
    for place in (event, event.get("message"), event.get("response")):
        if isinstance(place, Mapping) and place.get("usage"):
            return place["usage"]
    return None


class BodyMeter:
    """Reads one answer's body while it passes; ``tokens`` is what is known so far.

    Events count up and do not add up: of each kind the largest number counts.
    """

    def __init__(self, content_type: str) -> None:
        kind = content_type.partition(";")[0].strip().lower()
        self._events = kind == "text/event-stream"
        self._whole = kind == "application/json"
        self._kept = bytearray()
        self._skips = False
        self.tokens: Tokens = {}

    def feed(self, chunk: bytes) -> None:
        """Take the next piece, cut anywhere."""
        if self._events:
            self._lines(chunk)
        elif self._whole and not self._skips:
            self._kept += chunk
            if len(self._kept) > MOST_BYTES:
                self._skips = True
                self._kept.clear()

    def end(self) -> Tokens:
        """The body is over; its counts."""
        if self._events:
            self._line(bytes(self._kept))
        elif self._kept:
            self._learn(bytes(self._kept))
        self._kept.clear()
        return self.tokens

    def _lines(self, chunk: bytes) -> None:
        first, *rest = chunk.split(b"\n")
        if not self._skips:
            self._kept += first
        for line in rest:
            if not self._skips:
                self._line(bytes(self._kept))
            self._skips = False
            self._kept[:] = line
        if len(self._kept) > MOST_BYTES:
            self._skips = True
            self._kept.clear()

    def _line(self, line: bytes) -> None:
        if line.startswith(b"data:") and b'"usage"' in line:
            self._learn(line[5:])

    def _learn(self, text: bytes) -> None:
        try:
            found = tokens_of(_usage_in(json.loads(text)))
        except (ValueError, RecursionError):
            return
        for kind, count in found.items():
            self.tokens[kind] = max(count, self.tokens.get(kind, 0))
