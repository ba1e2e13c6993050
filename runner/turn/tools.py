"""A turn's tool calls: shown as they change, and each with exactly one ending (case A18)."""

from __future__ import annotations

from typing import Any, Final

from runner.clock import Clock
from runner.rules.bounds import TITLE_CHARS, VALUE_BYTES, cut
from runner.terms import EventType
from runner.turn.journal import Journal
from runner.turn.live import LiveSeat, OpenTool
from runner.wire.codec import to_json

PARTS: Final = frozenset({"raw_input", "raw_output", "content", "locations"})
"""Parts of a call that an agent may make as large as it wants."""


class ToolCalls:
    """Writes the tool calls of a live seat into one turn's journal. Open ones outlive a paused turn, in the seat."""

    def __init__(self, live: LiveSeat, journal: Journal, clock: Clock) -> None:
        self._live = live
        self._journal = journal
        self._clock = clock

    def report(self, fields: dict[str, Any]) -> OpenTool:
        """Take what the agent says of a call; an unknown id is a new call. What is too large is cut, and says so."""
        if len(to_json(fields)) > TITLE_CHARS:
            fields = {name: self._fitted(name, value) for name, value in fields.items()}
        tool_call_id = fields["tool_call_id"]
        tool = self._live.tools.get(tool_call_id)
        if tool is None:
            data = {"tool_call_id": tool_call_id, "title": "", "kind": "other", "status": "pending"}
            tool = self._live.tools[tool_call_id] = OpenTool(data, self._clock.monotonic())
        elif not tool.running and fields.get("status") == "in_progress":
            tool.started_at = self._clock.monotonic()
        self._show(tool_call_id, tool, fields)
        return tool

    def _fitted(self, name: str, value: Any) -> Any:
        if name == "title":
            return value if len(value) <= TITLE_CHARS else cut(self._journal.redactor.text(value), TITLE_CHARS)
        if name not in PARTS:
            return value
        encoded = to_json(value)
        return value if len(encoded) <= VALUE_BYTES else self._journal.cut(value, encoded)

    def close(self, status: str) -> None:
        """Give every open call this ending in our own view, and forget all."""
        for tool_call_id, tool in self._live.tools.items():
            if not tool.ended:
                self._show(tool_call_id, tool, {"status": status})
        self._live.tools.clear()

    def defer(self) -> None:
        """The turn pauses: every open call gets a record that says so, and goes on in the turn that resumes."""
        for tool_call_id, tool in self._live.tools.items():
            if not tool.ended:
                shown = {"tool_call_id": tool_call_id, "status": "deferred"}
                record = (EventType.TOOL_CALL, {**tool.data, "status": "deferred"})
                self._journal.event(EventType.TOOL_CALL_UPDATE, shown, as_record=record)

    @property
    def open(self) -> bool:
        """Whether a call has no ending yet; some agents never say that one runs."""
        return any(not tool.ended for tool in self._live.tools.values())

    def running(self, waiting: set[str | None]) -> list[OpenTool]:
        """Calls that execute and do not wait for one of these questions."""
        return [tool for key, tool in self._live.tools.items() if tool.running and key not in waiting]

    def _show(self, tool_call_id: str, tool: OpenTool, fields: dict[str, Any]) -> None:
        first, late = not tool.shown, tool.ended
        if late and all(tool.data.get(name) == value for name, value in fields.items()):
            # Some agents tell of each ended call once more, for members that are no part of ours.
            return
        tool.shown = True
        tool.merge(fields)
        record = (EventType.TOOL_CALL, tool.data) if tool.ended and not late else None
        shown = dict(tool.data) if first else {"tool_call_id": tool_call_id, **fields}
        type = EventType.TOOL_CALL if first else EventType.TOOL_CALL_UPDATE
        self._journal.event(type, shown, durable=tool.ended, as_record=record)
