"""How a turn gets its agent: the paused one, the warm one, or a new one (DESIGN 3.2, 3.5)."""

from __future__ import annotations

import asyncio
from typing import Final

from runner.errors import RunnerError, turn_in_use
from runner.rules import turn as rules
from runner.rules.pool import Cold, Full, Hit
from runner.rules.reuse import reuse_verdict
from runner.session import chain
from runner.session.context import TurnContext
from runner.session.prompts import Prompt
from runner.session.session import Paused
from runner.terms import PromptState, StopReason, TurnPhase
from runner.turn.driver import Driver
from runner.turn.live import LiveSeat

MARK_SECONDS: Final = 3.0


class Seating:
    """Finds or makes the seat of one turn; can be given up at any moment."""

    def __init__(self, turn: TurnContext) -> None:
        self._turn = turn
        self._starting: asyncio.Task[LiveSeat | RunnerError] | None = None
        self._withdrawing: Driver | None = None

    def give_up(self, reason: StopReason) -> None:
        """The turn is stopping: undo a start under way; a withdrawal under way only gives way to a kill."""
        if self._starting is not None:
            self._starting.cancel()
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
            return self._reclaim(turn.resumes)
        live = await self._withdraw(turn.session.paused) if turn.session.paused is not None else None
        if live is None:
            live = await self._check_out()
        turn.live = live
        await turn.services.provisioner.apply(live, turn.effective)
        if live.mark_id != turn.turn_id:
            live.mark(turn.turn_id)
        await live.marked(MARK_SECONDS)
        return live

    def _reclaim(self, paused: Paused) -> LiveSeat:
        turn = self._turn
        seat = turn.services.pool.book.claim_paused(turn.session.key, turn.turn_id)
        turn.session.paused = None
        if seat is None or seat is not paused.live.seat:
            raise RunnerError("sandbox_lost", "The sandbox that waited for an answer is gone.")
        paused.live.take()
        turn.live, turn.start, turn.reason = paused.live, "hit", "hit"
        return paused.live

    async def _withdraw(self, paused: Paused) -> LiveSeat | None:
        """Settle the paused chain before a new prompt is sent; its agent if it may serve, else None (DESIGN 3.2)."""
        turn = self._turn
        live = self._reclaim(paused)
        machine = rules.Turn(resumes=True, phase=TurnPhase.PREPARING, stop=StopReason.NEW_PROMPT)
        driver = self._withdrawing = turn.new_driver(live, machine)
        driver.questions.open.update(paused.questions)
        end = await driver.run(None, lambda: None)
        self._withdrawing = None
        turn.closed += driver.questions.closed
        turn.journal.forget_text()
        self._end_withdrawn(paused.prompt)
        expiry, now_ms = turn.effective.secrets_expire_ms, turn.services.clock.now_ms()
        verdict = reuse_verdict(live.seat.facets, self._facets(), expiry, now_ms)
        if end.settled and not end.survivors and live.alive and verdict is None:
            return live
        turn.services.pool.destroy(live.seat, verdict or ("survivors" if end.survivors else "not_settled"))
        turn.live = None
        return None

    def _end_withdrawn(self, prompt: Prompt | None) -> None:
        if prompt is None:
            return
        session = self._turn.session
        chain.end_prompt(session, session.journal(None, prompt.prompt_id), prompt, PromptState.ABORTED)

    def _facets(self) -> dict[str, str]:
        session, effective = self._turn.session, self._turn.effective
        if session.facets is None or session.facets[0] is not effective:
            session.facets = (effective, self._turn.services.provisioner.facets(effective))
        return session.facets[1]

    async def _check_out(self) -> LiveSeat:
        turn, services = self._turn, self._turn.services
        decision = services.pool.book.checkout(
            turn.session.key,
            services.ids.mint("seat"),
            turn.effective.provider,
            self._facets(),
            services.clock.monotonic(),
            services.clock.now_ms(),
            turn.effective.secrets_expire_ms,
            turn.turn_id,
        )
        match decision:
            case Hit():
                live = services.pool.live(turn.session.key)
                assert live is not None
                live.take()
                turn.start, turn.reason = "hit", "hit"
                return live
            case Cold():
                return await self._start_cold(decision)
            case Full():
                raise RunnerError("provider_at_capacity", "Every sandbox seat is busy; try again later.")
            case _:
                raise turn_in_use()

    async def _start_cold(self, cold: Cold) -> LiveSeat:
        turn = self._turn
        turn.start, turn.reason = "cold", cold.reason
        turn.context_lost = bool(turn.session.agent_state.get("has_context"))
        turn.services.pool.clear(cold)
        turn.environment("starting")
        self._starting = turn.services.tasks.spawn(f"start {turn.turn_id}", self._cold(cold))
        try:
            live = await self._starting
        finally:
            self._starting = None
            if turn.live is None:
                # A task that is cancelled before its first step runs none of its own clean-up.
                turn.services.pool.discard(cold.seat, "start_given_up")
        if isinstance(live, RunnerError):
            raise live
        return live

    async def _cold(self, cold: Cold) -> LiveSeat | RunnerError:
        """A failure is a value: this task's only reader turns it into the turn's ending."""
        turn, pool = self._turn, self._turn.services.pool
        try:
            if not await pool.make_room(cold):
                raise RunnerError("provider_at_capacity", "A sandbox that must make room is still being torn down.")
            live = await turn.services.provisioner.start(cold.seat, turn.effective)
        except RunnerError as error:
            pool.discard(cold.seat, error.code)
            return error
        except BaseException:
            pool.discard(cold.seat, "start_given_up")
            raise
        pool.attach(live)
        live.take()
        turn.live = live
        return live
