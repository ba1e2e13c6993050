"""Chains that wait for a human: what the agent says meanwhile, the answer, the loss of the seat (DESIGN 3.2, 3.8)."""

from __future__ import annotations

import asyncio
import logging
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
from runner.errors import RunnerError, owned_elsewhere
from runner.interactions import desk
from runner.leases.port import Heartbeat
from runner.rules import interaction
from runner.rules.interaction import Cause
from runner.rules.prompts import Move
from runner.session import chain
from runner.session.port import Reply
from runner.session.run import Start, TurnRun
from runner.session.services import Answering, Services
from runner.session.session import Paused, Session
from runner.store.port import InteractionRow
from runner.terms import EventType, InteractionStatus, PromptState, StopReason
from runner.turn.live import LiveSeat, OpenTool
from runner.turn.questions import Questions, tool_of
from runner.wire.models import AnswerRequest

log = logging.getLogger("runner.session")
CONSUMED_SECONDS: Final = 10.0
GONE_SECONDS: Final = 1.0
RESUME_SECONDS: Final = 1.0
HELD_BYTES: Final = 16 * 1024 * 1024
FLOOD: Final = "paused_flood"
TAKEN: Final = "Another runner has the session now."
ENDED_BY: Final = {
    StopReason.KILL.value: Cause.STOPPED,
    StopReason.DELETE.value: Cause.STOPPED,
    FLOOD: Cause.LOST,
}
"""Verdicts of a seat behind which nobody may go on with its chain; behind any other the chain waits on, cold."""


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
        live = paused.live
        if live is None:
            if not (paused.read and self._services.owners.shared):
                self._cooled(session, paused)
            return
        book = self._services.pool.book
        if not book.holds(live.seat):
            self.seat_lost(session, live, book.verdicts.get(session.key, "gone"))
            return
        live.inbox.on_items = lambda: self._items(session, paused, live)
        self._items(session, paused, live)

    def _items(self, session: Session, paused: Paused, live: LiveSeat) -> None:
        paused.held_bytes += live.inbox.queued_bytes
        for item in live.inbox.drain():
            if isinstance(item, Closed):
                self._services.pool.agent_exited(live)
                return
            self._item(session, paused, live, item)
        answered = any(isinstance(item, PromptAnswered) for item in live.held)
        if paused.held_bytes > HELD_BYTES:
            log.error("the paused agent of %s floods; its seat is destroyed", session.session_id)
            self._services.pool.dismiss(live, FLOOD)
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

    def _item(self, session: Session, paused: Paused, live: LiveSeat, item: Item) -> None:
        questions = self._questions(session, paused, live)
        match item:
            case PermissionAsked() | ElicitationAsked():
                self._ask(session, live, questions, item)
            case PermissionWithdrawn():
                questions.withdrawn(item)
            case ElicitationCompleted():
                if not questions.completed(item):
                    live.held.append(item)
            case _:
                live.held.append(item)
        session.outbox.questions(questions.closed)

    def _questions(self, session: Session, paused: Paused, live: LiveSeat) -> Questions:
        services, pen = self._services, session.journal(None, _prompt_id(paused))
        mint = services.ids.mint
        return Questions(
            live, pen, services.clock, lambda: mint("int"), turn_id=paused.turn_id, opened=paused.questions
        )

    def _ask(self, session: Session, live: LiveSeat, questions: Questions, item: Asked) -> None:
        """A question that arrives while paused joins the paused turn's; its call is shown by the turn that resumes."""
        tool = tool_of(live, item)
        fields = updates.tool_of(item.params.get("toolCall"))
        if fields is not None:
            tool = OpenTool({**(tool.data if tool is not None else {}), **fields}, 0.0)
            told = {"sessionUpdate": "tool_call_update", **item.params["toolCall"]}
            live.held.append(Updates([told]))
        if questions.settle(item, tool, session.effective.policy) is None:
            row = questions.draft(item, tool)
            session.outbox.questions([row])
            questions.show(row, item, tool)

    def _resume(self, session: Session, paused: Paused, answers: tuple[Answering, ...]) -> TurnRun:
        run = TurnRun.resuming(self._services, session, paused, answers)
        self._start(session, run)
        return run

    # -- the seat of a paused chain is gone --------------------------------------------------------------------------

    def seat_lost(self, session: Session, live: LiveSeat, verdict: str) -> None:
        """The warm seat went away. Its questions can still be answered: the chain waits on, cold, for any replica.

        A turn that is being admitted finds the seat gone and starts an agent itself, else ``watch`` comes back to it.
        """
        paused = session.paused
        if paused is None or paused.live is not live or session.taken:
            return
        cause = ENDED_BY.get(verdict)
        if cause is not None:
            self.end(session, cause, chain.seat_error(verdict))
            return
        self._cooled(session, paused)
        session.journal(None, _prompt_id(paused)).event(EventType.NOTICE, {"kind": "chain_cold", "reason": verdict})
        paused.live = None
        self._release(session, paused)

    @staticmethod
    def _cooled(session: Session, paused: Paused) -> None:
        """Its agent is gone: so are its tool calls, and answers that it had not asked for come back."""
        pen = session.journal(None, _prompt_id(paused))
        chain.close_tools(pen, paused)
        held = [row for row in paused.questions.values() if row.status == InteractionStatus.ANSWERED]
        back = chain.give_back(pen, held, interaction.UNASKED)
        paused.questions.update({row.interaction_id: row for row in back})
        if back:
            session.outbox.questions(back)

    def end(self, session: Session, cause: Cause, error: RunnerError) -> None:
        """End a paused chain without a turn: its questions are closed, its prompt has failed."""
        paused, session.paused = session.paused, None
        if paused is None:
            return
        pen = session.journal(None, _prompt_id(paused))
        session.outbox.questions(chain.close_questions(pen, paused.questions.values(), cause))
        chain.close_tools(pen, paused)
        pen.event(EventType.ERROR, error.as_event())
        if paused.prompt is not None:
            chain.end_prompt(session, pen, paused.prompt, PromptState.FAILED)
        session.queue.chain_ended(Move.FAIL)
        self._release(session, paused)

    def _release(self, session: Session, paused: Paused) -> None:
        self._services.tasks.spawn(f"release {session.session_id}", self._released(session, paused))

    async def _released(self, session: Session, paused: Paused) -> None:
        """What was shown is durable before another replica may take the session."""
        try:
            await session.outbox.flush()
        except RunnerError as error:
            if session.outbox.owes_endings and self._services.owners.shared:
                # The end beat of its turn waits behind that ending already.
                return
            log.warning("session %s is given up with records kept back: %s", session.session_id, error)
        await self._services.beats.end(Heartbeat(*session.key, paused.turn_id, self._services.replica_id, "ended"))

    # -- time --------------------------------------------------------------------------------------------------------

    def expire(self, session: Session, now_ms: int) -> None:
        """Refuse what nobody answered in time. A chain that waits for nothing more goes on; one that is cold ends."""
        if session.current is not None:
            session.current.expire(now_ms)
        paused = session.paused
        if paused is None or session.taken or self.frozen:
            return
        pending = [row for row in paused.questions.values() if row.status == InteractionStatus.PENDING]
        due = [row for row in pending if now_ms >= row.expires_at]
        if not due:
            return
        if paused.live is not None:
            questions = self._questions(session, paused, paused.live)
            questions.expire(now_ms)
            session.outbox.questions(questions.closed)
            self._items(session, paused, paused.live)
        elif len(due) == len(paused.questions):
            # As a turn of its own: whoever else wants the session is refused, or refuses this.
            run = TurnRun.resuming(self._services, session, paused)
            run.stop(StopReason.LIMIT, RunnerError("execution_lost", interaction.REASONS[Cause.EXPIRED]))
            self._start(session, run)

    # -- answers -----------------------------------------------------------------------------------------------------

    async def answer(self, session: Session, interaction_id: str, request: AnswerRequest) -> Reply:
        """Claim the answer, give it to the agent, and say whether that is confirmed (DESIGN 3.8)."""
        if self.frozen:
            raise RunnerError("runner_at_capacity", "The runner is shutting down. Try again.", retry_after=1)
        if session.outbox.owes_questions:
            await session.outbox.flush()
        given = {name: value for name, value in request.model_dump().items() if value is not None}
        masked: dict[str, Any] = session.redactor.tree(given)
        row = await self._claimable(session, interaction_id)
        if interaction.claim(InteractionStatus(row.status), row.answer, masked) == "repeat":
            return _known(row)
        now_ms = self._services.clock.now_ms()
        offer = self._offer(session, interaction_id)
        if offer is None and (elsewhere := await self._services.owners.elsewhere(*session.key)) is not None:
            raise owned_elsewhere(TAKEN, elsewhere.replica_id)
        if offer is None or not interaction.open_for(InteractionStatus(row.status), row.expires_at, now_ms):
            why = "The agent no longer waits for this answer." if offer is None else "This question has expired."
            raise RunnerError("interaction_closed", why)
        desk.reply(offer, given)
        answered = desk.answered(row, masked, now_ms)
        if not await self._services.store.answer_interaction(answered, InteractionStatus.PENDING):
            newer = await self._row(session, interaction_id)
            interaction.claim(InteractionStatus(newer.status), newer.answer, masked)
            return _known(newer)
        session.tell(session.key, interaction_id, "answered", row.status, answered.status)
        return await self._deliver(session, Answering(answered, given))

    async def _row(self, session: Session, interaction_id: str) -> InteractionRow:
        row = await self._services.store.interaction(session.project, interaction_id)
        if row is None or row.session_id != session.session_id:
            raise RunnerError("not_found", f"There is no interaction {interaction_id}.")
        return row

    async def _claimable(self, session: Session, interaction_id: str) -> InteractionRow:
        """The row; an answer that nobody carries any more is given back first (case F2)."""
        row = await self._row(session, interaction_id)
        if row.status != InteractionStatus.ANSWERED or self.carried(session, interaction_id):
            return row
        if not interaction.orphaned(row.answer, self._services.clock.now_ms()):
            return row
        back = desk.unclaimed(row, interaction.UNCLAIMED)
        if await self._services.store.answer_interaction(back, InteractionStatus.ANSWERED):
            self.remember(session, back)
            return back
        return await self._row(session, interaction_id)

    @staticmethod
    def carried(session: Session, interaction_id: str) -> bool:
        """Whether a claimed answer may be on its way here, or is kept for a warm agent until that asks again."""
        paused = session.paused
        if paused is None or session.taken:
            return True
        held = paused.questions.get(interaction_id)
        return paused.live is not None and (held is None or held.status != InteractionStatus.PENDING)

    @staticmethod
    def remember(session: Session, row: InteractionRow) -> None:
        """A question of a paused chain is as the store has it from now on."""
        if session.paused is not None and row.interaction_id in session.paused.questions:
            session.paused.questions[row.interaction_id] = row

    @staticmethod
    def _offer(session: Session, interaction_id: str) -> desk.Offer | None:
        if session.current is not None:
            return session.current.offer(interaction_id)
        paused = session.paused
        if paused is None:
            return None
        asked = paused.live.questions.get(interaction_id) if paused.live is not None else None
        if asked is not None:
            return asked.offer
        held = paused.questions.get(interaction_id)
        return desk.stored_offer(held) if held is not None else None

    async def _deliver(self, session: Session, answering: Answering) -> Reply:
        if session.current is not None and session.current.pausing:
            await asyncio.wait({session.current.ended}, timeout=CONSUMED_SECONDS)
        run = session.current or session.resuming
        if run is not None and run.answer(answering):
            return await self._confirmed(session, run, answering)
        if session.paused is not None and run is None:
            return await self._confirmed(session, self._resume(session, session.paused, (answering,)), answering)
        return await self._unclaim(session, answering, "The agent no longer waits for this answer.")

    async def _confirmed(self, session: Session, run: TurnRun, answering: Answering) -> Reply:
        """Consumed once the resumed turn's row exists and the answer's frame was written whole."""
        took = False
        try:
            async with asyncio.timeout(CONSUMED_SECONDS):
                admitted = await asyncio.shield(run.admitted)
                took = admitted and await run.took(answering.row.interaction_id)
        except TimeoutError:
            return Reply(202, desk.view(answering.row))
        except RunnerError as error:
            return await self._unclaim(session, answering, error.message, error)
        if admitted and not took:
            return await self._not_taken(session, run, answering)
        if not admitted:
            refusal = owned_elsewhere(TAKEN) if self._services.owners.shared else None
            return await self._unclaim(session, answering, "The session could not be resumed.", refusal)
        row = desk.consumed(answering.row)
        session.outbox.questions([row])
        await session.outbox.flush()
        written = run.live is not None and await run.live.connection.flush(CONSUMED_SECONDS)
        return Reply(200 if written else 202, desk.view(row))

    async def _not_taken(self, session: Session, run: TurnRun, answering: Answering) -> Reply:
        """The answer was not given: its question is closed, or the turn ended: it came back, or waits on."""
        if session.outbox.owes_questions:
            await session.outbox.flush()
        row = await self._row(session, answering.row.interaction_id)
        if InteractionStatus(row.status) in interaction.CLOSED and row.status != InteractionStatus.CONSUMED:
            raise RunnerError("interaction_closed", str((row.answer or {}).get("reason", "This question is closed.")))
        await asyncio.wait({run.ended}, timeout=GONE_SECONDS)
        row = await self._row(session, answering.row.interaction_id)
        if row.status == InteractionStatus.PENDING and run.ended.done():
            error = run.ended.result().error
            if error is not None:
                raise RunnerError(error.code, f"{error.message} The question is still open.")
        held = session.paused.questions.get(row.interaction_id) if session.paused is not None else None
        if held is not None and held.status == InteractionStatus.ANSWERED:
            return Reply(202, desk.view(row))
        return await self._unclaim(session, answering, "The session could not be resumed.")

    async def _unclaim(
        self, session: Session, answering: Answering, why: str, error: RunnerError | None = None
    ) -> Reply:
        """A failed resume returns the answer to pending and says why (case F2)."""
        row = desk.unclaimed(answering.row, why)
        if await self._services.store.answer_interaction(row, InteractionStatus.ANSWERED):
            self.remember(session, row)
            session.tell(session.key, row.interaction_id, "given back", answering.row.status, row.status)
            code, extra = (error.code, error.extra) if error is not None else ("session_turn_in_use", {})
            raise RunnerError(code, f"{why} The question is still open.", **extra)
        raise RunnerError("interaction_closed", why)


def _prompt_id(paused: Paused) -> str | None:
    return paused.prompt.prompt_id if paused.prompt is not None else None


def _known(row: InteractionRow) -> Reply:
    return Reply(200 if row.status == InteractionStatus.CONSUMED else 202, desk.view(row))
