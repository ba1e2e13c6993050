"""Drives one open ``session/prompt`` from its frame to its ending: the shell of ``rules.turn`` (DESIGN 3.2, 3.3)."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from runner.acp import updates
from runner.acp.connection import (
    Asked,
    Closed,
    ElicitationAsked,
    ElicitationCompleted,
    Item,
    PermissionAsked,
    PermissionWithdrawn,
    PromptAnswered,
    Updates,
)
from runner.clock import Clock
from runner.errors import RunnerError
from runner.interactions import desk
from runner.rules import permission
from runner.rules import turn as rules
from runner.rules.interaction import Cause
from runner.rules.limits import Limits, Progress, first_due
from runner.rules.stale import gone, stale
from runner.rules.usage import Meter
from runner.store.port import InteractionRow
from runner.terms import EventType, Outcome, StopReason, TurnPhase
from runner.turn.journal import Journal
from runner.turn.live import INFO, LiveSeat
from runner.turn.questions import Given, Questions, Save, tool_of
from runner.turn.tools import ToolCalls

log = logging.getLogger("runner.turn")
REAP_SECONDS: Final = 1.0
FLUSH_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Tuning:
    """Numbers of ``[turn]``, seconds."""

    settle_seconds: float = 10.0
    pause_quiet_seconds: float = 0.1


class Driver:
    """One run of an agent's open prompt within one turn.

    The session starts it with ``run`` and may call ``stop`` and ``answer`` at any moment; both only mark and wake.
    """

    def __init__(
        self,
        *,
        live: LiveSeat,
        machine: rules.Turn,
        journal: Journal,
        policy: permission.Policy,
        limits: Limits,
        tuning: Tuning,
        meter: Meter,
        clock: Clock,
        started_at: float,
        mint: Callable[[], str],
        save_question: Save,
        on_closed: Callable[[InteractionRow], None],
    ) -> None:
        self.live = live
        self.machine = machine
        self.journal = journal
        self.questions = Questions(live, journal, clock, mint, on_closed=on_closed)
        self._save_question = save_question
        self.first_update_at: float | None = None
        self._meter = meter
        self._policy = policy
        self._limits = limits
        self._tuning = tuning
        self._clock = clock
        self._started_at = started_at
        self._prompted_at = started_at
        self._tools = ToolCalls(live, journal, clock)
        self._todo: deque[rules.Effect] = deque()
        self._timers: dict[str, float] = {}
        self._end: rules.End | rules.Again | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._rang = False
        self._shortest = limits.shortest
        self._last_item = clock.monotonic()
        self._blocks: list[dict[str, Any]] = []
        self._before_frame: Callable[[], None] = lambda: None
        self._behind_cancel = False

    # -- from outside ------------------------------------------------------------------------------------------------

    def stop(self, reason: StopReason, error: RunnerError | None = None) -> None:
        """Mark the turn stopping; what that makes us do follows at once, in the driver's own task."""
        self.feed(rules.Stop(reason, error))

    def feed(self, event: rules.Event) -> None:
        """Move the machine; its effects are performed by ``run``."""
        self._todo.extend(rules.step(self.machine, event))
        self._wake()

    def answer(self, row: InteractionRow, given: dict[str, Any]) -> Given | None:
        """Give a human's answer to the request that waits for it, or hold it until the agent asks again.

        None when nobody waits here any more. Raises ``RunnerError`` (``invalid_request``), as ``desk.reply``.
        """
        how, denied = self.questions.answer(row, given)
        if how is not None:
            self._answered(denied)
        return how

    def expire(self, now_ms: int) -> None:
        """Refuse what nobody answered in time."""
        if self.questions.expire(now_ms):
            self._answered(True)

    def _answered(self, denied: bool) -> None:
        self.machine.denied = self.machine.denied or denied
        self._last_item = self._clock.monotonic()
        self._wake()

    # -- the run -----------------------------------------------------------------------------------------------------

    async def run(
        self, blocks: list[dict[str, Any]] | None, before_frame: Callable[[], None]
    ) -> rules.End | rules.Again:
        """Send ``blocks`` (None: the prompt is open already) and drive it to the end of this turn.

        ``before_frame`` is called at the claim, with no await between it and the frame. ``Again``: the turn goes on
        with another agent; only one with the agent session of an earlier process comes to that.
        """
        self._before_frame = before_frame
        if blocks is not None:
            self.live.take()  # what came until now was said to an earlier prompt
            self._behind_cancel = self.live.cancelled and self.live.answers_twice
            self.live.cancelled = False
        self.live.inbox.on_items = self._wake
        if blocks is not None:
            self._blocks = blocks
        self.feed(rules.Prepared(resumed=blocks is None, loaded=self.live.loaded))
        try:
            return await self._loop()
        finally:
            self.live.inbox.on_items = None
            if self._alarm is not None:
                self._alarm.cancel()

    async def _loop(self) -> rules.End | rules.Again:
        items: deque[Item] = deque(self.live.held)
        self.live.held.clear()
        while True:
            while self._todo:
                await self._perform(self._todo.popleft())
            if self._end is not None:
                for item in (*items, *self.live.inbox.drain()):
                    self.live.drop(item)
                return self._end
            if not items:
                items.extend(self.live.inbox.drain())
            if items:
                self._last_item = self._clock.monotonic()
                await self._item(items.popleft())
                continue
            if not (self._rang and self._due()):
                await self._wait()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        self._rang = False
        self._arm(loop)
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ring at the next deadline at the latest; a limit that starts now cannot end before the shortest one."""
        alarm = self._alarm.when() if self._alarm is not None else None
        plain = self.machine.phase is TurnPhase.PROMPTING and not self.questions and not self._timers
        if plain and alarm is not None and alarm <= self._clock.monotonic() + self._shortest:
            return
        at = self._next_due()
        if at is None or (alarm is not None and alarm <= at):
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = loop.call_at(at, self._ring)

    def _ring(self) -> None:
        self._alarm, self._rang = None, True
        self._wake()

    # -- effects -----------------------------------------------------------------------------------------------------

    async def _perform(self, effect: rules.Effect) -> None:
        match effect:
            case rules.SendFrame():
                self._send_frame()
            case rules.CancelQuestions():
                self.questions.close_all(self._cause())
            case rules.CloseTools(status):
                self._tools.close(status)
            case rules.SendCancel():
                self._send_cancel()
            case rules.After(timer, seconds):
                wait = self._tuning.settle_seconds if seconds is None else seconds
                self._timers[timer] = self._clock.monotonic() + wait
            case rules.KillTurn():
                await self._kill(REAP_SECONDS)
            case rules.Reap():
                self.feed(rules.Reaped(await self._kill(REAP_SECONDS)))
            case rules.Again():
                self._end = effect
            case rules.End():
                self._finish(effect)

    def _cause(self) -> Cause:
        """Why the open questions are closed: a Stop, an agent that is gone, or one that went on without them."""
        if self.machine.stop is not None:
            return Cause.STOPPED
        gone = any(isinstance(effect, rules.End) and effect.settled is False for effect in self._todo)
        return Cause.LOST if gone else Cause.ENDED

    def _send_frame(self) -> None:
        self._before_frame()
        self._prompted_at = self._clock.monotonic()
        try:
            self.live.prompt_request = self.live.connection.prompt(self.live.agent_session_id, self._blocks)
        except ConnectionError:
            self.feed(rules.AgentGone(self.live.connection.exit_error()))

    def _send_cancel(self) -> None:
        self.live.cancelled = True
        try:
            self.live.connection.cancel(self.live.agent_session_id)
        except ConnectionError:
            self.feed(rules.CancelUnsent())

    async def _kill(self, seconds: float) -> bool:
        try:
            reaped = await self.live.sandbox.kill_turn(self.live.mark_id, seconds)
        except RunnerError as error:
            log.warning("the turn's processes could not be reaped: %s", error)
            return True
        return bool(reaped.survivors)

    def _finish(self, end: rules.End) -> None:
        if end.outcome is Outcome.PAUSED:
            self._tools.defer()
        else:
            self.live.prompt_request = None if end.settled in (True, None) else self.live.prompt_request
        self.journal.close_block()
        self._end = end

    # -- what the agent says -----------------------------------------------------------------------------------------

    async def _item(self, item: Item) -> None:
        match item:
            case Updates():
                self._updates(item.updates)
            case PermissionAsked() | ElicitationAsked():
                await self._question(item)
            case PermissionWithdrawn():
                self.questions.withdrawn(item)
            case ElicitationCompleted():
                self.questions.completed(item)
                self.journal.event(EventType.NOTICE, {"kind": "elicitation_complete", "id": item.elicitation_id})
            case PromptAnswered():
                self._prompt_answered(item)
            case Closed():
                self.live.exited = True
                unread = bool(self._blocks) and self.live.connection.counts.get("unsent_bytes", 0) > 0
                error = gone(item.error, cut=unread, updated=self.first_update_at is not None)
                self.feed(rules.AgentGone(error))

    def _prompt_answered(self, item: PromptAnswered) -> None:
        if item.request_id != self.live.prompt_request:
            return
        result = item.result if isinstance(item.result, dict) else {}
        if self._is_stale(item, bool(result.get("usage"))):
            self._send_frame()
            return
        self._meter.answered(result.get("usage"))
        code, message = (item.error.code, item.error.message) if item.error is not None else (None, "")
        self.journal.close_block()
        self.feed(rules.Answered(updates.stop_reason(result), code, message))

    def _is_stale(self, item: PromptAnswered, usage: bool) -> bool:
        behind, self._behind_cancel = self._behind_cancel, False
        return stale(
            behind_cancel=behind,
            stopping=self.machine.stopping,
            updated=self.first_update_at is not None,
            usage=usage,
            error=item.error is not None,
        )

    def _updates(self, batch: list[dict[str, Any]]) -> None:
        if self.first_update_at is None and any(update.get("sessionUpdate") not in INFO for update in batch):
            self.first_update_at = self._clock.monotonic()
        for kind, given, payload in updates.grouped(batch):
            if kind in ("message", "thought"):
                if self.journal.texts(kind, given, payload) and kind == "message":
                    self.machine.output = True
            elif kind == "tool":
                self.machine.output = True
                self._tools.report(payload)
            else:
                if kind == EventType.USAGE:
                    self._meter.told(payload, self.live.spent)
                elif kind == EventType.SESSION_INFO:
                    self.live.learn(payload)
                self.journal.event(EventType(kind), payload)

    async def _question(self, item: Asked) -> None:
        if self.machine.stop is not None:
            kind = desk.PERMISSION if isinstance(item, PermissionAsked) else desk.ELICITATION
            self.questions.reply(item.key, desk.cancel(kind))
            return
        if self.first_update_at is None:
            self.first_update_at = self._clock.monotonic()
        fields = updates.tool_of(item.params.get("toolCall"))
        tool = self._tools.report(fields) if fields is not None else tool_of(self.live, item)
        self.machine.output = self.machine.output or fields is not None
        denied = self.questions.settle(item, tool, self._policy)
        if denied is not None:
            self.machine.denied = self.machine.denied or denied
            return
        row = self.questions.draft(item, tool)
        await self._save_question(row)
        self.questions.show(row, item, tool)
        if self.machine.stopping:
            self.questions.close_all(Cause.STOPPED)

    # -- time --------------------------------------------------------------------------------------------------------

    def _due(self) -> bool:
        """Feed what is due by now; whether anything was."""
        now = self._clock.monotonic()
        for timer, at in list(self._timers.items()):
            if at <= now:
                del self._timers[timer]
                self.feed(rules.Fired(timer))
                return True
        if self.machine.phase is not TurnPhase.PROMPTING:
            return False
        quiet_at = self._pause_at()
        if quiet_at is not None and quiet_at <= now:
            self.feed(rules.Quiet())
            return True
        due = first_due(self._limits, self._progress())
        if due is not None and due.at <= now:
            self.feed(rules.LimitReached(RunnerError(due.code, due.message)))
            return True
        return False

    def _next_due(self) -> float | None:
        moments = list(self._timers.values())
        if self.machine.phase is TurnPhase.PROMPTING:
            quiet_at = self._pause_at()
            if quiet_at is not None:
                moments.append(quiet_at)
            due = first_due(self._limits, self._progress())
            if due is not None:
                moments.append(due.at)
        return min(moments, default=None)

    def _pause_at(self) -> float | None:
        if not self.questions or self._tools.running(self.questions.waiting):
            return None
        return self._last_item + self._tuning.pause_quiet_seconds

    def _progress(self) -> Progress:
        running = self._tools.running(self.questions.waiting)
        return Progress(
            started_at=self._started_at,
            prompted_at=self._prompted_at,
            last_life=max(self.live.connection.last_activity, self._last_item if self.machine.output else 0.0),
            updated=self.first_update_at is not None,
            output=self.machine.output,
            tools=[(tool.started_at, str(tool.data.get("title"))) for tool in running],
            open_tools=self._tools.open,
            asking=bool(self.questions),
        )
