"""From the first heartbeat to a durable turn: admitted, refused, or nothing at all (DESIGN 3.1)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from runner.leases.port import BeatAnswer
from runner.rules import admission
from runner.session.context import TurnContext
from runner.session.outbox import Batch
from runner.store.port import Admission
from runner.terms import EventType

if TYPE_CHECKING:
    from runner.session.run import TurnRun


async def admit(run: TurnRun, turn: TurnContext) -> bool:
    """Ask the plane, then make the turn durable; False when it was refused: then nothing was written or touched.

    Raises:
        RunnerError: ``plane_unavailable``, ``store_unavailable``: nothing is held any more.
    """
    session, services = turn.session, turn.services
    answer = await services.beats.first(turn.beat("running"))
    busy = services.pool.busy(session.key) or session.current is not None
    gone = turn.resumes is not None and session.paused is not turn.resumes
    verdict = admission.first_answer(admitted=answer.admitted, locally_busy=busy, chain_gone=gone)
    if verdict is admission.Verdict.REFUSED:
        if answer.admitted:
            await services.beats.end(turn.beat("ended", parked=services.pool.live(session.key) is not None))
        return False
    session.current = run
    if session.effective is not run.based_on:
        # Another turn was accepted while this one's beat was on its way: fields left out keep that one's values.
        turn.effective = turn.merge(session.effective)
    stored = False
    try:
        _mark_early(turn)
        stored = await _make_durable(turn, answer)
    finally:
        if not stored:
            session.current = None
            await services.beats.end(turn.beat("ended", parked=services.pool.live(session.key) is not None))
    if stored:
        _accept(turn)
    return stored


def _mark_early(turn: TurnContext) -> None:
    """The warm agent's processes are marked while the row is written: both take a moment."""
    live = turn.services.pool.warm(turn.session.key)
    if live is not None and live.alive:
        live.mark(turn.turn_id)


async def _make_durable(turn: TurnContext, answer: BeatAnswer) -> bool:
    session = turn.session
    if session.outbox.owes_endings:
        await session.outbox.flush()
    session.learn_secrets(turn.effective.secrets.values())
    turn.journal.redactor = session.redactor
    async with session.outbox.writing:
        return await _insert(turn, answer)


async def _insert(turn: TurnContext, answer: BeatAnswer) -> bool:
    session, outbox, head = turn.session, turn.session.outbox, turn.session.head
    if session.paused is not None:
        # Until this turn is admitted or not, nobody else may write: the agent's words wait in its inbox.
        session.paused.live.inbox.on_items = None
    before, busy_before = (head.epoch, head.n), session.busy
    earlier = outbox.take()
    head.epoch, head.n, turn.epoch = answer.epoch, 0, answer.epoch
    turn.journal.hold()
    _announce(turn)
    records = [*earlier.records, *outbox.take().records]
    row = session.row(turn.services.clock.now_ms(), turn.effective.config)
    admission = Admission(row, turn.turn_row(), turn.prompt_row(), list(earlier.questions.values()), records)
    stored = False
    try:
        stored = await turn.services.store.admit(admission)
    finally:
        if stored:
            outbox.give_back(Batch(prompts=earlier.prompts))
        else:
            head.epoch, head.n = before
            session.busy = busy_before
            outbox.give_back(earlier)
            turn.journal.discard()
    return stored


def _announce(turn: TurnContext) -> None:
    turn.session.begin_busy(turn.journal.outside())
    data: dict[str, Any] = {
        "turn_id": turn.turn_id,
        "epoch": turn.epoch,
        "replica_id": turn.services.replica_id,
        "prompt_ids": [turn.prompt.prompt_id] if turn.prompt is not None else [],
    }
    if turn.resumes is not None:
        data["resumes"] = turn.resumes.turn_id
    turn.journal.event(EventType.TURN_ADMITTED, data)


def _accept(turn: TurnContext) -> None:
    """The turn exists: its configuration is the session's, its prompt can be attached to, its events are shown."""
    session, prompt = turn.session, turn.prompt
    if turn.effective is not session.effective:
        session.effective = turn.effective
    if prompt is not None:
        prompt.turn_id = turn.turn_id
        if turn.resumes is None:
            prompt.position, prompt.since = session.log.end, (turn.epoch, 0)
        elif prompt.result.done():
            prompt.result = asyncio.get_running_loop().create_future()
        session.remember(prompt)
    turn.times.admitted = turn.services.clock.monotonic()
    turn.journal.release()
