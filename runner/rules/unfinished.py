"""What the records of a session leave open, read at a boot when nothing of it runs any more (DESIGN 3.9, case M10)."""

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


def unfinished(records: Iterable[tuple[str, Mapping[str, Any]]]) -> Unfinished:
    """Fold ``(type, data)`` of every record of a session, oldest first."""
    found, resumes, ended = Unfinished(), False, set[str]()
    for kind, data in records:
        match kind:
            case EventType.TURN_ADMITTED:
                # A turn names what it has read; some of that may have been cancelled meanwhile.
                found.prompts.update(dict.fromkeys(name for name in data["prompt_ids"] if name not in ended))
                found.unsent, resumes = False, "resumes" in data
            case EventType.PROMPT_ENDED:
                found.prompts.pop(data["prompt_id"], None)
                ended.add(data["prompt_id"])
            case EventType.TOOL_CALL | EventType.TOOL_CALL_UPDATE:
                _tool(found.tools, data)
            case EventType.SESSION_BUSY:
                found.busy = True
            case EventType.SESSION_IDLE:
                found.busy = False
            case EventType.USER_MESSAGE:
                found.context = True
            case EventType.ENVIRONMENT:
                found.unsent = resumes
            case EventType.NOTICE if data.get("kind") == CHAIN_RESUMED:
                found.unsent = resumes = False
    return found


def _tool(tools: dict[str, dict[str, Any]], data: Mapping[str, Any]) -> None:
    tool_call_id = data["tool_call_id"]
    if data.get("status") in TERMINAL_TOOL_STATUSES:
        tools.pop(tool_call_id, None)
    else:
        tools[tool_call_id] = {**tools.get(tool_call_id, {}), **data}
