"""From an admitted turn to an agent that may be prompted: reclaimed, withdrawn, warm, or started cold (DESIGN 3.5)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from runner.errors import RunnerError, turn_in_use
from runner.rules import turn
from runner.rules.pool import Cold, Full, Hit
from runner.rules.reuse import reuse_verdict
from runner.sandbox.port import Mark
from runner.session import chain
from runner.session.effective import Effective
from runner.session.services import Services
from runner.session.session import Paused, Session
from runner.store.port import InteractionRow
from runner.terms import EventType, PromptState, StopReason, TurnPhase
from runner.turn.driver import Driver
from runner.turn.journal import Journal
from runner.turn.live import LiveSeat

MARK_SECONDS: Final = 3.0
LIVE_SETTINGS: Final = ("mode", "model", "config_options")

MakeDriver = Callable[[LiveSeat, turn.Turn, Journal], Driver]


def given_up() -> RunnerError:
    """A Stop came before the prompt was sent."""
    return RunnerError("internal", "The start was given up.")


class Preparation:
    """Gets one turn its agent.

    Attributes:
        live: the seat that the turn holds.
        start, reason: how it was got, and why it was not warm.
        context_lost: the agent remembers nothing although the session had a context.
        closed: questions of a former chain that were closed on the way.
        unsure: a setting was given up half-way: what is in force in the agent is not known.
    """

    def __init__(
        self,
        services: Services,
        session: Session,
        *,
        turn_id: str,
        effective: Effective,
        journal: Journal,
        machine: turn.Turn,
        resumes: Paused | None,
        make_driver: MakeDriver,
    ) -> None:
        self.live: LiveSeat | None = None
        self.start = "cold"
        self.reason = "miss"
        self.context_lost = False
        self.closed: list[InteractionRow] = []
        self.unsure = False
        self._services = services
        self._session = session
        self._turn_id = turn_id
        self._effective = effective
        self._journal = journal
        self._machine = machine
        self._resumes = resumes
        self._make_driver = make_driver
        self._begun = services.clock.monotonic()
        self._mark: Mark | None = None
        self._marked: LiveSeat | None = None
        self._task: asyncio.Task[object] | None = None
        self._withdrawing: Driver | None = None

    def begin_mark(self) -> None:
        """A warm agent is marked while the admission is being stored: the mark is set when the frame is due."""
        live = self._services.pool.warm(self._session.key)
        if live is not None and live.alive and self._resumes is None:
            self._marked, self._mark = live, live.sandbox.mark(self._turn_id)

    def give_up(self, reason: StopReason) -> None:
        """A Stop was marked: undo the start under way; a chain that is being withdrawn settles, or is dropped."""
        if self._task is not None:
            self._task.cancel()
        if self._withdrawing is not None and not reason.cooperative:
            self._withdrawing.stop(reason)

    async def run(self) -> LiveSeat:
        """The agent, marked and with its settings in force; it must be given up with ``give_up`` only.

        Raises:
            RunnerError: there is none; ``live`` is the seat that the turn holds all the same.
        """
        if self._resumes is not None:
            return self._reclaim(self._resumes)
        warm = await self.withdraw()
        self._check_stop()
        live = self.live = warm or await self._check_out()
        await self._apply(live)
        self._check_stop()
        if self._mark is None or self._marked is not live:
            self._mark = live.sandbox.mark(self._turn_id)
        await self._mark.set(MARK_SECONDS)
        live.mark_id = self._turn_id
        self.environment("ready")
        return live

    def environment(self, phase: str) -> None:
        """Tell how far the sandbox is."""
        elapsed = self._services.clock.monotonic() - self._begun
        data = {"phase": phase, "start": self.start, "reason": self.reason, "elapsed_ms": round(elapsed * 1000, 3)}
        self._journal.event(EventType.ENVIRONMENT, data)

    def _check_stop(self) -> None:
        if self._machine.stop is not None:
            raise given_up()

    # -- a paused chain ----------------------------------------------------------------------------------------------

    def _claim(self, paused: Paused) -> LiveSeat | None:
        """The seat of a paused chain, busy from now on; None when it was lost while this turn was being admitted."""
        seat = self._services.pool.book.claim_paused(self._session.key, self._turn_id)
        self._session.paused = None
        if seat is None or seat is not paused.live.seat:
            return None
        paused.live.take()
        self.live, self.start, self.reason = paused.live, "hit", "hit"
        return paused.live

    def _reclaim(self, paused: Paused) -> LiveSeat:
        live = self._claim(paused)
        if live is None:
            self.closed += chain.close_lost(self._journal, paused)
            raise chain.seat_error(self._services.pool.book.verdicts.get(self._session.key, "gone"))
        return live

    async def withdraw(self) -> LiveSeat | None:
        """Settle the paused chain before a new prompt is sent; the agent if it may serve, else None (DESIGN 3.2).

        What the agent still says belongs to the former prompt.
        """
        paused = self._session.paused
        if paused is None:
            return None
        pen = self._session.journal(self._turn_id, paused.prompt.prompt_id if paused.prompt is not None else None)
        live = self._claim(paused)
        if live is None:
            self.closed += chain.close_lost(pen, paused)
            self._end_former(paused, pen, PromptState.FAILED)
            return None
        machine = turn.Turn(resumes=True, phase=TurnPhase.PREPARING, stop=self._machine.stop or StopReason.NEW_PROMPT)
        driver = self._withdrawing = self._make_driver(live, machine, pen)
        driver.questions.open.update(paused.questions)
        end = await driver.run(None, lambda: None)
        self._withdrawing = None
        self.closed += driver.questions.closed
        self._end_former(paused, pen, PromptState.ABORTED)
        expiry, now_ms = self._effective.secrets_expire_ms, self._services.clock.now_ms()
        why = reuse_verdict(live.seat.facets, self._facets(), expiry, now_ms)
        if end.settled and not end.survivors and live.alive and why is None:
            return live
        self._services.pool.destroy(live.seat, why or ("survivors" if end.survivors else "not_settled"))
        self.live = None
        return None

    def _end_former(self, paused: Paused, pen: Journal, state: PromptState) -> None:
        if paused.prompt is not None:
            chain.end_prompt(self._session, pen, paused.prompt, state)

    # -- a seat of its own -------------------------------------------------------------------------------------------

    def _facets(self) -> dict[str, str]:
        cached = self._session.facets
        if cached is None or cached[0] is not self._effective:
            facets = self._services.provisioner.facets(self._effective)
            cached = self._session.facets = (self._effective, facets)
        return cached[1]

    async def _check_out(self) -> LiveSeat:
        services, session = self._services, self._session
        decision = services.pool.book.checkout(
            session.key,
            services.ids.mint("seat"),
            self._effective.provider,
            self._facets(),
            services.clock.monotonic(),
            services.clock.now_ms(),
            self._effective.secrets_expire_ms,
            self._turn_id,
        )
        match decision:
            case Hit(seat):
                live = services.pool.live(session.key)
                assert live is not None
                assert live.seat is seat
                live.take()
                self.start, self.reason = "hit", "hit"
                return live
            case Cold():
                return await self._start_cold(decision)
            case Full():
                raise RunnerError("provider_at_capacity", "Every sandbox seat is busy; try again later.")
            case _:
                raise turn_in_use()

    async def _start_cold(self, cold: Cold) -> LiveSeat:
        self.start, self.reason = "cold", cold.reason
        self.context_lost = bool(self._session.agent_state.get("has_context"))
        cold.seat.start = "cold"
        pool = self._services.pool
        pool.clear(cold)
        self.environment("starting")
        task = self._services.tasks.spawn(f"start {self._turn_id}", self._cold(cold))
        self._task = task
        try:
            return await task
        except BaseException as error:
            # Here and not in the task: one that is cancelled before its first step never runs at all.
            pool.discard(cold.seat, error.code if isinstance(error, RunnerError) else "start_given_up")
            raise
        finally:
            self._task = None

    async def _cold(self, cold: Cold) -> LiveSeat:
        pool = self._services.pool
        if not await pool.room(cold):
            raise RunnerError("provider_at_capacity", "A sandbox that must make room is still being torn down.")
        live = await self._services.provisioner.start(
            cold.seat, self._effective, lambda sandbox, verdict: pool.abandon(cold.seat, sandbox, verdict)
        )
        pool.attach(live)
        live.take()
        return live

    async def _apply(self, live: LiveSeat) -> None:
        if not any(self._effective.config.get(name) for name in LIVE_SETTINGS):
            return
        self.unsure = True
        task = self._services.tasks.spawn(f"apply {self._turn_id}", self._services.provisioner.apply(live, self._effective))
        self._task = task
        try:
            await task
        finally:
            self._task = None
        self.unsure = False
