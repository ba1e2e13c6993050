"""What a seat holds while its sandbox lives: the sandbox, the connection and the agent session in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from runner.acp import updates
from runner.acp.connection import (
    AgentConnection,
    Closed,
    ElicitationAsked,
    Inbox,
    Item,
    PermissionAsked,
    PromptAnswered,
    Updates,
)
from runner.interactions import desk
from runner.rules import elicitation, permission
from runner.rules.pool import Seat
from runner.rules.resume import AgentSession
from runner.rules.usage import Spent
from runner.sandbox.port import Mark, Sandbox
from runner.terms import TERMINAL_TOOL_STATUSES
from runner.turn.leased import Leased

INFO: Final = frozenset(
    {"available_commands_update", "current_mode_update", "config_option_update", "session_info_update"}
)


@dataclass(slots=True)
class OpenTool:
    """A tool call as last reported, merged from its updates."""

    data: dict[str, Any]
    started_at: float
    shown: bool = False
    ended: bool = False

    @property
    def running(self) -> bool:
        """Whether the agent says that it executes."""
        return not self.ended and self.data.get("status") == "in_progress"

    def merge(self, fields: dict[str, Any]) -> None:
        """Take newer fields; absent ones keep their value."""
        self.data.update(fields)
        self.ended = self.data.get("status") in TERMINAL_TOOL_STATUSES


@dataclass(frozen=True, slots=True)
class Question:
    """A permission request or elicitation that waits for a human; ``offer``: what it can be answered with."""

    interaction_id: str
    key: Any
    tool_call_id: str | None
    offer: desk.Offer


@dataclass(slots=True)
class LiveSeat:
    """The inside of a busy or parked seat. Its turn, or the session while paused, is its only user.

    ``agent_session``: what a later process needs to go on with it, None where its home has no identity;
    ``resumed``: it goes on with that of an earlier process; ``resume_failed``: why it does not, although it was tried;
    ``preface``: what its agent must still be told of the session with the next frame;
    ``answers_twice``: its harness may answer the first prompt behind a cancel with the old one's ending; ``cancelled``:
    the last prompt was cancelled;
    ``minted_input``: members of a tool's raw input that are new with each call, whatever its arguments;
    ``spent``: what its agent session has cost so far, as it was last told;
    ``keys``: what its agent has instead of model keys;
    ``memory_kills``: how many kills for want of memory were told of;
    ``counted_at``: loop time until which its seconds are counted; ``on_leave``: counts the last of them.
    """

    seat: Seat
    sandbox: Sandbox
    connection: AgentConnection
    inbox: Inbox
    agent_session_id: str
    mode: str | None = None
    modes: tuple[str, ...] = ()
    config_options: list[dict[str, Any]] = field(default_factory=list)
    prompt_request: int | None = None
    questions: dict[str, Question] = field(default_factory=dict)
    tools: dict[str, OpenTool] = field(default_factory=dict)
    held: list[Item] = field(default_factory=list)
    turns: int = 0
    mark_id: str = ""
    mark_under_way: Mark | None = None
    stray_items: int = 0
    exited: bool = False
    agent_session: AgentSession | None = None
    resumed: bool = False
    resume_failed: str | None = None
    minted_input: frozenset[str] = frozenset()
    answers_twice: bool = False
    cancelled: bool = False
    preface: str | None = None
    spent: Spent = field(default_factory=dict)
    keys: Leased = field(default_factory=Leased)
    memory_kills: int = 0
    counted_at: float = 0.0
    on_leave: Callable[[], None] | None = None

    @property
    def loaded(self) -> bool:
        """Whether its memory is that of an earlier process, and no turn has shown yet that it works."""
        return self.resumed and self.turns == 0

    def killed_for_memory(self) -> int:
        """How many of its processes were, since this was asked last."""
        before, self.memory_kills = self.memory_kills, self.sandbox.memory_kills
        return max(0, self.memory_kills - before)

    @property
    def alive(self) -> bool:
        """Whether the agent still runs as far as anybody reported."""
        return not self.exited

    def mark(self, turn_id: str) -> None:
        """Everything that lives in the sandbox now is not this turn's; a chain keeps its first turn's mark."""
        self.mark_id = turn_id
        self.mark_under_way = self.sandbox.mark(turn_id)

    async def marked(self, seconds: float) -> None:
        """Wait for the mark. Raises ``RunnerError`` (``sandbox_lost``)."""
        if self.mark_under_way is not None:
            await self.mark_under_way.set(seconds)

    def watch_idle(self, on_exit: Callable[[], None]) -> None:
        """While idle nobody owns what the agent says; its exit is told (cases E8, L3)."""

        def items() -> None:
            for item in self.inbox.drain():
                self.drop(item)
            if self.exited:
                on_exit()

        self.inbox.on_items = items
        items()

    def watch_spare(self, on_exit: Callable[[], None]) -> None:
        """As ``watch_idle`` before any turn: the newest of each kind that it tells about itself waits for the first."""
        told: dict[str, dict[str, Any]] = {}

        def items() -> None:
            for item in self.inbox.drain():
                told.update({str(info["sessionUpdate"]): info for info in _info(item)})
                self.drop(item)
            self.held = [Updates(list(told.values()))] if told else []
            if self.exited:
                on_exit()

        self.inbox.on_items = items
        items()

    def take(self) -> None:
        """A turn takes the seat: what was said before is nobody's answer (case E8); what the session is like stays."""
        self.inbox.on_items = None
        if self.prompt_request is not None:
            return
        for item in self.inbox.drain():
            self.drop(item)
            info = _info(item)
            if info:
                self.held.append(Updates(info))

    def lost(self) -> bool:
        """Whether the agent of a paused chain is gone without an answer to its prompt; what it said last is held."""
        if not self.inbox.closed:
            return False
        self.held += self.inbox.drain()
        return not any(isinstance(item, PromptAnswered) for item in self.held)

    def drop(self, item: Item) -> None:
        """What belongs to no turn: counted, but a question is answered ``cancelled``, and facts are learnt."""
        info = _info(item)
        for _, _, payload in updates.grouped(info):
            self.learn(payload)
        self.stray_items += not info
        if isinstance(item, Closed):
            self.exited = True
        elif isinstance(item, PermissionAsked | ElicitationAsked):
            asks = isinstance(item, PermissionAsked)
            with suppress(ConnectionError):
                self.connection.respond(item.key, permission.CANCELLED if asks else elicitation.CANCEL)

    def learn(self, info: dict[str, Any]) -> None:
        """The agent changed its mode or options by itself: a later dispatch compares with what is in force."""
        if isinstance(info.get("mode"), str):
            self.mode = info["mode"]
        if isinstance(info.get("config_options"), list):
            self.config_options = [option for option in info["config_options"] if isinstance(option, dict)]

    def leave(self) -> None:
        """The seat is out of the map: nobody listens any more."""
        self.inbox.on_items = None
        self.keys.end()
        on_leave, self.on_leave = self.on_leave, None
        if on_leave is not None:
            on_leave()
        self.counted_at = math.inf

    def uncounted(self, now: float) -> float:
        """Its sandbox's seconds since they were last counted, for the caller to count; none behind ``leave``."""
        seconds, self.counted_at = max(0.0, now - self.counted_at), max(now, self.counted_at)
        return seconds


def _info(item: Item) -> list[dict[str, Any]]:
    """The updates in which the agent tells about itself."""
    return (
        [update for update in item.updates if update.get("sessionUpdate") in INFO] if isinstance(item, Updates) else []
    )
