"""What a boot finds: whatever a replica that is gone left open gets its one ending (DESIGN 3.9, case M10)."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import orjson

from runner.clock import Clock
from runner.errors import RunnerError
from runner.ids import outside_of, record_id
from runner.interactions import desk
from runner.rules import command as rules
from runner.rules.interaction import UNCLAIMED, Cause
from runner.rules.pool import Key
from runner.rules.unfinished import READ, Unfinished, unfinished
from runner.rules.usage import Meter, spent_of, with_turn
from runner.session.ending import Times, result_without_agent
from runner.session.history import pages
from runner.store.port import CommandRow, Ending, InteractionRow, PromptRow, RecordRow, SessionRow, Store, TurnRow
from runner.terms import CommandState, EventType, InteractionStatus, Outcome, PromptState
from runner.wire.codec import storable_json

log = logging.getLogger("runner.session")
WAITING: Final = (Outcome.PAUSED, Outcome.LOST)
"""Endings behind which a chain may wait on: its prompt is active then (a lost turn that sent nothing, case F2)."""


async def reconcile(store: Store, clock: Clock) -> int:
    """End every turn that has no ending as ``lost``; how many there were. Nothing runs yet when this is called.

    Questions expire where their chain died with its replica; those of a cold chain wait on: an answer resumes it.
    """
    turns = await store.open_turns()
    for turn in turns:
        await close_session(store, clock, (turn.project, turn.session_id), turn)
    asked = {(row.project, row.session_id) for row in await _open_questions(store)}
    for key in asked:
        last = await store.last_turn(*key)
        if last is None or last.outcome not in WAITING or not await _active(store, last):
            await close_session(store, clock, key, None)
    for turn in await store.paused_turns():
        key = (turn.project, turn.session_id)
        if key not in asked and await _active(store, turn):
            await close_session(store, clock, key, None)
    for row in await store.open_interactions(InteractionStatus.ANSWERED):
        # Whoever claimed it is gone: it can be answered again, and says why.
        await store.answer_interaction(desk.unclaimed(row, UNCLAIMED), InteractionStatus.ANSWERED)
    return len(turns)


async def _active(store: Store, turn: TurnRow) -> bool:
    prompt = await store.prompt(turn.project, turn.session_id, turn.prompt_id) if turn.prompt_id is not None else None
    return prompt is not None and prompt.state == PromptState.ACTIVE


class Newest(NamedTuple):
    """The session's head, and whether it was idle behind what its row says."""

    head: tuple[int, int]
    idle: bool


async def newest(store: Store, row: SessionRow) -> Newest:
    """Records outside of a turn may be newer than what the session's row says."""
    head, idle = (row.head_epoch, row.head_n), False
    async for rows in pages(store, (row.project, row.session_id), head):
        head = rows[-1].cursor
        idle = idle or any(record.type == EventType.SESSION_IDLE for record in rows)
    return Newest(head, idle)


async def told(store: Store, key: Key) -> Unfinished:
    """What the session's records leave open."""
    folded: list[tuple[str, dict[str, Any]]] = []
    async for rows in pages(store, key, None):
        folded += [(row.type, orjson.loads(row.data)) for row in rows if row.type in READ]
    return unfinished(folded)


async def _open_questions(store: Store) -> list[InteractionRow]:
    return [
        row
        for status in (InteractionStatus.PENDING, InteractionStatus.ANSWERED)
        for row in await store.open_interactions(status)
    ]


async def close_session(store: Store, clock: Clock, key: Key, turn: TurnRow | None, epoch: int | None = None) -> bool:
    """Write every ending that a session lacks, in ``epoch`` (granted to the caller; None: nobody else writes).

    Whether the turn got its ending by that.

    Raises:
        RunnerError: ``store_unavailable``, also while something of the session is on its way to the store still.
    """
    await store.caught_up(*key)
    session = await store.session(*key)
    if session is None:
        log.error("session %s has no row", key[1])
        return False
    head = max((session.head_epoch, session.head_n), (turn.epoch, 0) if turn is not None else (0, 0))
    head = max(head, (await newest(store, session)).head)
    open_now = await told(store, key)
    open_now.busy = open_now.busy and not await store.waiting_prompts(key)
    asked = [row for row in await _open_questions(store) if (row.project, row.session_id) == key]
    questions, waits_on = desk.close_all(asked, Cause.LOST), turn is not None and open_now.unsent
    if turn is not None and turn.prompt_id is not None:
        own = await store.prompt(*key, turn.prompt_id)
        if own is None or own.state in (PromptState.ACTIVE, PromptState.QUEUED):
            open_now.prompts[turn.prompt_id] = None
    if waits_on:
        # Its agent had nothing yet: the chain waits on, and its answers come back.
        questions = [desk.unclaimed(row, UNCLAIMED) for row in asked if row.status == InteractionStatus.ANSWERED]
    if open_now.context:
        unanswered = bool(open_now.prompts) or bool(session.agent_state.get("unanswered"))
        state = {**session.agent_state, "has_context": True, "unanswered": unanswered}
        session = replace(session, agent_state=state)
    closing = _Closing(session, head[0] + 1 if epoch is None else epoch, clock.now_ms(), turn, waits_on)
    closing.write(open_now, questions)
    prompts = [known for name in open_now.prompts if (known := await store.prompt(*key, name)) is not None]
    return await _save(store, closing, questions, prompts)


