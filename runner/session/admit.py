"""From the first heartbeat to a durable turn: admitted, refused, or nothing at all (DESIGN 3.1)."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from runner.errors import RunnerError
from runner.leases.port import BeatAnswer
from runner.rules import admission
from runner.session import spares
from runner.session.context import TurnContext
from runner.session.outbox import Batch
from runner.store.port import Admission
from runner.store.replay import same_turn
from runner.terms import EventType, PromptState

if TYPE_CHECKING:
    from runner.session.run import TurnRun

log = logging.getLogger("runner.session")


class Overtaken(Exception):
    """Another replica admitted the same prompt since it was looked up: look again, and attach."""


async def admit(run: TurnRun, turn: TurnContext) -> bool:
    """Ask the plane, then make the turn durable; False when it was refused: then nothing was written or touched.

    Raises:
        RunnerError: ``plane_unavailable``, ``store_unavailable``, ``session_ended``: nothing is held any more.
        Overtaken: likewise.
    """
    session, services = turn.session, turn.services
    answer = await _first_beat(turn)
    busy = services.pool.busy(session.key) or session.current is not None
    gone = turn.resumes is not None and session.paused is not turn.resumes
    # A turn that another one overtook on its way has nothing to send any more.
    gone = gone or (turn.resumes is None and session.queue.run is not run)
    verdict = admission.first_answer(admitted=answer.admitted, locally_busy=busy, chain_gone=gone)
    if verdict is admission.Verdict.REFUSED:
        if answer.admitted:
            await services.beats.give_back(turn.beat("running"))
        return False
    session.current = run
    stored = False
    try:
        if services.owners.shared:
            await _catch_up(turn, answer)
            if (turn.resumes is not None and session.paused is not turn.resumes) or _left(turn):
                # What was read in between knows that the chain, or a queued prompt, went on or ended elsewhere.
                return False
        if session.effective is not run.based_on:
            # Another turn was accepted while this one's beat was on its way: fields left out keep that one's values.
            turn.effective = turn.merge(session.effective)
        _mark_early(turn)
        spares.claim(turn, answer.epoch)
        stored = await _make_durable(turn, answer)
    finally:
        if not stored:
            session.current = None
            spares.unclaim(turn)
            await services.beats.give_back(turn.beat("running"))
    if stored:
        spares.settle(turn)
        _accept(turn)
    return stored


async def _first_beat(turn: TurnContext) -> BeatAnswer:
    """The plane's answer; of an owner that is provably gone the session is taken over (DESIGN 3.1.7, 3.1.10)."""
    services, owners = turn.services, turn.services.owners
    beat = turn.beat("running")
    try:
        left = turn.session.unfinished
        if left is not None and owners.shared and await owners.close_lost(left):
            await services.reload(turn.session)
            beat = turn.beat("running")
        if left is not None and owners.forgotten(left):
            # Its replica may be alive, and has one lease time to say so.
            answer = BeatAnswer(False, False, left.replica_id, 0, 0.0)
        else:
            answer = await services.beats.first(beat)
    except RunnerError as error:
        if error.code != "plane_unavailable" or not owners.shared or services.settings.leases.on_unreachable != "open":
            raise
        if turn.session.unfinished is not None:
            # Nobody can say whether that turn's replica is alive.
            return BeatAnswer(False, False, turn.session.unfinished.replica_id, 0, 0.0)
        return services.beats.unfenced(beat)
    if not answer.admitted and answer.owner is not None and await owners.gone(answer.owner):
        return await services.beats.first(turn.beat("running"))
    return answer


