"""The supervisor of one turn: beat, admission, sandbox, prompt, and the order at the end (DESIGN 3.1, 3.2)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from runner.clock import Clock
from runner.config import Settings
from runner.errors import RunnerError, turn_in_use
from runner.ids import Ids
from runner.interactions import desk
from runner.leases.heartbeat import Heartbeats
from runner.leases.port import BeatAnswer, Heartbeat, Phase
from runner.pool.pool import Pool
from runner.redaction import Redactor
from runner.rules import admission, permission, turn
from runner.rules.pool import Cold, Full, Hit
from runner.rules.reuse import Parked, Windows, after_ending, reuse_verdict
from runner.sandbox.port import Mark
from runner.session.effective import Effective
from runner.session.ending import Times, result_of
from runner.session.prompts import Prompt
from runner.session.provision import Provisioner
from runner.session.session import LastTurn, Paused, Session
from runner.store.port import Admission, Ending, InteractionRow, PromptRow, Store, TurnRow
from runner.tasks import Tasks
from runner.terms import EventType, InteractionStatus, Outcome, PromptState, StopReason, TurnPhase
from runner.turn.driver import Driver, Tuning
from runner.turn.journal import Journal
from runner.turn.live import LiveSeat

log = logging.getLogger("runner.session")
MARK_SECONDS: Final = 3.0
END_TRIES: Final = 3
END_RETRY_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True)
class Services:
    """What every turn of this replica uses."""

    replica_id: str
    clock: Clock
    ids: Ids
    store: Store
    beats: Heartbeats
    pool: Pool[LiveSeat]
    provisioner: Provisioner
    settings: Settings
    tasks: Tasks
    windows: Mapping[str, Windows]
    on_paused: Callable[[Session], None]


@dataclass(frozen=True, slots=True)
class Answering:
    """An answer that a resumed turn carries to its agent."""

    row: InteractionRow
    reply: permission.Reply
    denied: bool


class TurnRun:
    """One turn from its first beat to its result line. A task of its own; requests only watch it.

    Attributes:
        admitted: True or False once the first heartbeat was answered, or the error that prevented an answer.
        ended: done when the result is there.
    """

    def __init__(
        self,
        services: Services,
        session: Session,
        *,
        turn_id: str,
        prompt: Prompt | None,
        effective: Effective,
        resumes: Paused | None = None,
        answers: tuple[Answering, ...] = (),
    ) -> None:
        loop = asyncio.get_running_loop()
        self.session_id = session.session_id
        self.turn_id = turn_id
        self.prompt = prompt
        self.machine = turn.Turn(resumes=resumes is not None)
        self.admitted: asyncio.Future[bool] = loop.create_future()
        self.ended: asyncio.Future[turn.End] = loop.create_future()
        self.epoch = 0
        self.start = "cold"
        self.reason = "miss"
        self.context_lost = False
        self.live: LiveSeat | None = None
        self.driver: Driver | None = None
        self._services = services
        self._session = session
        self._effective = effective
        self._resumes = resumes
        self._answers = list(answers)
        self._closed: list[InteractionRow] = []
        self._other_prompts: list[PromptRow] = []
        self._times = Times(services.clock.monotonic())
        self._started_ms = services.clock.now_ms()
        self._journal: Journal = session.journal(turn_id, prompt.prompt_id if prompt else None)
        self._mark: Mark | None = None
        self._marked: LiveSeat | None = None
        self._preparing: asyncio.Task[LiveSeat] | None = None
        self._withdrawing: Driver | None = None
        self._answerable: asyncio.Future[None] = loop.create_future()
        self._given: set[str] = set()

    # -- from outside ------------------------------------------------------------------------------------------------

    def stop(self, reason: StopReason, error: RunnerError | None = None) -> bool:
        """Mark the turn stopping; False when it already has its ending (the Stop is obsolete)."""
        if self.machine.phase is TurnPhase.ENDED:
            return False
        if self.driver is not None:
            self.driver.stop(reason, error)
            return True
        effects = turn.step(self.machine, turn.Stop(reason, error))
        if any(isinstance(effect, turn.AbortPreparation) for effect in effects):
            if self._preparing is not None:
                self._preparing.cancel()
            if self._withdrawing is not None and not reason.cooperative:
                self._withdrawing.stop(reason)
        return True

    def answer(self, answering: Answering) -> bool:
        """Give a human's answer to the agent, now or when its prompt is driven again; False when nobody asks it."""
        if self.driver is None and self._resumes is not None and self.machine.phase is not TurnPhase.ENDED:
            self._answers.append(answering)
            return True
        return self.driver is not None and self._give(self.driver, answering)

    def asks(self, interaction_id: str) -> InteractionRow | None:
        """The open question of this id, when this turn holds it."""
        if self.driver is not None:
            return self.driver.questions.open.get(interaction_id)
        return self._resumes.questions.get(interaction_id) if self._resumes is not None else None

    async def prepared(self) -> None:
        """Wait until the agent can be answered, or the turn ended without getting there."""
        waits: set[asyncio.Future[Any]] = {self._answerable, self.ended}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)

    def gave(self, interaction_id: str) -> bool:
        """Whether this turn handed the answer to its agent."""
        return interaction_id in self._given

    @property
    def questions(self) -> list[InteractionRow]:
        """Open questions."""
        if self.driver is not None:
            return list(self.driver.questions.open.values())
        return list(self._resumes.questions.values()) if self._resumes is not None else []

    # -- the turn ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """The whole turn. Never raises; whatever happens, ``admitted`` and, if admitted, ``ended`` get done."""
        try:
            admitted = await self._admit()
        except Exception as error:
            self._not_admitted(error)
            return
        if not admitted:
            self.admitted.set_result(False)
            return
        try:
            end = await self._drive()
        except Exception:
            log.exception("turn %s failed inside the runner", self.turn_id)
            end = turn.End(Outcome.FAILED, settled=False, error=RunnerError("internal", "The runner failed."))
            self.machine.phase = TurnPhase.ENDED
        await self._finish(end)

    def _not_admitted(self, error: Exception) -> None:
        if not isinstance(error, RunnerError):
            log.error("turn %s could not be admitted", self.turn_id, exc_info=error)
            error = RunnerError("internal", "The runner failed before the turn was admitted.")
        if not self.admitted.done():
            self.admitted.set_exception(error)
            self.admitted.exception()

    def _beat(self, phase: Phase, *, parked: bool = False) -> Heartbeat:
        session = self._session
        return Heartbeat(
            session.project,
            session.session_id,
            self.turn_id,
            self._services.replica_id,
            phase,
            self._resumes.turn_id if self._resumes is not None and phase == "running" else None,
            session.head.epoch,
            parked,
            self._services.settings.server.advertise_url,
        )

    async def _admit(self) -> bool:
        session, services = self._session, self._services
        answer = await services.beats.first(self._beat("running"))
        busy = services.pool.busy(session.key) or session.current is not None
        if admission.first_answer(admitted=answer.admitted, locally_busy=busy) is admission.Verdict.REFUSED:
            if answer.admitted:
                await services.beats.end(self._beat("ended", parked=True))
            return False
        session.current = self
        try:
            stored = await self._store_admission(answer)
        except BaseException:
            session.current = None
            await services.beats.end(self._beat("ended", parked=services.pool.live(session.key) is not None))
            raise
        if not stored:
            session.current = None
            await services.beats.end(self._beat("ended", parked=services.pool.live(session.key) is not None))
            return False
        self._accepted()
        return True

    async def _store_admission(self, answer: BeatAnswer) -> bool:
        session, services, head = self._session, self._services, self._session.head
        self._begin_mark()
        await session.settled_outbox()
        before = (head.epoch, head.n)
        busy_before = session.busy
        earlier = session.take_records()
        head.epoch, head.n, self.epoch = answer.epoch, 0, answer.epoch
        self._journal.hold()
        self._announce()
        records = session.take_records()
        try:
            row = replace(
                session.row(services.clock.now_ms()),
                config=self._effective.config,
            )
            stored = await services.store.admit(
                Admission(row, self._turn_row(None, None, None), self._prompt_row(None), (), [*earlier, *records])
            )
        except BaseException:
            stored = False
            raise
        finally:
            if not stored:
                head.epoch, head.n = before
                session.busy = busy_before
                session.give_back(earlier)
                self._journal.discard()
        return stored

    def _announce(self) -> None:
        self._session.begin_busy(self._journal.outside())
        data: dict[str, Any] = {
            "turn_id": self.turn_id,
            "epoch": self.epoch,
            "replica_id": self._services.replica_id,
            "prompt_ids": [self.prompt.prompt_id] if self.prompt is not None else [],
        }
        if self._resumes is not None:
            data["resumes"] = self._resumes.turn_id
        self._journal.event(EventType.TURN_ADMITTED, data)

    def _accepted(self) -> None:
        session = self._session
        if self._effective is not session.effective:
            session.effective = self._effective
            session.redactor = Redactor(value for value in self._effective.secrets.values() if value)
            self._journal.redactor = session.redactor
        if self.prompt is not None:
            self.prompt.turn_id = self.turn_id
            self.prompt.turn_ids.append(self.turn_id)
            if self._resumes is None:
                self.prompt.position = session.log.end
            elif self.prompt.result.done():
                self.prompt.result = asyncio.get_running_loop().create_future()
            session.remember(self.prompt)
        self._times.admitted = self._services.clock.monotonic()
        self._journal.release()
        self.admitted.set_result(True)

    def _begin_mark(self) -> None:
        live = self._services.pool.warm(self._session.key)
        if live is None and self._session.paused is not None:
            live = self._session.paused.live
        if live is not None and live.alive and self._resumes is None:
            self._marked, self._mark = live, live.sandbox.mark(self.turn_id)

    # -- preparing ---------------------------------------------------------------------------------------------------

    async def _drive(self) -> turn.End:
        effects = turn.step(self.machine, turn.Begin())
        if isinstance(effects[-1], turn.End):
            return effects[-1]
        try:
            live = await self._prepare()
        except RunnerError as error:
            return self._not_prepared(error)
        except asyncio.CancelledError:
            if self.machine.stop is None:
                raise
            return self._not_prepared(RunnerError("internal", "The start was given up."))
        self._times.ready = self._services.clock.monotonic()
        if self._resumes is None:
            self._environment("ready")
        driver = self.driver = self._driver(live, self.machine)
        if self._resumes is not None:
            driver.questions.open.update(self._resumes.questions)
        blocks = None if self._resumes is not None or self.prompt is None else self.prompt.content
        for answering in self._answers:
            self._give(driver, answering)
        self._answerable.set_result(None)
        try:
            return await driver.run(blocks, self._claimed)
        finally:
            self._closed += driver.questions.closed
            self._times.first_update = driver.first_update_at

    def _not_prepared(self, error: RunnerError) -> turn.End:
        end = turn.step(self.machine, turn.PrepareFailed(error))[-1]
        assert isinstance(end, turn.End)
        return end

    def _claimed(self) -> None:
        if self.prompt is not None:
            self._journal.event(EventType.USER_MESSAGE, {"content": self.prompt.content})

    def _driver(self, live: LiveSeat, machine: turn.Turn) -> Driver:
        services = self._services
        tuning = services.settings.turn
        return Driver(
            live=live,
            machine=machine,
            journal=self._journal,
            policy=self._effective.policy,
            limits=self._effective.limits,
            tuning=Tuning(tuning.settle_seconds, tuning.pause_quiet_ms / 1000),
            clock=services.clock,
            started_at=self._times.begun,
            mint=lambda: services.ids.mint("int"),
            save_question=self._save_question,
        )

    async def _save_question(self, row: InteractionRow) -> None:
        try:
            await self._services.store.append([], [row])
        except RunnerError as error:
            log.warning("question %s is not durable yet: %s", row.interaction_id, error)

    def _give(self, driver: Driver, answering: Answering) -> bool:
        row = desk.closed(answering.row, InteractionStatus.CONSUMED)
        given = driver.answer(row, answering.reply, answering.denied)
        if given:
            self._given.add(row.interaction_id)
        return given

    async def _prepare(self) -> LiveSeat:
        if self._resumes is not None:
            return self._reclaim(self._resumes)
        warm = await self._withdraw() if self._session.paused is not None else None
        live = warm or await self._check_out()
        self.live = live
        await self._services.provisioner.apply(live, self._effective)
        if self._mark is None or self._marked is not live:
            self._mark = live.sandbox.mark(self.turn_id)
        await self._mark.set(MARK_SECONDS)
        return live

    def _reclaim(self, paused: Paused) -> LiveSeat:
        seat = self._services.pool.book.claim_paused(self._session.key, self.turn_id)
        self._session.paused = None
        if seat is None or seat is not paused.live.seat:
            raise RunnerError("sandbox_lost", "The sandbox that waited for an answer is gone.")
        paused.live.take()
        self.live, self.start, self.reason = paused.live, "hit", "hit"
        return paused.live

    async def _withdraw(self) -> LiveSeat | None:
        """Settle the paused chain before a new prompt is sent; the agent if it may serve, else None (DESIGN 3.2)."""
        paused = self._session.paused
        assert paused is not None
        live = self._reclaim(paused)
        machine = turn.Turn(resumes=True, phase=TurnPhase.PREPARING, stop=StopReason.NEW_PROMPT)
        driver = self._withdrawing = self._driver(live, machine)
        driver.questions.open.update(paused.questions)
        end = await driver.run(None, lambda: None)
        self._withdrawing = None
        self._closed += driver.questions.closed
        self._journal.forget_text()
        self._end_other_prompt(paused.prompt)
        expiry, now_ms = self._effective.secrets_expire_ms, self._services.clock.now_ms()
        facet = reuse_verdict(live.seat.facets, self._facets(), expiry, now_ms)
        if end.settled and not end.survivors and live.alive and facet is None:
            return live
        self._services.pool.destroy(live.seat, facet or ("survivors" if end.survivors else "not_settled"))
        self.live = None
        return None

    def _end_other_prompt(self, prompt: Prompt | None) -> None:
        if prompt is None:
            return
        prompt.state = PromptState.ABORTED
        data = {"prompt_id": prompt.prompt_id, "state": prompt.state.value}
        self._session.journal(None, prompt.prompt_id).event(EventType.PROMPT_ENDED, data)
        result = prompt.result.result() if prompt.result.done() else None
        self._other_prompts.append(self._session.prompt_row(prompt, result))

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
            self.turn_id,
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
        self._environment("starting")
        self._preparing = self._services.tasks.spawn(f"start {self.turn_id}", self._cold(cold))
        try:
            return await self._preparing
        finally:
            self._preparing = None

    async def _cold(self, cold: Cold) -> LiveSeat:
        pool = self._services.pool
        try:
            if not await pool.make_room(cold):
                raise RunnerError("provider_at_capacity", "A sandbox that must make room is still being torn down.")
            live = await self._services.provisioner.start(cold.seat, self._effective)
        except BaseException as error:
            verdict = error.code if isinstance(error, RunnerError) else "start_given_up"
            pool.discard(cold.seat, verdict)
            raise
        pool.attach(live)
        live.take()
        self.live = live
        return live

    def _environment(self, phase: str) -> None:
        elapsed = self._services.clock.monotonic() - self._times.begun
        data = {"phase": phase, "start": self.start, "reason": self.reason, "elapsed_ms": round(elapsed * 1000, 3)}
        self._journal.event(EventType.ENVIRONMENT, data)

    # -- the order at the end ----------------------------------------------------------------------------------------

    async def _finish(self, end: turn.End) -> None:
        """Ending durable, seat parked or out of the map, end beat, result line (DESIGN 3.2)."""
        session = self._session
        seat = self._seat_after(end)
        result = await self._ending_durable(end)
        self._place_seat(end, seat)
        session.last_turn = LastTurn(
            self.turn_id, end.outcome.value, result["stop_reason"], self._services.clock.now_ms()
        )
        await self._end_beat("paused" if end.outcome is Outcome.PAUSED else "parked")
        session.current = None
        if self.prompt is not None and not self.prompt.result.done():
            self.prompt.result.set_result(result)
        if not self.ended.done():
            self.ended.set_result(end)
        if end.outcome is Outcome.PAUSED:
            self._services.on_paused(session)

    async def _end_beat(self, parked: Phase) -> None:
        """Keep the lease of a parked seat, release everything else; the seat may be lost meanwhile (case L3)."""
        beats = self._services.beats
        if self._holds_seat():
            await beats.end(self._beat(parked, parked=True))
        if not self._holds_seat():
            await beats.end(self._beat("ended"))

    def _holds_seat(self) -> bool:
        return self.live is not None and self._services.pool.book.holds(self.live.seat)

    def _seat_after(self, end: turn.End) -> Any:
        if self.live is None:
            return None
        now = self._services.clock.monotonic()
        server = self._services.settings.server
        kept = session_kept(self._session, self.prompt, now, server.reader_grace_seconds)
        windows = self._services.windows[self._effective.provider]
        return after_ending(end, windows, kept=kept, agent_alive=self.live.alive, claimed=False)

    def _place_seat(self, end: turn.End, seat: Any) -> None:
        live, pool = self.live, self._services.pool
        if live is None or not self._holds_seat():
            return
        if not isinstance(seat, Parked):
            pool.destroy(live.seat, seat.verdict)
            return
        live.turns += 1
        if end.outcome is Outcome.PAUSED:
            assert self.driver is not None
            self._session.paused = Paused(self.turn_id, self.prompt, live, dict(self.driver.questions.open))
        pool.park(live, seat)

    async def _ending_durable(self, end: turn.End) -> dict[str, Any]:
        session, services = self._session, self._services
        self._journal.close_block()
        if self.machine.frame_sent:
            session.agent_state["has_context"] = True
        if self.driver is not None and self.driver.usage:
            session.usage.update(self.driver.usage)
        result = result_of(self, end, self._journal.text, self._times, services.clock.monotonic())
        await session.settled_outbox()
        self._journal.hold()
        self._end_events(end)
        now_ms = services.clock.now_ms()
        records = session.take_records()
        ending = Ending(
            session.row(now_ms),
            self._turn_row(end, result, now_ms),
            self._prompt_row(result),
            self._closed,
            records,
            self._other_prompts,
        )
        written = await self._write(ending)
        if written:
            self._journal.release()
        elif written is None:
            session.give_back(records)
            self._journal.release()
        else:
            log.error("turn %s had already ended; its ending was dropped", self.turn_id)
            self._journal.discard()
        session.updated_at = now_ms
        return result

    async def _write(self, ending: Ending) -> bool | None:
        """True: written. False: somebody else wrote the ending first. None: the store cannot be used."""
        for attempt in range(END_TRIES):
            try:
                return await self._services.store.end(ending)
            except RunnerError as error:
                log.error("the ending of turn %s is not durable: %s", self.turn_id, error)
                if attempt + 1 < END_TRIES:
                    await asyncio.sleep(END_RETRY_SECONDS)
        return None

    def _end_events(self, end: turn.End) -> None:
        if end.error is not None:
            self._journal.event(EventType.ERROR, end.error.as_event())
        if end.outcome is not Outcome.PAUSED and self.prompt is not None:
            self.prompt.state = prompt_state(end, self.machine.frame_sent)
            data = {"prompt_id": self.prompt.prompt_id, "state": self.prompt.state.value}
            self._journal.event(EventType.PROMPT_ENDED, data)
        done: dict[str, Any] = {"turn_id": self.turn_id, "outcome": end.outcome.value}
        if end.stop_reason in ("cancelled", "paused"):
            done["stop_reason"] = end.stop_reason
        self._journal.event(EventType.DONE, done)
        if end.outcome is not Outcome.PAUSED:
            self._session.busy = False
            self._journal.outside().event(EventType.SESSION_IDLE, {})

    def _turn_row(self, end: turn.End | None, result: dict[str, Any] | None, ended_at: int | None) -> TurnRow:
        session = self._session
        return TurnRow(
            session.project,
            session.session_id,
            self.turn_id,
            self.epoch,
            self._services.replica_id,
            self.prompt.prompt_id if self.prompt is not None else None,
            self._started_ms,
            self._resumes.turn_id if self._resumes is not None else None,
            end.outcome.value if end is not None else None,
            end.stop_reason if end is not None else None,
            ended_at,
            result,
        )

    def _prompt_row(self, result: dict[str, Any] | None) -> PromptRow | None:
        if self.prompt is None:
            return None
        return replace(self._session.prompt_row(self.prompt, result), turn_id=self.turn_id)


def session_kept(session: Session, prompt: Prompt | None, now: float, grace: float) -> bool:
    """Whether somebody is there for whom the sandbox is kept (DESIGN 3.4)."""
    return (prompt is not None and prompt.keep) or session.presence.there(now, grace)


def prompt_state(end: turn.End, frame_sent: bool) -> PromptState:
    """``prompt_ended.state`` of an ending (DESIGN 3.2)."""
    match end.outcome:
        case Outcome.COMPLETED:
            return PromptState.DONE
        case Outcome.CANCELLED:
            return PromptState.ABORTED if frame_sent else PromptState.CANCELLED
        case _:
            return PromptState.FAILED
