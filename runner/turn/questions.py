"""The open questions of a turn: asked durably, answered once, and none left when the turn ends (DESIGN 3.8)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from runner.acp.connection import PermissionAsked, PermissionWithdrawn
from runner.clock import Clock
from runner.interactions import desk
from runner.rules import permission
from runner.store.port import InteractionRow
from runner.terms import EventType, InteractionStatus
from runner.turn.journal import Journal
from runner.turn.live import LiveSeat, OpenTool, Question

log = logging.getLogger("runner.turn")
Save = Callable[[InteractionRow], Awaitable[None]]


class Questions:
    """Questions that one turn holds; the requests behind them are the live seat's.

    Attributes:
        open: rows by interaction id.
        closed: rows that got their last status in this turn, durable with its ending.
    """

    def __init__(self, live: LiveSeat, journal: Journal, clock: Clock, mint: Callable[[], str], save: Save) -> None:
        self.open: dict[str, InteractionRow] = {}
        self.closed: list[InteractionRow] = []
        self._live = live
        self._journal = journal
        self._clock = clock
        self._mint = mint
        self._save = save

    @property
    def waiting(self) -> set[str | None]:
        """Ids of the tool calls that wait for a human."""
        return {question.tool_call_id for question in self._live.questions.values()}

    def __bool__(self) -> bool:
        return bool(self._live.questions)

    async def ask(self, item: PermissionAsked, tool: OpenTool | None) -> None:
        """Make a durable question of a permission request, then show it."""
        row = desk.question(
            project=self._journal.project,
            session_id=self._journal.session_id,
            turn_id=self._journal.turn_id or "",
            interaction_id=self._mint(),
            generation=self._live.seat.generation,
            tool_call=self._journal.redactor.tree(dict(tool.data) if tool is not None else {}),
            options=self._journal.redactor.tree(list(item.params["options"])),
            now_ms=self._clock.now_ms(),
        )
        await self._save(row)
        self.open[row.interaction_id] = row
        tool_call_id = tool.data["tool_call_id"] if tool is not None else None
        options = tuple(item.params["options"])
        self._live.questions[row.interaction_id] = Question(row.interaction_id, item.key, tool_call_id, options)
        self._journal.event(EventType.INTERACTION_REQUESTED, desk.view(row))

    def answer(self, row: InteractionRow, reply: permission.Reply) -> bool:
        """Answer an open question on its still open request; False when nobody waits for it there any more."""
        question = self._live.questions.get(row.interaction_id)
        if question is None or not self.reply(question.key, reply):
            return False
        del self._live.questions[row.interaction_id]
        self.open.pop(row.interaction_id, None)
        self._close(row)
        return True

    def cancel_all(self) -> None:
        """Answer every open question ``cancelled`` and close it."""
        for row in list(self.open.values()):
            question = self._live.questions.pop(row.interaction_id, None)
            if question is not None:
                self.reply(question.key, permission.Reply(permission.CANCELLED))
            self._close(desk.closed(row, InteractionStatus.CANCELLED))
        self.open.clear()

    def withdrawn(self, item: PermissionWithdrawn) -> None:
        """The agent took a question back."""
        for question in list(self._live.questions.values()):
            if question.key == item.key:
                del self._live.questions[question.interaction_id]
                row = self.open.pop(question.interaction_id, None)
                if row is not None:
                    self._close(desk.closed(row, InteractionStatus.CANCELLED))

    def reply(self, key: Any, reply: permission.Reply) -> bool:
        """Answer a permission request on the wire; False when it is closed."""
        return send_reply(self._live, key, reply)

    def _close(self, row: InteractionRow) -> None:
        self.closed.append(row)
        self._journal.event(EventType.INTERACTION_CLOSED, desk.closing(row))


def send_reply(live: LiveSeat, key: Any, reply: permission.Reply) -> bool:
    """Answer a permission request; False when the agent is gone or took it back."""
    try:
        if reply.result is not None:
            return live.connection.respond(key, reply.result)
        return live.connection.respond_error(key, permission.DENY_ERROR, reply.message)
    except ConnectionError:
        log.debug("the agent went away before its permission request was answered")
        return False
