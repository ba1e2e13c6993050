"""What a boot finds: turns whose replica is gone get their one ending (DESIGN 3.9, case M10)."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from runner.clock import Clock
from runner.errors import RunnerError
from runner.ids import outside_of, record_id
from runner.interactions import desk
from runner.session.ending import Times
from runner.store.port import Ending, InteractionRow, PromptRow, RecordRow, SessionRow, Store, TurnRow
from runner.terms import EventType, InteractionStatus, Outcome, PromptState
from runner.wire.codec import to_json

log = logging.getLogger("runner.session")
PAGE = 500


async def reconcile(store: Store, clock: Clock) -> int:
    """End every turn that has no ending as ``lost``; how many there were. Nothing runs yet when this is called."""
    turns = await store.open_turns()
    for turn in turns:
        await _lose(store, clock, turn)
    chains: dict[tuple[str, str], list[InteractionRow]] = {}
    for status in (InteractionStatus.PENDING, InteractionStatus.ANSWERED):
        for row in await store.open_interactions(status):
            chains.setdefault((row.project, row.session_id), []).append(row)
    for (project, session_id), rows in chains.items():
        await _lose_chain(store, clock, project, session_id, rows)
    return len(turns)


async def _lose_chain(store: Store, clock: Clock, project: str, session_id: str, rows: list[InteractionRow]) -> None:
    """The questions' agent died with its replica: they expire, and a chain that was paused on them has failed."""
    closed = [desk.closed(row, InteractionStatus.EXPIRED) for row in rows]
    session = await store.session(project, session_id)
    last = await store.last_turn(project, session_id)
    if session is None or last is None or last.outcome != Outcome.PAUSED:
        await store.append([], closed)
        return
    events: list[tuple[EventType, dict[str, Any], bool]] = [
        (EventType.INTERACTION_CLOSED, {"interaction_id": row.interaction_id, "status": row.status}, False)
        for row in closed
    ]
    prompt = await store.prompt(project, session_id, last.prompt_id) if last.prompt_id else None
    if prompt is not None:
        events.append((EventType.PROMPT_ENDED, {"prompt_id": prompt.prompt_id, "state": PromptState.FAILED}, False))
    events.append((EventType.SESSION_IDLE, {}, False))
    now = clock.now_ms()
    n = await _last_n(store, session, last.epoch)
    records = [_record(last, type, data, n + k, now, inside) for k, (type, data, inside) in enumerate(events, start=1)]
    prompts = [replace(prompt, state=PromptState.FAILED)] if prompt is not None else []
    await store.append(records, closed, prompts)
    await store.save_session(replace(session, head_epoch=last.epoch, head_n=n + len(events), updated_at=now))


async def _lose(store: Store, clock: Clock, turn: TurnRow) -> None:
    session = await store.session(turn.project, turn.session_id)
    if session is None:
        log.error("turn %s has no session", turn.turn_id)
        return
    prompt = await store.prompt(turn.project, turn.session_id, turn.prompt_id) if turn.prompt_id else None
    error = RunnerError("execution_lost", "The runner stopped while this turn was running.")
    now = clock.now_ms()
    n = await _last_n(store, session, turn.epoch)
    events: list[tuple[EventType, dict[str, Any], bool]] = [(EventType.ERROR, error.as_event(), True)]
    if turn.prompt_id is not None:
        events.append((EventType.PROMPT_ENDED, {"prompt_id": turn.prompt_id, "state": PromptState.FAILED}, True))
    events.append((EventType.DONE, {"turn_id": turn.turn_id, "outcome": Outcome.LOST}, True))
    events.append((EventType.SESSION_IDLE, {}, False))
    records = [_record(turn, type, data, n + k, now, inside) for k, (type, data, inside) in enumerate(events, start=1)]
    result = _result(turn, error)
    ended = replace(turn, outcome=Outcome.LOST, ended_at=now, result=result)
    head = replace(session, head_epoch=turn.epoch, head_n=n + len(events), updated_at=now)
    await store.end(Ending(head, ended, _failed(prompt, result), (), records))


def _failed(prompt: PromptRow | None, result: dict[str, Any]) -> PromptRow | None:
    return replace(prompt, state=PromptState.FAILED, result=result) if prompt is not None else None


async def _last_n(store: Store, session: SessionRow, epoch: int) -> int:
    last = session.head_n if session.head_epoch == epoch else 0
    after = (epoch, 0)
    while True:
        rows = await store.records(session.project, session.session_id, after, PAGE)
        if rows:
            after = (rows[-1].epoch, rows[-1].n)
            last = max([last, *(row.n for row in rows if row.epoch == epoch)])
        if len(rows) < PAGE:
            return last


def _record(turn: TurnRow, type: EventType, data: dict[str, Any], n: int, at: int, inside: bool) -> RecordRow:
    turn_id = turn.turn_id if inside else None
    return RecordRow(
        turn.project,
        turn.session_id,
        record_id(turn.session_id, turn_id or outside_of(turn.epoch), n),
        turn_id,
        turn.prompt_id if inside else None,
        turn.epoch,
        n,
        type,
        to_json(data),
        at,
    )


def _result(turn: TurnRow, error: RunnerError) -> dict[str, Any]:
    return {
        "ok": False,
        "session_id": turn.session_id,
        "turn_id": turn.turn_id,
        "prompt_ids": [turn.prompt_id] if turn.prompt_id else [],
        "outcome": Outcome.LOST.value,
        "stop_reason": None,
        "error": error.as_event(),
        "text": "",
        "usage": {},
        "start": None,
        "reason": None,
        "timings": Times(0.0).timings(0.0),
    }