async def _catch_up(turn: TurnContext, answer: BeatAnswer) -> None:
    """Read the session again where another replica had it since; the lease is held, so nobody else writes now."""
    session, services = turn.session, turn.services
    waited = turn.resumes is None and turn.predecessor is None and any(prompt.stored for prompt in turn.batch)
    if answer.epoch == session.head.epoch + 1 and session.unfinished is None and not waited:
        return
    await services.reload(session)
    if session.head.epoch >= answer.epoch or session.unfinished is not None:
        raise RunnerError("plane_unavailable", "The session has just changed hands. Try again.", retry_after=1)
    prompt = turn.prompt
    if prompt is not None and turn.resumes is None and not prompt.stored:
        known = await services.store.prompt(session.project, session.session_id, prompt.prompt_id)
        if known is not None:
            raise Overtaken


def _left(turn: TurnContext) -> bool:
    """Whether a queued prompt that the turn has read is none any more, although nobody here cancelled it."""
    here = turn.session.queue.prompts
    queued = [prompt for prompt in turn.batch if prompt.state is PromptState.QUEUED]
    return turn.resumes is None and any(here.get(prompt.prompt_id) is not prompt for prompt in queued)


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
        await session.outbox.prompts_first()
        return await _insert(turn, answer)


async def _insert(turn: TurnContext, answer: BeatAnswer) -> bool:
    session, outbox, head = turn.session, turn.session.outbox, turn.session.head
    if session.paused is not None and session.paused.live is not None:
        # Until this turn is admitted or not, nobody else may write: the agent's words wait in its inbox.
        session.paused.live.inbox.on_items = None
    before, busy_before = head.cursor, session.busy
    earlier = outbox.take()
    head.epoch, head.n, turn.epoch = answer.epoch, 0, answer.epoch
    turn.journal.hold()
    _announce(turn)
    records = [*earlier.records, *outbox.take().records]
    row = session.row(turn.services.clock.now_ms(), turn.effective.config)
    # The one that looked like the turn's owner may have been cancelled since: its result stays.
    told = turn.prompt.result.result() if turn.prompt is not None and turn.prompt.told else None
    admission = Admission(row, turn.turn_row(), turn.prompt_row(told), list(earlier.questions.values()), records)
    stored = False
    try:
        stored = await _stored(turn, admission)
    finally:
        if stored:
            outbox.give_back(Batch(prompts=earlier.prompts))
        else:
            head.epoch, head.n = before
            session.busy = busy_before
            outbox.give_back(earlier)
            turn.journal.discard()
    return stored


async def _stored(turn: TurnContext, admission: Admission) -> bool:
    """Admitted by the store, at the second try where the first had no answer: it may have been written all the same."""
    store, row = turn.services.store, admission.turn
    try:
        return await store.admit(admission)
    except RunnerError as error:
        if error.code != "store_unavailable":
            raise
        log.warning("whether turn %s was admitted is not known yet: %s", turn.turn_id, error.message)
    return await store.admit(admission) or same_turn(await store.turn(row.project, row.session_id, row.turn_id), row)


def _announce(turn: TurnContext) -> None:
    turn.session.begin_busy(turn.journal.outside())
    data: dict[str, Any] = {
        "turn_id": turn.turn_id,
        "epoch": turn.epoch,
        "replica_id": turn.services.replica_id,
        "prompt_ids": [prompt.prompt_id for prompt in turn.batch],
    }
    if turn.resumes is not None:
        data["resumes"] = turn.resumes.turn_id
    turn.journal.event(EventType.TURN_ADMITTED, data)


def _accept(turn: TurnContext) -> None:
    """The turn exists: its configuration is the session's, its prompt can be attached to, its events are shown."""
    session = turn.session
    if turn.effective is not session.effective:
        session.effective = turn.effective
    for prompt in turn.batch:
        prompt.turn_id = turn.turn_id
        if turn.resumes is not None and prompt.result.done():
            prompt.result = asyncio.get_running_loop().create_future()
        elif turn.resumes is None and not prompt.stored:
            prompt.position, prompt.since = session.log.end, (turn.epoch, 0)
        prompt.stored = True
        session.remember(prompt)
    if turn.resumes is not None:
        session.queue.resume_chain()
    turn.times.admitted = turn.services.clock.monotonic()
    turn.journal.release()
