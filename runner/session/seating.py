"""How a turn gets its agent: the paused one, the warm one, or a new one (DESIGN 3.2, 3.5)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from runner.errors import RunnerError, turn_in_use
from runner.rules import turn as rules
from runner.rules.interaction import Cause
from runner.rules.pool import Cold, Full, Hit
from runner.rules.prompts import Move
from runner.rules.resume import AgentSession, failures_of, obstacle
from runner.rules.reuse import reuse_verdict
from runner.rules.usage import spent_of
from runner.session import chain, spares, usage
from runner.session.context import TurnContext
from runner.session.live_settings import apply
from runner.session.opening import ResumeStuck
from runner.session.prompts import Prompt
from runner.session.session import Paused
from runner.session.transcript import rebuilt
from runner.terms import EventType, PromptState, Start, StopReason, TurnPhase
from runner.turn.driver import Driver
from runner.turn.live import LiveSeat

MARK_SECONDS: Final = 3.0
NEW_AGENT: Final = "The agent starts without its own memory of this session; it is told what was said."
LIVE_SETTINGS: Final = ("mode", "model", "config_options")


class Seating:
    """Finds or makes the seat of one turn; can be given up at any moment."""

    def __init__(self, turn: TurnContext) -> None:
        self._turn = turn
        self._under_way: asyncio.Task[Any] | None = None
        self._withdrawing: Driver | None = None
        self._may_resume = True

    def give_up(self, reason: StopReason) -> None:
        """The turn is stopping: undo a start under way; a withdrawal under way only gives way to a kill."""
        if self._under_way is not None:
            self._under_way.cancel()
        if self._withdrawing is not None and not reason.cooperative:
            self._withdrawing.stop(reason)

    async def prepare(self) -> LiveSeat:
        """A live seat, its agent set as the turn wants it and marked.

        Raises:
            RunnerError: why there is none.
            asyncio.CancelledError: it was given up.
        """
        turn = self._turn
        if turn.resumes is not None:
            held = self._reclaim(turn.resumes)
            if held is not None:
                return held
        live = await self.withdraw()
        if turn.machine.stop is None:
            live = turn.live = live or await self._check_out()
            await self._apply(live)
        if turn.machine.stop is not None or live is None:
            raise RunnerError("internal", "The start was given up.")
        if live.mark_id != turn.turn_id:
            live.mark(turn.turn_id)
        await live.marked(MARK_SECONDS)
        return live

    async def _apply(self, live: LiveSeat) -> None:
        """Settings that are given up half-way leave an agent of which nobody knows what is in force."""
        turn = self._turn
        if not any(turn.effective.config.get(name) for name in LIVE_SETTINGS):
            return
        turn.unsure = True
        task = turn.services.tasks.spawn(f"apply {turn.turn_id}", self._applied(live))
        self._under_way = task
        try:
            error = await task
        finally:
            self._under_way = None
        if error is not None:
            raise error
        turn.unsure = False

    async def _applied(self, live: LiveSeat) -> RunnerError | None:
        try:
            await apply(live, self._turn.effective)
        except RunnerError as error:
            return error
        return None

    def _claim(self, paused: Paused) -> LiveSeat | None:
        """The seat of a paused chain; None when it is gone, and the chain cold."""
        turn, live = self._turn, paused.live
        turn.session.paused = None
        if live is None:
            return None
        seat = turn.services.pool.book.claim_paused(turn.session.key, turn.turn_id)
        if seat is None or seat is not live.seat:
            return None
        if live.lost():
            turn.services.pool.destroy(seat, "agent_exited")
            return None
        live.take()
        usage.takes(turn, live)
        turn.live, turn.start, turn.reason = live, "hit", "hit"
        return live

    def _reclaim(self, paused: Paused) -> LiveSeat | None:
        """The agent that holds the chain's prompt open; None when it is gone: then one is started like any other."""
        turn = self._turn
        live = self._claim(paused)
        if live is None:
            chain.close_tools(turn.journal, paused)
            paused.live = None
            rules.step(turn.machine, rules.ChainCold())
        turn.reclaimed = live is not None
        return live

    async def withdraw(self) -> LiveSeat | None:
        """Settle a paused chain before a new prompt is sent; its agent if it may serve, else None (DESIGN 3.2).

        What the agent says until then belongs to the former prompt. A cold chain has nobody to settle.
        """
        turn = self._turn
        paused = turn.session.paused
        if paused is None:
            return None
        pen = turn.session.journal(turn.turn_id, paused.prompt.prompt_id if paused.prompt is not None else None)
        live = self._claim(paused)
        if live is None:
            chain.close_tools(pen, paused)
            turn.closed += chain.close_questions(pen, paused.questions.values(), Cause.WITHDRAWN)
            self._end_withdrawn(paused.prompt, PromptState.ABORTED)
            return None
        reason = turn.machine.stop or StopReason.NEW_PROMPT
        story = turn.services.stories.turn(turn.session.key, f"{paused.turn_id}-withdrawn")
        machine = rules.Turn(resumes=True, phase=TurnPhase.PREPARING, stop=reason, story=story)
        driver = self._withdrawing = turn.new_driver(live, machine, pen)
        driver.questions.open.update(paused.questions)
        end = await driver.run(None, lambda: None)
        assert isinstance(end, rules.End)
        self._withdrawing = None
        turn.closed += driver.questions.closed
        self._end_withdrawn(paused.prompt, PromptState.ABORTED)
        expiry, now_ms = self._expires_ms(), turn.services.clock.now_ms()
        verdict = reuse_verdict(live.seat.facets, turn.facets(), expiry, now_ms)
        if end.settled and not end.survivors and live.alive and verdict is None:
            return live
        turn.services.pool.destroy(live.seat, verdict or ("survivors" if end.survivors else "not_settled"))
        turn.live = None
        return None

    def _end_withdrawn(self, prompt: Prompt | None, state: PromptState) -> None:
        if prompt is not None:
            session = self._turn.session
            chain.end_prompt(session, session.journal(None, prompt.prompt_id), prompt, state)
        self._turn.session.queue.chain_ended(Move.FAIL if state is PromptState.FAILED else Move.ABORT)

    def _expires_ms(self) -> int | None:
        return self._turn.services.provisioner.expires_ms(self._turn.session.key, self._turn.effective)

    async def _check_out(self) -> LiveSeat:
        turn, services = self._turn, self._turn.services
        spare = turn.live
        if spare is not None:
            # It was claimed with the admission, which may have taken a while.
            if not spare.lost():
                return spare
            turn.live = None
            services.pool.destroy(spare.seat, "agent_exited")
        decision = services.pool.book.checkout(
            turn.session.key,
            services.ids.mint("seat"),
            turn.effective.provider,
            self._turn.facets(),
            services.clock.monotonic(),
            services.clock.now_ms(),
            self._expires_ms(),
            turn.turn_id,
        )
        match decision:
            case Hit():
                live = services.pool.live(turn.session.key)
                assert live is not None
                live.take()
                usage.takes(turn, live)
                turn.start, turn.reason = "hit", "hit"
                # Whoever started this agent sent it nothing: it knows no more than a new one.
                turn.preface, turn.context_lost = live.preface, live.preface is not None
                return live
            case Cold():
                return await self._start_cold(decision)
            case Full():
                raise RunnerError("provider_at_capacity", "Every sandbox seat is busy; try again later.")
            case _:
                raise turn_in_use()

    def again(self) -> None:
        """The resumed agent gave no sign: it goes, and ``prepare`` starts one that is told instead (case M7)."""
        turn, live = self._turn, self._turn.live
        assert live is not None
        turn.live = turn.driver = None
        self._resume_failed("the resumed agent gave no sign of life", surely=True)
        turn.services.pool.destroy(live.seat, "resume_silent")

    async def _start_cold(self, cold: Cold) -> LiveSeat:
        turn = self._turn
        turn.start, turn.reason = "cold", cold.reason
        turn.context_lost, turn.preface = bool(turn.session.agent_state.get("has_context")), None
        pool = turn.services.pool
        pool.clear(cold)
        turn.environment("starting")
        task = turn.services.tasks.spawn(f"start {turn.turn_id}", self._cold(cold))
        self._under_way = task
        spares.used(turn)
        try:
            live = await task
        except BaseException:
            # Not in the task: one that is given up before its first step never runs at all.
            pool.discard(cold.seat, "start_given_up")
            raise
        finally:
            self._under_way = None
        if isinstance(live, ResumeStuck):
            pool.discard(cold.seat, "resume_failed")
            self._resume_failed(str(live), surely=not live.empty)
            if turn.machine.stop is not None:
                raise RunnerError("internal", "The start was given up.")
            return await self._check_out()
        if isinstance(live, RunnerError):
            pool.discard(cold.seat, live.code)
            raise live
        turn.live = live
        return live

    async def _cold(self, cold: Cold) -> LiveSeat | RunnerError | ResumeStuck:
        """A failure is a value: this task's only reader turns it into the turn's ending."""
        turn, pool = self._turn, self._turn.services.pool
        provisioner = turn.services.provisioner
        try:
            if not await pool.make_room(cold):
                raise RunnerError("provider_at_capacity", "A sandbox that must make room is still being torn down.")
            why, known = await self._known() if turn.context_lost else (None, None)
            with usage.start(turn) as started:
                live = await provisioner.start(
                    cold.seat,
                    turn.session.place(turn.effective.provider),
                    turn.effective,
                    lambda sandbox, verdict: pool.abandon(cold.seat, sandbox, verdict),
                    known,
                )
                started(live)
        except (RunnerError, ResumeStuck) as error:
            return error
        pool.attach(live)
        self._mask(live.keys.tokens)
        live.take()
        await self._told(live, why)
        return live

    def _mask(self, tokens: Sequence[str]) -> None:
        """What stands for a key in the sandbox is shown to nobody either."""
        session = self._turn.session
        session.learn_secrets(tokens)
        self._turn.journal.redactor = session.redactor

    async def _known(self) -> tuple[str | None, AgentSession | None]:
        """The agent session to go on with, or why there is none (DESIGN 3.5)."""
        turn, provisioner = self._turn, self._turn.services.provisioner
        known = AgentSession.of(turn.session.agent_state.get("agent"))
        place = await provisioner.place(turn.session.place(turn.effective.provider), turn.effective)
        if not self._may_resume:
            return "resume_failed", None
        if place is None:
            return "home_lost", None
        why = obstacle(known, place, provisioner.catalogue.get(turn.effective.harness).resume)
        return why, known if why is None else None

    async def _told(self, live: LiveSeat, why: str | None) -> None:
        """What the new agent knows of the session: all of it, or what it will be told with the next prompt."""
        turn = self._turn
        if live.resume_failed is not None:
            why = "resume_failed"
            self._resume_failed(live.resume_failed, surely=False)
        known = AgentSession.of(turn.session.agent_state.get("agent"))
        if live.resumed:
            live.agent_session = known
            live.spent = spent_of(turn.session.agent_state.get("spent"))
            start = Start.WOKEN if live.sandbox.woken else Start.RESUMED
            turn.start, turn.context_lost = start.value, False
            live.seat.start = turn.start
            return
        if live.agent_session is not None:
            failures = failures_of(known, live.agent_session.place)
            live.agent_session = replace(live.agent_session, failures=failures)
        if turn.context_lost:
            turn.preface = await rebuilt(turn.services.store, turn.session, turn.turn_id)
            live.preface = turn.preface
            told = len(turn.preface.encode()) if turn.preface is not None else 0
            data = {"kind": "context_lost", "reason": why or "not_offered", "told_bytes": told, "message": NEW_AGENT}
            turn.journal.event(EventType.NOTICE, data)

    def _resume_failed(self, why: str, *, surely: bool) -> None:
        """Count and show it; this turn does not try again, and its session not for ever (case I6)."""
        self._may_resume = False
        turn = self._turn
        text = f"The agent's own memory of this session could not be loaded: {why}."
        turn.journal.event(EventType.NOTICE, {"kind": "resume_failed", "message": text})
        known = AgentSession.of(turn.session.agent_state.get("agent"))
        if known is not None:
            turn.session.agent_state["agent"] = known.failed(surely=surely).as_json()
