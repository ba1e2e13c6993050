"""The window in which an agent replays a session that it loads: all of it is dropped, and counted (case G13)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final

from runner.acp.answers import config_options, mapping
from runner.acp.inbox import Closed, Inbox, Item
from runner.clock import Clock
from runner.errors import RunnerError

QUIET_SECONDS: Final = 0.1
LONGEST_SECONDS: Final = 2.0
CONVERSATION: Final = frozenset(
    {"user_message_chunk", "agent_message_chunk", "agent_thought_chunk", "tool_call", "tool_call_update", "plan"}
)
"""Updates that tell of the conversation; the others tell what the agent is like."""
FACTS: Final = frozenset({"current_mode_update", "config_option_update"})


@dataclass(frozen=True, slots=True)
class Reopened:
    """What ``session/load`` or ``session/resume`` came to.

    Attributes:
        agent_session_id: the id that was asked for.
        modes, config_options: as the answer gave them, None when it did not.
        facts: the newest updates about mode and options, which came meanwhile.
        replayed: updates of the conversation that were dropped.
    """

    agent_session_id: str
    modes: dict[str, Any] | None
    config_options: list[dict[str, Any]] | None
    facts: tuple[dict[str, Any], ...]
    replayed: int


class ReplayWindow(Inbox):
    """Stands in for a session's inbox while the session is loaded or resumed: keeps nothing but the agent's exit."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(lambda: None)
        self._clock = clock
        self._last = clock.monotonic()
        self._facts: dict[str, dict[str, Any]] = {}
        self.replayed = 0
        self.dropped = 0
        self.over = False
        self.end: RunnerError | None = None

    def put_updates(self, updates: list[dict[str, Any]], size: int) -> None:
        """Drop updates; facts about mode and options are remembered."""
        self._last = self._clock.monotonic()
        self.dropped += len(updates)
        for update in updates:
            kind = update.get("sessionUpdate")
            if not isinstance(kind, str):
                continue
            self.replayed += kind in CONVERSATION
            if kind in FACTS:
                self._facts[kind] = update

    def put(self, item: Item, size: int = 0) -> None:
        """Drop what no prompt of ours asked for."""
        if isinstance(item, Closed):
            self.end = item.error
        else:
            self.dropped += 1

    async def quiet(self) -> None:
        """Wait until nothing came for ``QUIET_SECONDS`` from now on, at most ``LONGEST_SECONDS``; cancellable."""
        answered = self._clock.monotonic()
        while not self.over and self.end is None:
            now = self._clock.monotonic()
            ends = min(max(self._last, answered) + QUIET_SECONDS, answered + LONGEST_SECONDS)
            if now >= ends:
                return
            await asyncio.sleep(ends - now)

    def reopened(self, agent_session_id: str, answer: Any) -> Reopened:
        """The answer of the agent, which may be null, with what was seen in the window."""
        given = mapping(answer)
        modes = mapping(given.get("modes")) or None
        return Reopened(agent_session_id, modes, config_options(given), tuple(self._facts.values()), self.replayed)
