"""The order at the end: ending durable, seat parked or out of the map, end beat, result line (DESIGN 3.2)."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any, Final

from runner.errors import RunnerError
from runner.leases.port import Phase
from runner.rules.bounds import TEXT_CHARS
from runner.rules.isolation import short_of_memory
from runner.rules.prompts import Move
from runner.rules.reuse import Destroyed, Parked, after_ending
from runner.rules.turn import End
from runner.rules.usage import with_turn
from runner.session import counting, usage
from runner.session.context import TurnContext
from runner.session.ending import result_of
from runner.session.issued import Issued, rows_of_ending
from runner.session.session import LastTurn, Paused
from runner.store.port import Ending, TurnRow
from runner.store.replay import same_ending
from runner.terms import EventType, Outcome, PromptState, StopReason
from runner.turn.live import LiveSeat

log = logging.getLogger("runner.session")
END_TRIES: Final = 3
END_RETRY_SECONDS: Final = 0.2
ENDED: Final = frozenset(PromptState) - {PromptState.QUEUED, PromptState.ACTIVE, PromptState.STORED}
GIVEN_UP: Final = frozenset({StopReason.DRAIN, StopReason.LEASE_LOST})
OWED_RETRY_SECONDS: Final = 1.0


async def close_turn(turn: TurnContext, end: End) -> tuple[End, dict[str, Any]]:
    """Everything between the settled agent and the result line; how the turn ended, and its result.

    That is what the store says where somebody else ended it first (DESIGN 3.9).
    """
    session = turn.session
    killed = turn.live.killed_for_memory() if turn.live is not None else 0
    if end.error is not None:
        helped = turn.services.provisioner.with_help(turn.effective.harness, end.error)
        end = replace(end, error=short_of_memory(helped, killed))
    kept = _kept(turn)
    session.presence.turn_over()
    result = await _make_durable(turn, end)
    if result is None:
        end, result = await _ended_elsewhere(turn, end)
    else:
        counting.turn_ended(turn.services.metrics, session.project, turn.effective.harness, result)
    turn.given_back = returns(turn, end)
    goes_on = end.outcome is not Outcome.PAUSED and end.label not in GIVEN_UP and session.queue.goes_on()
    turn.hands_over = goes_on and session.queue.waits_behind(turn.batch)
    seat = _seat_after(turn, end, kept)
    if end.label is StopReason.LEASE_LOST and seat is not None:
        seat = Destroyed("superseded")
    _place_seat(turn, end, seat)
    session.last_turn = LastTurn(turn.turn_id, end.outcome.value, result["stop_reason"], session.updated_at)
    if not turn.hands_over:
        await _give_up(turn, "paused" if end.outcome is Outcome.PAUSED else "parked")
    return end, result


def move_of(end: End, frame_sent: bool) -> Move:
    """What an ending does to the prompt that owns the turn."""
    match prompt_state(end, frame_sent):
        case PromptState.DONE:
            return Move.FINISH
        case PromptState.ABORTED:
            return Move.ABORT
        case PromptState.CANCELLED:
            return Move.CANCEL
        case _:
            return Move.FAIL


def prompt_state(end: End, frame_sent: bool) -> PromptState:
    """``prompt_ended.state`` of an ending (DESIGN 3.2)."""
    match end.outcome:
        case Outcome.COMPLETED:
            return PromptState.DONE
        case Outcome.CANCELLED:
            return PromptState.ABORTED if frame_sent else PromptState.CANCELLED
        case _:
            return PromptState.FAILED


def _own_state(turn: TurnContext, end: End) -> PromptState | None:
    """What became of the turn's prompt; None when it waits on for another turn."""
    assert turn.prompt is not None
    if turn.prompt.state in ENDED:
        return turn.prompt.state
    if returns(turn, end):
        return None
    return prompt_state(end, turn.machine.frame_sent or turn.resumes is not None)


