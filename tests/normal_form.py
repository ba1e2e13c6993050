"""What a session's events come to, whoever read them and how often: frames superseded by their blocks (DESIGN 3.9).

Two readers saw the same conversation when their normal forms are equal: one that followed live, one that came back by
its cursor ten times, and one that only reads what is stored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

Event = dict[str, Any]
DELTAS = {"message_delta": "message", "thought_delta": "thought"}
BLOCKS = frozenset(DELTAS.values())
TOOLS = frozenset({"tool_call", "tool_call_update"})
ENDED = frozenset({"completed", "failed", "cancelled"})


class Final(NamedTuple):
    """One item of a conversation. A block has no ``supersedes_from``, a tool call all that was told of it."""

    turn_id: str | None
    type: str
    data: dict[str, Any]


def normal_form(told: bytes | Iterable[bytes | str | Event]) -> list[Final]:
    """The final items of one session.

    Args:
        told: NDJSON lines, whole streams of them, or their objects; items of ``GET …/records`` too. Pings and results
            are passed over, what has no cursor as well; of two with one cursor the one told later counts. ``resync``
            without a reason forgets what came behind its cursor.

    Returns:
        In order: each block where it was recorded, one that was never closed behind everything (in the order of its
        first frame) as if it were closed now; a tool call at its ending (``deferred`` is one, for its turn), one that
        never ended at the very end.
    """
    fold = _Fold()
    for event in _by_cursor(told):
        fold.take(event)
    return [*fold.items, *fold.open_blocks(), *fold.open_tools()]


def cursor_of(event: Event) -> tuple[int, int]:
    """An event's cursor as numbers."""
    return _cursor(event["cursor"])


def _cursor(text: str) -> tuple[int, int]:
    epoch, n = text.split(".")
    return int(epoch), int(n)


def _by_cursor(told: bytes | Iterable[bytes | str | Event]) -> list[Event]:
    found: dict[tuple[int, int], Event] = {}
    for event in _events([told] if isinstance(told, bytes) else told):
        if event.get("type") == "resync" and "reason" not in event["data"]:
            start = _cursor(event["data"]["from"])
            found = {at: known for at, known in found.items() if at <= start}
        elif event.get("cursor") is not None:
            found[cursor_of(event)] = event
    return [found[at] for at in sorted(found)]


def _events(told: Iterable[bytes | str | Event]) -> Iterable[Event]:
    for part in told:
        if isinstance(part, dict):
            yield part
        else:
            yield from (json.loads(line) for line in part.splitlines() if line)


class _Fold:
    def __init__(self) -> None:
        self.items: list[Final] = []
        self._frames: dict[tuple[int, int], Event] = {}
        self._tools: dict[str, dict[str, Any]] = {}
        self._open: dict[str, str | None] = {}

    def take(self, event: Event) -> None:
        kind, data = event["type"], event["data"]
        if kind in DELTAS:
            self._frames[cursor_of(event)] = event
        elif kind in BLOCKS:
            self._block(event)
        elif kind in TOOLS:
            self._tool(event["turn_id"], data, whole=kind == "tool_call")
        else:
            self.items.append(Final(event["turn_id"], kind, data))

    def _block(self, event: Event) -> None:
        data, at = event["data"], cursor_of(event)
        start = _cursor(data["supersedes_from"])
        gone = [
            known
            for known, frame in self._frames.items()
            if start <= known < at and frame["data"]["message_id"] == data["message_id"]
        ]
        for known in gone:
            del self._frames[known]
        shown = {name: value for name, value in data.items() if name != "supersedes_from"}
        self.items.append(Final(event["turn_id"], event["type"], shown))

    def _tool(self, turn_id: str | None, data: dict[str, Any], *, whole: bool) -> None:
        name = data["tool_call_id"]
        if whole:
            self._tools.pop(name, None)
        known = self._tools.setdefault(name, {})
        deferred = data.get("status") == "deferred"
        known.update({field: value for field, value in data.items() if not (deferred and field == "status")})
        if deferred:
            self._open.pop(name, None)
            self.items.append(Final(turn_id, "tool_call", {**known, "status": "deferred"}))
        elif known.get("status") in ENDED:
            self._open.pop(name, None)
            self.items.append(Final(turn_id, "tool_call", dict(known)))
        else:
            self._open.setdefault(name, turn_id)

    def open_blocks(self) -> list[Final]:
        blocks: list[Final] = []
        for frame in self._frames.values():
            kind, data = DELTAS[frame["type"]], frame["data"]
            last = blocks[-1] if blocks else None
            if last is not None and (last.turn_id, last.type, last.data["message_id"]) == (
                frame["turn_id"],
                kind,
                data["message_id"],
            ):
                last.data["text"] += data["text"]
            else:
                blocks.append(Final(frame["turn_id"], kind, dict(data)))
        return blocks

    def open_tools(self) -> list[Final]:
        return [Final(turn_id, "tool_call", dict(self._tools[name])) for name, turn_id in self._open.items()]
