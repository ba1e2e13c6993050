"""The supervisor of one turn: a task that belongs to no request (DESIGN 3.1, 3.2)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from runner.errors import RunnerError
from runner.interactions import desk
from runner.rules import turn as rules
from runner.rules.interaction import Cause
from runner.rules.limits import SENTENCES
from runner.rules.prompts import Move
from runner.rules.unfinished import CHAIN_RESUMED
from runner.session import chain
from runner.session.admit import Overtaken, admit
from runner.session.closing import close_turn, move_of
from runner.session.context import TurnContext
from runner.session.effective import Effective
from runner.session.ending import Times
from runner.session.issued import Issued
from runner.session.prompts import Prompt
from runner.session.seating import Seating
from runner.session.services import Answering, Services
from runner.session.session import Paused, Session
from runner.store.port import InteractionRow
from runner.terms import EventType, Outcome, StopReason, TurnPhase
from runner.terms import Start as How
from runner.turn.driver import Driver
from runner.turn.live import LiveSeat

log = logging.getLogger("runner.session")


class TurnRun:
    """One turn from its first beat to its result line; requests only watch it.

    Attributes:
        admitted: True or False once the first heartbeat was answered, or the error that prevented an answer.
        ended: done when the result is there.
        based_on: the session's configuration when the turn was dispatched.
    """

    def __init__(
        self,
        services: Services,
        session: Session,
        *,
        turn_id: str,
        prompt: Prompt | None,
        effective: Effective,
        merge: Callable[[Effective], Effective] = lambda last: last,
        batch: list[Prompt] | None = None,
        predecessor: str | None = None,
        resumes: Paused | None = None,
        answers: tuple[Answering, ...] = (),
    ) -> None:
        loop = asyncio.get_running_loop()
        self.turn_id = turn_id
        self.prompt = prompt
        self.machine = rules.Turn(resumes=resumes is not None, story=services.stories.turn(session.key, turn_id))
        self.admitted: asyncio.Future[bool] = loop.create_future()
        self.ended: asyncio.Future[rules.End] = loop.create_future()
        self._turn = TurnContext(
            services=services,
            session=session,
            turn_id=turn_id,
            prompt=prompt,
            effective=effective,
            merge=merge,
            batch=batch if batch is not None else [prompt] if prompt is not None else [],
            predecessor=predecessor,
            resumes=resumes,
            machine=self.machine,
            journal=session.journal(turn_id, prompt.prompt_id if prompt is not None else None),
            times=Times(services.clock.monotonic()),
            started_ms=services.clock.now_ms(),
        )
        self._seating = Seating(self._turn)
        self.based_on = session.effective
        self._answers = list(answers)
        self._answerable: asyncio.Future[None] = loop.create_future()
        self._pausing = False
        self._said = False
        self._blocks: list[dict[str, Any]] | None = None
        self._words: list[dict[str, Any]] = []

    @classmethod
    def resuming(
        cls, services: Services, session: Session, paused: Paused, answers: tuple[Answering, ...] = ()
    ) -> TurnRun:
        """A turn that goes on with a paused chain, as the session is configured now."""
        return cls(
            services,
            session,
            turn_id=services.ids.mint("turn"),
            prompt=paused.prompt,
            effective=session.effective,
            resumes=paused,
            answers=answers,
        )

    @property
    def live(self) -> LiveSeat | None:
        """The seat it holds."""
        return self._turn.live

    @property
    def pausing(self) -> bool:
        """Whether it has ended as paused but its chain cannot be resumed yet: the ending is on its way."""
        return self._pausing and not self.ended.done()

    @property
    def is_admitted(self) -> bool:
        """Whether it became a turn."""
        done = self.admitted.done() and not self.admitted.cancelled()
        return done and self.admitted.exception() is None and self.admitted.result()

    @property
    def begun(self) -> float:
        """When it was dispatched, loop time."""
        return self._turn.times.begun

    @property
    def sandbox_seconds(self) -> float:
        """How long it had a sandbox, as far as that is counted."""
        return self._turn.meter.sandbox_seconds

    @property
    def commands(self) -> list[Issued]:
        """The commands that its ending settles."""
        return self._turn.commands

    def stop(self, reason: StopReason, error: RunnerError | None = None, command: Issued | None = None) -> bool:
        """Mark the turn stopping, for ``command``; False when it already has its ending (the Stop is obsolete)."""
        if self.machine.phase is TurnPhase.ENDED:
            return False
        if command is not None:
            self._turn.commands.append(command)
        if self._turn.driver is not None:
            self._turn.driver.stop(reason, error)
            return True
        self._early(rules.Stop(reason, error), reason)
        return True

    def _early(self, event: rules.Event, reason: StopReason) -> None:
        """A Stop or limit that comes before the agent is driven: undo a start under way."""
        effects = rules.step(self.machine, event)
        if any(isinstance(effect, rules.AbortPreparation) for effect in effects):
            self._seating.give_up(reason)

    def answer(self, answering: Answering) -> bool:
        """Give a human's answer to the agent, now or when it asks for it; False when nobody waits for it here."""
        driver = self._turn.driver
        if self.machine.phase is TurnPhase.ENDED:
            return False
        if driver is None and self._turn.resumes is not None:
            self._answers.append(answering)
            return True
        return driver is not None and driver.answer(answering.row, answering.given) is not None

    def offer(self, interaction_id: str) -> desk.Offer | None:
        """What a question that this turn holds can be answered with."""
        asked = self._turn.live.questions.get(interaction_id) if self._turn.live is not None else None
        if asked is not None:
            return asked.offer
        held = next((row for row in self.questions if row.interaction_id == interaction_id), None)
        return desk.stored_offer(held) if held is not None else None

    def expire(self, now_ms: int) -> None:
        """Refuse what nobody answered in time."""
        if self._turn.driver is not None and self.machine.phase is not TurnPhase.ENDED:
            self._turn.driver.expire(now_ms)

    async def took(self, interaction_id: str) -> bool:
        """Wait until the agent was handed this answer; False when its question was closed or the turn ended instead."""
        await self._first_of(self._answerable)
        if self._turn.driver is None:
            return False
        taken = self._turn.driver.questions.taken(interaction_id)
        await self._first_of(taken)
        return taken.done() and taken.result()

    async def _first_of(self, waited: asyncio.Future[Any]) -> None:
        waits: set[asyncio.Future[Any]] = {waited, self.ended}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)

    @property
    def questions(self) -> list[InteractionRow]:
        """Questions that it holds: pending ones, and answered ones that the agent must ask for again."""
        if self._turn.driver is not None:
            return list(self._turn.driver.questions.open.values())
        return list(self._turn.resumes.questions.values()) if self._turn.resumes is not None else []

    # -- the turn ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """The whole turn. Never raises; whatever happens, ``admitted`` and, if admitted, ``ended`` get done."""
        try:
            admitted = await admit(self, self._turn)
        except Exception as error:
            self._not_admitted(error)
            return
        if not admitted:
            self._not_started()
        self.admitted.set_result(admitted)
        if not admitted:
            return
        try:
            end = await self._drive()
        except Exception:
            log.exception("turn %s failed inside the runner", self.turn_id)
            end = rules.End(Outcome.FAILED, settled=False, error=RunnerError("internal", "The runner failed."))
            self.machine.phase = TurnPhase.ENDED
        self._pausing = end.outcome is Outcome.PAUSED
        self._no_card_left(end)
        end, result = await close_turn(self._turn, end)
        self._pausing = end.outcome is Outcome.PAUSED
        self._over(end, result)

    def _not_started(self) -> None:
        queue = self._turn.session.queue
        if queue.run is self:
            queue.not_started()

    def _not_admitted(self, error: Exception) -> None:
        if not isinstance(error, (RunnerError, Overtaken)):
            log.error("turn %s could not be admitted", self.turn_id, exc_info=error)
            error = RunnerError("internal", "The runner failed before the turn was admitted.")
        self._not_started()
        if not self.admitted.done():
            self.admitted.set_exception(error)
            self.admitted.exception()

    async def _drive(self) -> rules.End:
        stale, self._turn.session.stale = self._turn.session.stale, []
        self._turn.closed += chain.close_questions(self._turn.journal, stale, Cause.LOST)
        first = rules.step(self.machine, rules.Begin())[-1]
        if isinstance(first, rules.End):
            # Stopped before it began: the chain that it took the session from may not go on all the same.
            await self._seating.withdraw()
            return first
        earlier: Driver | None = None
        while True:
            live = await self._seated()
            end = await self._driven(live, earlier) if isinstance(live, LiveSeat) else live
            if isinstance(end, rules.End):
                return end
            earlier = self._turn.driver
            self._seating.again()

    async def _seated(self) -> LiveSeat | rules.End:
        alarm = self._total_alarm()
        try:
            return await self._seating.prepare()
        except RunnerError as error:
            return self._not_prepared(error)
        except asyncio.CancelledError:
            if self.machine.stop is None:
                raise
            return self._not_prepared(RunnerError("internal", "The start was given up."))
        finally:
            if alarm is not None:
                alarm.cancel()

    async def _driven(self, live: LiveSeat, earlier: Driver | None) -> rules.End | rules.Again:
        turn = self._turn
        turn.times.ready = turn.services.clock.monotonic()
        if not turn.reclaimed:
            turn.environment("ready")
        driver = turn.driver = turn.new_driver(live, self.machine)
        if earlier is not None:
            driver.questions.inherit(earlier.questions)
        elif turn.resumes is not None:
            driver.questions.open.update(turn.resumes.questions)
        if turn.resumes is not None:
            self.machine.output = bool(live.tools)
        self._give(driver)
        if not self._answerable.done():
            self._answerable.set_result(None)
        blocks = None if turn.reclaimed else self._claim()
        if blocks == []:
            driver.stop(StopReason.ABORT_PROMPT)
        try:
            end = await driver.run(blocks, self._claimed)
        finally:
            turn.closed += driver.questions.closed
            turn.times.first_update = driver.first_update_at
        if isinstance(end, rules.End) and end.settled and end.outcome in (Outcome.COMPLETED, Outcome.CANCELLED):
            turn.agent_answered(live)
        return end

    def _give(self, driver: Driver) -> None:
        """The answers that came before the agent was there; one that does not fit what it offers is given back."""
        for answering in self._answers:
            try:
                driver.answer(answering.row, answering.given)
            except RunnerError as error:
                self._turn.session.outbox.questions([desk.unclaimed(answering.row, error.message)])

    def _total_alarm(self) -> asyncio.TimerHandle | None:
        """The total limit counts from the dispatch; the driver only minds it once the agent is there."""
        seconds = self._turn.effective.limits.total_seconds
        if seconds is None:
            return None
        error = RunnerError("limit_total", SENTENCES["limit_total"].format(seconds=seconds))
        event = rules.LimitReached(error)
        at = self._turn.times.begun + seconds
        return asyncio.get_running_loop().call_at(at, self._early, event, StopReason.LIMIT)

    def _not_prepared(self, error: RunnerError) -> rules.End:
        end = rules.step(self.machine, rules.PrepareFailed(error))[-1]
        assert isinstance(end, rules.End)
        return end

    def _claim(self) -> list[dict[str, Any]]:
        """What the frame carries, decided with no await before it is written; nothing when all of it was cancelled."""
        turn, queue = self._turn, self._turn.session.queue
        if turn.resumes is not None:
            return chain.continuation(turn.prompt, turn.preface, loaded=turn.start in (How.RESUMED, How.WOKEN))
        if self._blocks is None:
            words = self._content()
            if words is None:
                return []
            self._words = words
            self._blocks = [*queue.deliver(turn.turn_id, again=turn.context_lost), *words]
        return [*chain.text_block(turn.preface), *self._blocks]

    def _content(self) -> list[dict[str, Any]] | None:
        """The claim: the blocks of the prompts that the turn answers; None when all of them were cancelled."""
        turn = self._turn
        turn.claimed = turn.session.queue.claim()
        if not turn.claimed:
            return None
        self._own(turn.claimed[-1])
        return [block for prompt in turn.claimed for block in prompt.content]

    def _own(self, owner: Prompt) -> None:
        """The turn answers this prompt; it may be another than the one that looked like it when the batch was read."""
        self.prompt = self._turn.prompt = owner
        self._turn.journal.of_prompt(owner.prompt_id)

    def _claimed(self) -> None:
        turn, session = self._turn, self._turn.session
        if turn.resumes is not None:
            turn.journal.event(EventType.NOTICE, {"kind": CHAIN_RESUMED, "start": turn.start})
        elif not self._said:
            turn.journal.event(EventType.USER_MESSAGE, {"content": self._words})
        self._said = True
        if turn.live is not None:
            turn.live.preface = None
        news = turn.remember_agent()
        if turn.resumes is not None or not session.agent_state.get("has_context"):
            # The first frame of a session or of a cold chain is known at once: what a killed runner leaves tells of it.
            session.outbox.flush_soon()
        if news:
            turn.services.tasks.spawn(f"agent of {self.turn_id}", session.save_agent())

    def _no_card_left(self, end: rules.End) -> None:
        """A chain that goes on keeps its questions, every other ending closes them; unused answers come back."""
        turn = self._turn
        if end.outcome is not Outcome.PAUSED:
            cause = Cause.STOPPED if end.label is not None else Cause.ENDED
            now_ms = turn.services.clock.now_ms()
            turn.closed += chain.close_left(turn.journal, self.questions, cause, now_ms)
        elif turn.driver is None and turn.resumes is not None and end.error is not None:
            given = [answering.row for answering in self._answers]
            back = chain.give_back(turn.journal, given, end.error.message)
            turn.resumes.questions.update({row.interaction_id: row for row in back})
            turn.closed += back

    def _over(self, end: rules.End, result: dict[str, Any]) -> None:
        """What waits starts, or the session is idle; then the result line, and whoever waits for the turn."""
        turn, session = self._turn, self._turn.session
        session.current = None
        if end.outcome is Outcome.PAUSED:
            session.queue.turn_paused(self.prompt)
        elif end.label is StopReason.LEASE_LOST:
            session.queue.lost()
        else:
            move = Move.CANCEL if turn.given_back else move_of(end, turn.machine.frame_sent or turn.resumes is not None)
            session.queue.turn_over(move, self.turn_id if turn.hands_over else None, end.error)
        if self.prompt is not None and not self.prompt.result.done():
            self.prompt.result.set_result(result)
            session.log.wake()
        self.ended.set_result(end)
        if end.outcome is Outcome.PAUSED:
            turn.services.on_paused(session)


Start = Callable[[Session, TurnRun], None]
"""Gives a turn its own supervisor task."""