def returns(turn: TurnContext, end: End) -> bool:
    """Whether what the turn has read is queued as before: the replica gave it up before it was sent (case M4)."""
    unsent = not turn.claimed and turn.resumes is None and end.outcome is not Outcome.PAUSED
    return unsent and end.label in GIVEN_UP and turn.prompt is not None and turn.prompt.state is PromptState.QUEUED


async def _give_up(turn: TurnContext, phase: Phase) -> None:
    """Send the end beat, now or once the ending is durable: who took the session before would end the turn as lost."""
    if turn.session.outbox.owes_endings and turn.services.owners.shared:
        turn.services.tasks.spawn(f"end beat {turn.turn_id}", _end_beat_later(turn, phase))
    else:
        await _end_beat(turn, phase)


async def _end_beat(turn: TurnContext, parked: Phase) -> None:
    """Keep the lease of a parked seat, release everything else; the seat may be lost meanwhile (case L3)."""
    beats = turn.services.beats
    if _holds_seat(turn):
        await beats.end(turn.beat(parked, parked=True))
    if not _holds_seat(turn):
        await beats.end(turn.beat("ended"))


async def _end_beat_later(turn: TurnContext, parked: Phase) -> None:
    """Behind the ending, however long the store keeps it waiting; until then the lease is renewed."""
    while True:
        try:
            await turn.session.outbox.flush()
        except Exception as error:
            log.log(logging.DEBUG if isinstance(error, RunnerError) else logging.ERROR, "an end beat waits: %s", error)
            await asyncio.sleep(OWED_RETRY_SECONDS)
        else:
            await _end_beat(turn, parked)
            return


def _holds_seat(turn: TurnContext) -> bool:
    return turn.live is not None and turn.services.pool.book.holds(turn.live.seat)


def _kept(turn: TurnContext) -> bool:
    grace = turn.services.settings.server.reader_grace_seconds
    there = turn.session.presence.there(turn.services.clock.monotonic(), grace)
    return there or turn.keep or any(prompt.keep for prompt in turn.batch)


def _seat_after(turn: TurnContext, end: End, kept: bool) -> Parked | Destroyed | None:
    if turn.live is None:
        return None
    if turn.unsure:
        return Destroyed("not_settled")
    windows = turn.services.windows[turn.effective.provider]
    return after_ending(end, windows, kept=kept, agent_alive=turn.live.alive, claimed=turn.hands_over)


def _place_seat(turn: TurnContext, end: End, seat: Parked | Destroyed | None) -> None:
    live = turn.live if _holds_seat(turn) else None
    parked = seat if isinstance(seat, Parked) and live is not None else None
    if end.outcome is Outcome.PAUSED:
        turn.session.paused = _chain(turn, live if parked is not None else None)
    if live is None or seat is None:
        return
    if parked is None:
        assert isinstance(seat, Destroyed)
        turn.services.pool.destroy(live.seat, seat.verdict)
        return
    live.turns += 1
    usage.parks(turn.services, turn.session, live)
    turn.services.pool.park(live, parked)


def _chain(turn: TurnContext, live: LiveSeat | None) -> Paused:
    """What waits for a human from now on; without a seat it is cold."""
    questions = dict(turn.driver.questions.open) if turn.driver is not None else {}
    if turn.driver is None and turn.resumes is not None:
        questions = dict(turn.resumes.questions)
    lost = turn.live.tools if live is None and turn.live is not None else {}
    tools = {name: tool.data for name, tool in lost.items() if not tool.ended}
    return Paused(turn.turn_id, turn.prompt, live, questions, begun=turn.times.begun, tools=tools)


