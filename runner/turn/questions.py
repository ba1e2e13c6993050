"""The open questions of a chain: asked durably, answered once, and none left when it ends (DESIGN 3.8)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final, Literal

from runner.acp.connection import Asked, ElicitationCompleted, PermissionAsked, PermissionWithdrawn
from runner.clock import Clock
from runner.errors import RunnerError
from runner.interactions import desk
from runner.rules import interaction, permission
from runner.rules.bounds import word
from runner.rules.interaction import Cause
from runner.store.port import InteractionRow
from runner.terms import EventType, InteractionStatus
from runner.turn.journal import Journal
from runner.turn.live import LiveSeat, OpenTool, Question

log = logging.getLogger("runner.turn")
Save = Callable[[InteractionRow], Awaitable[None]]
Given = Literal["given", "held"]
DONE: Final[dict[str, Any]] = {"action": "accept"}


class Questions:
    """Questions that one turn, or a paused chain, holds; the requests behind them are the live seat's.

    A question without a request belongs to an agent that is gone: it waits until the new agent asks the same again.

    Attributes:
        open: rows by interaction id: pending ones, and answered ones that the agent must ask for again.
        closed: rows that got their last status here, to be made durable by the owner; ``on_closed`` is told of each.
    """

    def __init__(
        self,
        live: LiveSeat,
        journal: Journal,
        clock: Clock,
        mint: Callable[[], str],
        *,
        turn_id: str | None = None,
        opened: dict[str, InteractionRow] | None = None,
        on_closed: Callable[[InteractionRow], None] | None = None,
    ) -> None:
        self.open: dict[str, InteractionRow] = {} if opened is None else opened
        self.closed: list[InteractionRow] = []
        self._live = live
        self._journal = journal
        self._clock = clock
        self._mint = mint
        self._turn_id = turn_id or journal.turn_id or ""
        self._on_closed = on_closed
        self._taken: dict[str, asyncio.Future[bool]] = {}

    @property
    def waiting(self) -> set[str | None]:
        """Ids of the tool calls that wait for a human."""
        return {question.tool_call_id for question in self._live.questions.values()}

    def __bool__(self) -> bool:
        return bool(self._live.questions)

    # -- what the agent asks -----------------------------------------------------------------------------------------

    def settle(self, item: Asked, tool: OpenTool | None, policy: permission.Policy) -> bool | None:
        """Answer without a human: by the stored answer to exactly this question, or by the policy.

        Returns:
            Whether it was denied; None when it must be asked.
        """
        offer = desk.offer(item)
        stored = self._carried(item, tool, InteractionStatus.ANSWERED)
        if stored is not None:
            try:
                reply, denied = desk.stored_reply(stored, offer)
            except RunnerError:
                self._close(stored, Cause.OUTDATED)
            else:
                if self.reply(item.key, reply):
                    self._consume(stored)
                return denied
        decided = desk.decide(policy, item)
        if decided is None:
            return None
        self.reply(item.key, decided)
        return desk.denies(offer, decided)

    def draft(self, item: Asked, tool: OpenTool | None) -> InteractionRow:
        """The row of a question that must be asked: a new one, or the open one that an agent before this one asked."""
        journal = self._journal
        fresh = desk.question(
            item,
            tool.data if tool is not None else None,
            project=journal.project,
            session_id=journal.session_id,
            turn_id=self._turn_id,
            interaction_id=self._mint(),
            generation=self._live.seat.generation,
            redact=journal.fitted,
            now_ms=self._clock.now_ms(),
            minted=self._live.minted_input,
        )
        known = self._carried(item, tool, InteractionStatus.PENDING)
        if known is not None:
            return replace(known, turn_id=self._turn_id, request=fresh.request)
        self._outdate(fresh)
        return fresh

    def show(self, row: InteractionRow, item: Asked, tool: OpenTool | None) -> None:
        """Hold a question that is durable, and show it."""
        again = row.interaction_id in self.open
        self.open[row.interaction_id] = row
        tool_call_id = tool.data["tool_call_id"] if tool is not None else None
        question = Question(row.interaction_id, item.key, tool_call_id, desk.offer(item))
        self._live.questions[row.interaction_id] = question
        if not again:
            self._journal.event(EventType.INTERACTION_REQUESTED, desk.view(row))

    def _carried(self, item: Asked, tool: OpenTool | None, status: InteractionStatus) -> InteractionRow | None:
        """The oldest question of an earlier agent that is this one exactly: same tool, same canonical arguments."""
        waiting = [
            row for row in self.open.values() if row.status == status and row.interaction_id not in self._live.questions
        ]
        if not waiting:
            return None
        data = tool.data if tool is not None else None
        wanted = desk.binding(item, data, self._journal.fitted, self._live.minted_input)
        return next((row for row in waiting if row.request.get("binding") == wanted), None)

    def _outdate(self, fresh: InteractionRow) -> None:
        """The same tool is asked for with other arguments: the answer to the earlier question covers nothing now."""
        for row in list(self.open.values()):
            held = row.status == InteractionStatus.ANSWERED and row.interaction_id not in self._live.questions
            if held and row.kind == fresh.kind and _tool(row) == _tool(fresh):
                self._close(row, Cause.OUTDATED)
                return

    def withdrawn(self, item: PermissionWithdrawn) -> None:
        """The agent took a question back."""
        for question in list(self._live.questions.values()):
            if question.key == item.key:
                del self._live.questions[question.interaction_id]
                row = self.open.get(question.interaction_id)
                if row is not None:
                    self._close(row, Cause.WITHDRAWN)

    def completed(self, item: ElicitationCompleted) -> bool:
        """What a URL asked for is done: a question about it needs no answer any more; whether there was one."""
        for row in list(self.open.values()):
            question = self._live.questions.get(row.interaction_id)
            if question is not None and row.request.get("elicitation_id") == item.elicitation_id:
                del self._live.questions[row.interaction_id]
                self.reply(question.key, permission.Reply(DONE))
                self._consume(replace(row, answer={**DONE, "completed": True}))
                return True
        return False

    # -- what humans, Stops and time do ------------------------------------------------------------------------------

    def answer(self, row: InteractionRow, given: dict[str, Any]) -> tuple[Given | None, bool]:
        """Give an answer (``row`` is answered) to the request that waits for it, else hold it until the agent asks.

        Returns:
            What became of it, None when nobody waits here any more; and whether it is a denial.
        """
        question = self._live.questions.get(row.interaction_id)
        if question is None:
            if row.interaction_id not in self.open:
                return None, False
            self.open[row.interaction_id] = row
            return "held", False
        reply, denied = desk.reply(question.offer, given)
        if not self.reply(question.key, reply):
            return None, False
        del self._live.questions[row.interaction_id]
        self._consume(row)
        return "given", denied

    def taken(self, interaction_id: str) -> asyncio.Future[bool]:
        """Whether the agent was handed the answer to this question, once that is known."""
        return self._taken.setdefault(interaction_id, asyncio.get_running_loop().create_future())

    def inherit(self, earlier: Questions) -> None:
        """Hold what an earlier agent's run of the same turn held; whoever waits for an answer there waits on here."""
        self.open.update(earlier.open)
        self._taken = earlier._taken

    def close_all(self, cause: Cause) -> None:
        """Answer every open request ``cancelled``, and close what ``cause`` closes."""
        for row in list(self.open.values()):
            question = self._live.questions.pop(row.interaction_id, None)
            if question is not None:
                self.reply(question.key, desk.cancel(row.kind))
            self._close(row, cause)

    def expire(self, now_ms: int) -> bool:
        """Refuse and close what nobody answered in time (never "denied by user"); whether there was any."""
        due = [row for row in self.open.values() if not _in_time(row, now_ms)]
        for row in due:
            question = self._live.questions.pop(row.interaction_id, None)
            if question is not None:
                self.reply(question.key, desk.refuse(question.offer))
            self._close(row, Cause.EXPIRED)
        return bool(due)

    def reply(self, key: Any, reply: permission.Reply) -> bool:
        """Answer a request on the wire; False when it is closed."""
        return send_reply(self._live, key, reply)

    def _consume(self, row: InteractionRow) -> None:
        self.open.pop(row.interaction_id, None)
        self._tell(desk.consumed(row))
        self._know(row, given=True)

    def _close(self, row: InteractionRow, cause: Cause) -> None:
        closed = desk.close(row, cause)
        if closed is not None:
            self.open.pop(row.interaction_id, None)
            self._tell(closed)
            self._know(row, given=False)

    def _know(self, row: InteractionRow, *, given: bool) -> None:
        taken = self.taken(row.interaction_id)
        if not taken.done():
            taken.set_result(given)

    def _tell(self, row: InteractionRow) -> None:
        self.closed.append(row)
        if self._on_closed is not None:
            self._on_closed(row)
        self._journal.event(EventType.INTERACTION_CLOSED, desk.closing(row))


def _tool(row: InteractionRow) -> Any:
    return (row.request.get("tool_call") or {}).get("kind")


def _in_time(row: InteractionRow, now_ms: int) -> bool:
    status = InteractionStatus(row.status)
    return status is not InteractionStatus.PENDING or interaction.open_for(status, row.expires_at, now_ms)


def tool_of(live: LiveSeat, item: Asked) -> OpenTool | None:
    """The call that a question belongs to, as far as the agent told of it."""
    if isinstance(item, PermissionAsked):
        return live.tools.get(word(item.params["toolCall"]["toolCallId"]))
    named = item.params.get("toolCallId")
    return live.tools.get(word(named)) if isinstance(named, str) else None


def send_reply(live: LiveSeat, key: Any, reply: permission.Reply) -> bool:
    """Answer a question of the agent; False when the agent is gone or took it back."""
    try:
        if reply.result is not None:
            return live.connection.respond(key, reply.result)
        return live.connection.respond_error(key, permission.DENY_ERROR, reply.message)
    except ConnectionError:
        log.debug("the agent went away before its question was answered")
        return False
