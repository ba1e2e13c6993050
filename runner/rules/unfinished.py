"""What the records of a session leave open: at a boot when nothing of it runs any more, or at a cut (case M10)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from runner.terms import TERMINAL_TOOL_STATUSES, EventType

READ = frozenset(
    {
        EventType.TURN_ADMITTED,
        EventType.PROMPT_ENDED,
        EventType.TOOL_CALL,
        EventType.TOOL_CALL_UPDATE,
        EventType.SESSION_BUSY,
        EventType.SESSION_IDLE,
        EventType.USER_MESSAGE,
        EventType.ENVIRONMENT,
        EventType.NOTICE,
    }
)
"""Types of records that say something about it."""


CHAIN_RESUMED = "chain_resumed"
"""Kind of the notice behind which a cold chain's new agent has its frame."""


@dataclass(slots=True)
class Unfinished:
    """Open things in the order in which they began.

    Attributes:
        prompts: ids of prompts without an end.
        tools: last record of each tool call without an ending, by its id.
        busy: the last busy period has no end.
        context: a prompt was sent: an agent knew something.
        unsent: the newest turn goes on with a paused chain, started an agent for it, and had sent it nothing.
    """

    prompts: dict[str, None] = field(default_factory=dict)
    tools: dict[str, dict[str, Any]] = field(default_factory=dict)
    busy: bool = False
    context: bool = False
    unsent: bool = False
    _resumes: bool = field(default=False, compare=False)
    _ended: set[str] = field(default_factory=set, compare=False)

    def see(self, kind: str, data: Mapping[str, Any]) -> None:
        """Take the next record of the session."""
        match kind:
            case EventType.TURN_ADMITTED:
                # A turn names what it has read; some of that may have been cancelled meanwhile.
                self.prompts.update(dict.fromkeys(name for name in data["prompt_ids"] if name not in self._ended))
                self.unsent, self._resumes = False, "resumes" in data
            case EventType.PROMPT_ENDED:
                self.prompts.pop(data["prompt_id"], None)
                self._ended.add(data["prompt_id"])
            case EventType.TOOL_CALL | EventType.TOOL_CALL_UPDATE:
                self._tool(data)
            case EventType.SESSION_BUSY | EventType.SESSION_IDLE:
                self.busy = kind == EventType.SESSION_BUSY
            case EventType.USER_MESSAGE:
                self.context = True
            case EventType.ENVIRONMENT:
                self.unsent = self._resumes
            case EventType.NOTICE if data.get("kind") == CHAIN_RESUMED:
                self.unsent = self._resumes = False

    def _tool(self, data: Mapping[str, Any]) -> None:
        tool_call_id = data["tool_call_id"]
        if data.get("status") in TERMINAL_TOOL_STATUSES:
            self.tools.pop(tool_call_id, None)
        else:
            self.tools[tool_call_id] = {**self.tools.get(tool_call_id, {}), **data}


def unfinished(records: Iterable[tuple[str, Mapping[str, Any]]]) -> Unfinished:
    """Fold ``(type, data)`` of every record of a session, oldest first."""
    found = Unfinished()
    for kind, data in records:
        found.see(kind, data)
    return found