async def _make_durable(turn: TurnContext, end: End) -> dict[str, Any] | None:
    """The result; None where the turn had its ending already: then nothing was written."""
    session = turn.session
    turn.journal.close_block()
    if turn.machine.frame_sent:
        session.agent_state["has_context"] = True
        session.agent_state["unanswered"] = end.outcome is not Outcome.COMPLETED
    usage.turn_ends(turn)
    result = result_of(turn, end, turn.services.clock.monotonic())
    before, session.usage = session.usage, with_turn(session.usage, result["usage"])
    async with session.outbox.writing:
        turn.journal.hold()
        _last_events(turn, end)
        commands = [issued for issued in turn.commands if issued.stored]
        ending = _ending(turn, end, result, commands)
        written = await _write(turn, ending)
        if written:
            session.settled()
    if written is False:
        await session.outbox.set_aside(ending)
        session.settled()
        turn.journal.discard()
        session.usage = before
        return None
    if written is None:
        session.outbox.owe(ending)
    for issued in commands if ending.commands else ():
        issued.written = True
    turn.journal.release()
    return result


async def _ended_elsewhere(turn: TurnContext, end: End) -> tuple[End, dict[str, Any]]:
    """The ending that came first; a store that cannot be asked now leaves the turn lost."""
    outcome, result = Outcome.LOST, None
    try:
        row = await _stored(turn)
    except Exception as error:
        log.warning("how turn %s ended is not known here: %s", turn.turn_id, error)
    else:
        if row is not None and row.outcome is not None:
            outcome, result = Outcome(row.outcome), row.result
        if outcome is end.outcome and result is not None:
            return end, result
    over = RunnerError("superseded", "Another replica ended this turn.")
    ended = replace(end, outcome=outcome, stop_reason=None, settled=False, error=over, label=StopReason.LEASE_LOST)
    return ended, result or result_of(turn, ended, turn.services.clock.monotonic())


def _ending(turn: TurnContext, end: End, result: dict[str, Any], commands: list[Issued]) -> Ending:
    """The turn's last entry, with everything of its session that is not durable yet."""
    session = turn.session
    now_ms = session.updated_at = turn.services.clock.now_ms()
    batch = session.outbox.take()
    questions = batch.questions | {row.interaction_id: row for row in turn.closed}
    return Ending(
        session.row(now_ms),
        turn.turn_row(end, result, now_ms),
        turn.prompt_row(None if returns(turn, end) else result),
        list(questions.values()),
        batch.records,
        list(batch.prompts.values()),
        rows_of_ending(commands, end, now_ms),
    )


async def _write(turn: TurnContext, ending: Ending) -> bool | None:
    """True: written. False: somebody else wrote the ending first. None: the store cannot be used."""
    for attempt in range(1, END_TRIES + 1):
        try:
            if await turn.services.store.end(ending):
                return True
            # A try before this one may have been written although its answer never came.
            return attempt > 1 and same_ending(await _stored(turn), ending.turn)
        except Exception as error:
            log.error("the ending of turn %s is not durable: %s", turn.turn_id, error)
            if attempt < END_TRIES:
                await asyncio.sleep(END_RETRY_SECONDS)
    return None


async def _stored(turn: TurnContext) -> TurnRow | None:
    return await turn.services.store.turn(turn.session.project, turn.session.session_id, turn.turn_id)


def _last_events(turn: TurnContext, end: End) -> None:
    journal = turn.journal
    if journal.truncated:
        journal.event(EventType.NOTICE, {"kind": "result_text_cut", "characters": TEXT_CHARS})
    if end.error is not None:
        journal.event(EventType.ERROR, end.error.as_event())
    if end.outcome is not Outcome.PAUSED and turn.prompt is not None and not turn.prompt.told:
        state = _own_state(turn, end)
        if state is not None:
            turn.prompt.state, turn.prompt.told = state, True
            journal.event(EventType.PROMPT_ENDED, {"prompt_id": turn.prompt.prompt_id, "state": state.value})
    done: dict[str, Any] = {"turn_id": turn.turn_id, "outcome": end.outcome.value}
    if end.stop_reason in ("cancelled", "paused"):
        done["stop_reason"] = end.stop_reason
    journal.event(EventType.DONE, done)