async def _save(store: Store, closing: _Closing, questions: list[InteractionRow], prompts: list[PromptRow]) -> bool:
    turn, records = closing.turn, closing.records
    ended_as = PromptState.ACTIVE if closing.waits_on else PromptState.FAILED
    failed = [replace(row, state=ended_as) for row in prompts]
    head = replace(closing.session, head_epoch=closing.epoch, head_n=len(records), updated_at=closing.at)
    if turn is None:
        await store.append(records, questions, failed)
        await store.save_session(head)
        return False
    usage = await _used(store, closing.session, turn)
    result = _result(turn, turn.prompt_id) | {"usage": usage}
    head = replace(head, usage=with_turn(head.usage, usage))
    failed = [row if row.result and row.prompt_id != turn.prompt_id else _interrupted(turn, row) for row in failed]
    own = next((row for row in failed if row.prompt_id == turn.prompt_id), None)
    others = [row for row in failed if row.prompt_id != turn.prompt_id]
    ended = replace(turn, outcome=Outcome.LOST, ended_at=closing.at, result=result)
    commands = [
        _settled(row, closing.at)
        for row in await store.open_commands((turn.project, turn.session_id))
        if row.turn_id == turn.turn_id
    ]
    return await store.end(Ending(head, ended, own, questions, records, others, commands))


async def _used(store: Store, session: SessionRow, turn: TurnRow) -> dict[str, Any]:
    """What is known of a lost turn's usage: what its agent told while it ran, and how long it showed something."""
    meter, spent, last = Meter(), spent_of(session.agent_state.get("spent")), turn.started_at
    async for rows in pages(store, (turn.project, turn.session_id), (turn.epoch, 0)):
        for row in rows:
            last = max(last, row.at) if row.turn_id == turn.turn_id else last
            if row.turn_id == turn.turn_id and row.type == EventType.USAGE:
                meter.told(orjson.loads(row.data), spent)
    return meter.usage((last - turn.started_at) / 1000)


def _settled(command: CommandRow, at: int) -> CommandRow:
    """A Stop of the lost turn; one that was shown as applied stays so."""
    state, outcome = rules.settled(Outcome.LOST, None)
    state = CommandState.APPLIED if command.state == CommandState.APPLIED else state
    return replace(command, state=state.value, outcome=outcome.value, finished_at=at)


@dataclass(slots=True)
class _Closing:
    """Writes a session's last events of a lost replica.

    They have an epoch of their own: the lost replica may have shown frames, and their cursors are never used again.
    ``waits_on``: only the turn ends, not its chain.
    """

    session: SessionRow
    epoch: int
    at: int
    turn: TurnRow | None
    waits_on: bool = False
    records: list[RecordRow] = field(default_factory=list)

    def write(self, open_now: Unfinished, questions: list[InteractionRow]) -> None:
        """Every ending that is missing, in the order of a turn's own end."""
        turn = self.turn
        for row in questions if not self.waits_on else ():
            self._event(EventType.INTERACTION_CLOSED, desk.closing(row), turn)
        for tool in open_now.tools.values():
            self._event(EventType.TOOL_CALL, {**tool, "status": "failed"}, turn)
        if turn is not None or open_now.prompts:
            self._event(EventType.ERROR, _lost().as_event(), turn)
        for prompt_id in open_now.prompts if not self.waits_on else ():
            data = {"prompt_id": prompt_id, "state": PromptState.FAILED.value}
            self._event(EventType.PROMPT_ENDED, data, turn, prompt_id)
        if turn is not None:
            self._event(EventType.DONE, {"turn_id": turn.turn_id, "outcome": Outcome.LOST.value}, turn)
        if open_now.busy and not self.waits_on:
            self._event(EventType.SESSION_IDLE, {}, None)

    def _event(self, type: EventType, data: dict[str, Any], turn: TurnRow | None, of: str | None = None) -> None:
        session, n = self.session, len(self.records) + 1
        prompt_id = of or (turn.prompt_id if turn is not None else None)
        self.records.append(
            RecordRow(
                session.project,
                session.session_id,
                record_id(session.session_id, outside_of(self.epoch), n),
                turn.turn_id if turn is not None else None,
                prompt_id,
                self.epoch,
                n,
                type,
                storable_json(data),
                self.at,
            )
        )


def _lost() -> RunnerError:
    return RunnerError("execution_lost", "The runner stopped while this turn was running.")


def _interrupted(turn: TurnRow, row: PromptRow) -> PromptRow:
    """A prompt that the turn had read: its frame may have been written, so it is not sent again by itself."""
    return replace(row, result=_result(turn, row.prompt_id), turn_id=turn.turn_id)


def _result(turn: TurnRow, prompt_id: str | None) -> dict[str, Any]:
    prompt_ids = [prompt_id] if prompt_id else []
    timings = Times(0.0).timings(0.0)
    return result_without_agent(turn.session_id, turn.turn_id, prompt_ids, Outcome.LOST, _lost().as_event(), timings)
