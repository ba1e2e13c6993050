"""Chains that wait for a human: what the agent says meanwhile, the answer, the loss of the seat (DESIGN 3.2)."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Final

from runner.acp import updates
from runner.acp.connection import Closed, Item, PermissionAsked, PermissionWithdrawn, PromptAnswered
from runner.errors import RunnerError
from runner.interactions import desk
from runner.leases.port import Heartbeat
from runner.rules import interaction, permission
from runner.session import chain
from runner.session.port import Reply
from runner.session.run import Start, TurnRun
from runner.session.services import Answering, Services
from runner.session.session import Paused, Session
from runner.store.port import InteractionRow
from runner.terms import EventType, InteractionStatus, PromptState
from runner.turn.live import LiveSeat, Question
from runner.turn.questions import send_reply
from runner.wire.models import AnswerRequest

log = logging.getLogger("runner.session")
CONSUMED_SECONDS: Final = 10.0
GONE_SECONDS: Final = 1.0
RESUME_SECONDS: Final = 1.0
HELD_BYTES: Final = 16 * 1024 * 1024


class PausedChains:
    """Watches paused agents and resumes their chains; ``frozen``: no chain goes on any more, the runner stops."""

    def __init__(self, services: Services, start: Start) -> None:
        self._services = services
        self._start = start
        self.frozen = False

    # -- while paused ------------------------------------------------------------------------------------------------

    def watch(self, session: Session) -> None:
        """Take what the agent says while its chain is paused; again when a turn that would resume it was refused."""
        paused = session.paused
        if paused is None:
            return
        book = self._services.pool.book
        if not book.holds(paused.live.seat):
            self.seat_lost(session, paused.live, book.verdicts.get(session.key, "gone"))
            return
        paused.live.inbox.on_items = lambda: self._items(session, paused)
        self._items(session, paused)

    def _items(self, session: Session, paused: Paused) -> None:
        paused.held_bytes += paused.live.inbox.queued_bytes
        for item in paused.live.inbox.drain():
            if isinstance(item, Closed):
                self._services.pool.agent_exited(paused.live)
                return
            self._item(session, paused, item)
        live = paused.live
        answered = any(isinstance(item, PromptAnswered) for item in live.held)
        if paused.held_bytes > HELD_BYTES:
            log.error("the paused agent of %s floods; its seat is destroyed", session.session_id)
            self._services.pool.dismiss(live, "paused_flood")
        elif (answered or not live.questions) and not session.taken and not self.frozen:
            self._go_on(session, paused)

    def _go_on(self, session: Session, paused: Paused) -> None:
        """Resume a chain that waits for nobody; where that is refused, again after a while."""
        now = self._services.clock.monotonic()
        if now >= paused.resume_at:
            paused.resume_at = now + RESUME_SECONDS
            self._resume(session, paused, ())
        elif paused.timer is None:
            paused.timer = asyncio.get_running_loop().call_at(paused.resume_at, self._again, session, paused)

    def _again(self, session: Session, paused: Paused) -> None:
        paused.timer = None
        if session.paused is paused:
            self.watch(session)

    def _item(self, session: Session, paused: Paused, item: Item) -> None:
        match item:
            case PermissionAsked():
                self._ask(session, paused, item)
            case PermissionWithdrawn():
                self._withdrawn(session, paused, item)
            case _:
                paused.live.held.append(item)

    def _ask(self, session: Session, paused: Paused, item: PermissionAsked) -> None:
        """A permission that arrives while paused joins the paused turn's questions."""
        reply = desk.decide(session.effective.policy, item.params)
        if reply is not None:
            send_reply(paused.live, item.key, reply)
            return
        tool_call = updates.tool_of(item.params.get("toolCall"))
        tool_call_id = tool_call["tool_call_id"] if tool_call else None
        options = tuple(item.params["options"])
        row = desk.question(
            project=session.project,
            session_id=session.session_id,
            turn_id=paused.turn_id,
            interaction_id=self._services.ids.mint("int"),
            generation=paused.live.seat.generation,
            tool_call=session.redactor.tree(tool_call or {}),
            options=session.redactor.tree(list(options)),
            now_ms=self._services.clock.now_ms(),
        )
        paused.questions[row.interaction_id] = row
        paused.live.questions[row.interaction_id] = Question(row.interaction_id, item.key, tool_call_id, options)
        session.outbox.questions([row])
        session.journal(None, _prompt_id(paused)).event(EventType.INTERACTION_REQUESTED, desk.view(row))

    def _withdrawn(self, session: Session, paused: Paused, item: PermissionWithdrawn) -> None:
        for question in list(paused.live.questions.values()):
            if question.key == item.key:
                del paused.live.questions[question.interaction_id]
                row = paused.questions.pop(question.interaction_id, None)
                if row is not None:
                    pen = session.journal(None, _prompt_id(paused))
                    session.outbox.questions(chain.close_questions(pen, [row], InteractionStatus.CANCELLED))

    def _resume(self, session: Session, paused: Paused, answers: tuple[Answering, ...]) -> TurnRun:
        run = TurnRun.resuming(self._services, session, paused, answers)
        self._start(session, run)
        return run

    # -- the seat of a paused chain is gone --------------------------------------------------------------------------

    def seat_lost(self, session: Session, live: LiveSeat, verdict: str) -> None:
        """The warm seat went away: nobody can answer its open prompt any more, so the chain ends as failed.

        A turn that is being admitted finds the seat gone and ends the chain itself, else ``watch`` comes back to it.
        """
        paused = session.paused
        if paused is None or paused.live is not live or session.taken:
            return
        session.paused = None
        pen = session.journal(None, _prompt_id(paused))
        session.outbox.questions(chain.close_lost(pen, paused))
        pen.event(EventType.ERROR, chain.seat_error(verdict).as_event())
        if paused.prompt is not None:
            chain.end_prompt(session, pen, paused.prompt, PromptState.FAILED)
        session.busy = False
        session.journal(None, None).event(EventType.SESSION_IDLE, {})
        session.outbox.flush_soon()
        beat = Heartbeat(session.project, session.session_id, paused.turn_id, self._services.replica_id, "ended")
        self._services.tasks.spawn("chain lost", self._services.beats.end(beat))

    # -- answers -----------------------------------------------------------------------------------------------------

    async def answer(self, session: Session, interaction_id: str, request: AnswerRequest) -> Reply:
        """Claim the answer, give it to the agent, and say whether that is confirmed (DESIGN 3.8)."""
        if self.frozen:
            raise RunnerError("runner_at_capacity", "The runner is shutting down. Try again.", retry_after=1)
        if session.outbox.owes_questions:
            await session.outbox.flush()
        row = await self._row(session, interaction_id)
        given = {name: value for name, value in request.model_dump().items() if value is not None}
        if interaction.claim(InteractionStatus(row.status), row.answer, given) == "repeat":
            return Reply(200 if row.status == InteractionStatus.CONSUMED else 202, desk.view(row))
        question = self._question(session, interaction_id)
        if question is None:
            raise RunnerError("interaction_closed", "The agent no longer waits for this answer.")
        reply, denied = _reply_for(question, request)
        answered = desk.closed(row, InteractionStatus.ANSWERED, given)
        if not await self._services.store.answer_interaction(answered, InteractionStatus.PENDING):
            newer = await self._row(session, interaction_id)
            interaction.claim(InteractionStatus(newer.status), newer.answer, given)
            return Reply(200 if newer.status == InteractionStatus.CONSUMED else 202, desk.view(newer))
        return await self._deliver(session, Answering(answered, reply, denied))

    async def _row(self, session: Session, interaction_id: str) -> InteractionRow:
        row = await self._services.store.interaction(session.project, interaction_id)
        if row is None or row.session_id != session.session_id:
            raise RunnerError("not_found", f"There is no interaction {interaction_id}.")
        return row

    @staticmethod
    def _question(session: Session, interaction_id: str) -> Question | None:
        lives = [session.current.live] if session.current is not None else []
        if session.paused is not None:
            lives.append(session.paused.live)
        asked = (live.questions.get(interaction_id) for live in lives if live is not None)
        return next((question for question in asked if question is not None), None)

    async def _deliver(self, session: Session, answering: Answering) -> Reply:
        if session.current is not None and session.current.pausing:
            await asyncio.wait({session.current.ended}, timeout=CONSUMED_SECONDS)
        run = session.current or session.resuming
        if run is not None and run.answer(answering):
            return await self._confirmed(session, run, answering)
        if session.paused is not None and run is None:
            return await self._confirmed(session, self._resume(session, session.paused, (answering,)), answering)
        return await self._unclaim(answering, "The agent no longer waits for this answer.")

    async def _confirmed(self, session: Session, run: TurnRun, answering: Answering) -> Reply:
        """Consumed once the resumed turn's row exists and the answer's frame was written whole."""
        try:
            async with asyncio.timeout(CONSUMED_SECONDS):
                admitted = await asyncio.shield(run.admitted)
                if admitted:
                    await run.prepared()
        except TimeoutError:
            return Reply(202, desk.view(answering.row))
        except RunnerError as error:
            return await self._unclaim(answering, error.message)
        if not admitted or not run.gave(answering.row.interaction_id):
            if admitted:
                await asyncio.wait({run.ended}, timeout=GONE_SECONDS)
            return await self._unclaim(answering, "The session could not be resumed.")
        row = desk.closed(answering.row, InteractionStatus.CONSUMED)
        session.outbox.questions([row])
        await session.outbox.flush()
        written = run.live is not None and await run.live.connection.flush(CONSUMED_SECONDS)
        return Reply(200 if written else 202, desk.view(row))

    async def _unclaim(self, answering: Answering, why: str) -> Reply:
        """A failed resume returns the answer to pending and says why (case F2)."""
        row = replace(answering.row, status=InteractionStatus.PENDING, answer=None)
        if await self._services.store.answer_interaction(row, InteractionStatus.ANSWERED):
            raise RunnerError("session_turn_in_use", f"{why} The question is still open.")
        raise RunnerError("interaction_closed", why)


def _prompt_id(paused: Paused) -> str | None:
    return paused.prompt.prompt_id if paused.prompt is not None else None


def _reply_for(question: Question, request: AnswerRequest) -> tuple[permission.Reply, bool]:
    if request.decision == "deny":
        return permission.deny(question.options), True
    if request.decision == "allow":
        reply = permission.allow(question.options)
        if reply.result is None:
            raise RunnerError("invalid_request", f"{reply.message} Choose an option_id.", field="decision")
        return reply, False
    chosen = permission.choose(question.options, request.option_id or "")
    if chosen is None:
        offered = ", ".join(str(option.get("optionId")) for option in question.options)
        raise RunnerError("invalid_request", f"option_id: the agent offered {offered}.", field="option_id")
    return chosen, permission.denies(question.options, request.option_id or "")
