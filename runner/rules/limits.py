"""Limits of a turn: which one runs out first, and when (DESIGN 4.1). All numbers are seconds on one clock."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Limits:
    """Each limit can be None: switched off."""

    total_seconds: float | None = None
    idle_seconds: float | None = 1800
    first_update_seconds: float | None = 120
    tool_call_seconds: float | None = 1800
    quiet_seconds: float | None = 300

    @property
    def shortest(self) -> float:
        """No limit that begins at a moment ends earlier than this many seconds later; infinite when all are off."""
        moving = (self.idle_seconds, self.first_update_seconds, self.tool_call_seconds, self.quiet_seconds)
        return min((seconds for seconds in moving if seconds is not None), default=math.inf)


@dataclass(frozen=True, slots=True)
class Progress:
    """What is known of a turn while its prompt is open.

    Attributes:
        started_at: admission.
        prompted_at: the frame was queued.
        last_life: the last message of any kind from the agent, unknown notifications too (case E10).
        updated: an update arrived.
        output: message text or a tool call arrived.
        tools: (started_at, title) of each tool call that runs and is not waiting for a human.
        open_tools: a tool call has no ending yet, whether it runs or only waits to.
        asking: a question to a human is open; the agent is not expected to speak.
    """

    started_at: float
    prompted_at: float
    last_life: float
    updated: bool
    output: bool
    tools: Iterable[tuple[float, str]] = ()
    open_tools: bool = False
    asking: bool = False


@dataclass(frozen=True, slots=True)
class Due:
    """The limit that runs out first."""

    at: float
    code: str
    message: str


SENTENCES: Final[dict[str, str]] = {
    "limit_total": "The turn reached its total limit of {seconds:g} s.",
    "limit_idle": "The agent gave no sign of life for {seconds:g} s.",
    "limit_first_update": "The agent sent no update within {seconds:g} s of the prompt.",
    "limit_tool_call": "The tool call “{title}” ran longer than {seconds:g} s.",
    "limit_quiet": "The agent answered, then neither spoke nor ended the turn for {seconds:g} s.",
}


def first_due(limits: Limits, progress: Progress) -> Due | None:
    """The next limit to run out, None when every one is off or suspended."""
    found: list[Due] = []

    def add(code: str, since: float, seconds: float | None, title: str = "") -> None:
        if seconds is not None:
            found.append(Due(since + seconds, code, SENTENCES[code].format(seconds=seconds, title=title)))

    tools = list(progress.tools)
    add("limit_total", progress.started_at, limits.total_seconds)
    if not progress.asking:
        add("limit_idle", max(progress.last_life, progress.prompted_at), limits.idle_seconds)
        if not progress.updated:
            add("limit_first_update", progress.prompted_at, limits.first_update_seconds)
        if progress.output and not tools and not progress.open_tools:
            add("limit_quiet", progress.last_life, limits.quiet_seconds)
    for started_at, title in tools:
        add("limit_tool_call", started_at, limits.tool_call_seconds, title)
    return min(found, key=lambda due: due.at, default=None)
