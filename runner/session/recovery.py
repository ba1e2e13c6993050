"""What a replica that was killed had shown reaches the store: before its turns end as lost (DESIGN 3.9)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import orjson

from runner.clock import Clock, parse_rfc3339
from runner.errors import RunnerError
from runner.ids import outside_of, parse_cursor, record_id
from runner.rules.pool import Key
from runner.rules.recovered import BLOCKS, Recovered, Shown, Stored
from runner.rules.unfinished import READ, Unfinished
from runner.session.ending import result_outside_of_turns
from runner.session.history import pages
from runner.store.one_by_one import one_by_one
from runner.store.port import InteractionRow, PromptRow, RecordRow, Store
from runner.store.rows import REFUSED
from runner.terms import EventType, InteractionStatus, Outcome, PromptState
from runner.turn.live_file import left_by, read

log = logging.getLogger("runner.session")
BATCH: Final = 500
AT_ONCE: Final = 200
OPEN_PROMPT: Final = frozenset({PromptState.QUEUED, PromptState.ACTIVE})
OPEN_QUESTION: Final = frozenset({InteractionStatus.PENDING, InteractionStatus.ANSWERED})
OUTCOMES: Final = {
    PromptState.DONE: Outcome.COMPLETED,
    PromptState.ABSORBED: Outcome.ABSORBED,
    PromptState.FAILED: Outcome.FAILED,
}


@asynccontextmanager
async def recovered(folder: Path, replica_id: str, store: Store, clock: Clock) -> AsyncIterator[int]:
    """Hand in what a dead replica showed; inside the context its turns get their endings, behind it the file is gone.

    Where the context raises, or the process is killed, the file stays: doing it again changes nothing.

    Args:
        folder: of its live file.
        replica_id: the dead one.
        store: where it belongs; that has what its spool held already.
        clock: for the instant of what is set aside.

    Yields:
        How many records the store lacked.

    Raises:
        RunnerError: ``store_unavailable``.
    """
    try:
        paths = left_by(folder).get(replica_id, [])
        count = await _hand_in(paths, store, clock) if paths else 0
    except OSError as error:
        log.error("what the dead replica %s had shown cannot be read: %s", replica_id, error)
        paths, count = [], 0
    if count:
        log.warning("%d records that the dead replica %s had shown were handed in", count, replica_id)
    yield count
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("a segment of the dead replica %s stays: %s", replica_id, error)


@dataclass(slots=True)
class _Epoch:
    """One epoch of a session: which turns it names, and what comes of it. ``wanted``: those with no ending of its own.

    A turn that ended otherwise has everything that it showed; only what came outside of turns may be missing.
    """

    turns: set[str] = field(default_factory=set)
    wanted: set[str] = field(default_factory=set)
    fold: Recovered | None = None


async def _hand_in(paths: Sequence[Path], store: Store, clock: Clock) -> int:
    sessions: dict[Key, dict[int, _Epoch]] = {}
    async for key, lines, _ in _entries(paths):
        for epoch, first in _shown(lines.partition(b"\n")[0], durable=False):
            found = sessions.setdefault(key, {}).setdefault(epoch, _Epoch())
            found.turns |= {first.turn_id} if first.turn_id is not None else set()
    for key in list(sessions):
        if not await _prepare(store, key, sessions[key]):
            del sessions[key]
    async for key, lines, durable in _entries(paths):
        if key in sessions:
            _fold(sessions[key], lines, durable)
    count = 0
    for key, epochs in sessions.items():
        for epoch in sorted(epochs):
            fold = epochs[epoch].fold
            rows = fold.rows() if fold is not None else []
            if rows:
                await _write(store, clock, key, [_row(key, epoch, item) for item in rows], epochs[epoch])
                count += len(rows)
    return count


async def _entries(paths: Sequence[Path]) -> AsyncIterator[tuple[Key, bytes, bool]]:
    """What is in the segments, with a pause now and then: others run on this loop."""
    for count, entry in enumerate(read(paths), 1):
        yield entry.key, entry.lines, entry.durable
        if count % AT_ONCE == 0:
            await asyncio.sleep(0)


def _shown(line: bytes, *, durable: bool) -> Iterator[tuple[int, Shown]]:
    """The events of a line, each with its epoch: consecutive deltas may be one line. None of what is no event."""
    try:
        event: dict[str, Any] = orjson.loads(line)
        cursor, data = parse_cursor(event["cursor"]), event["data"]
        at = parse_rfc3339(event["at"])
        item = Shown(cursor[1] if cursor else 0, event["turn_id"], event["prompt_id"], event["type"], data, at, durable)
    except (ValueError, KeyError, TypeError) as error:
        log.error("a line that a dead replica left is no event: %s", error)
        return
    if cursor is None:
        return
    if item.type not in BLOCKS or "texts" not in data:
        yield cursor[0], item
        return
    for n, text in enumerate(data["texts"], item.n):
        yield cursor[0], item._replace(n=n, data={"message_id": data["message_id"], "text": text})


async def _prepare(store: Store, key: Key, epochs: Mapping[int, _Epoch]) -> bool:
    """Read what the store has of a session; False when nothing of it is wanted there."""
    session = await store.session(*key)
    if session is None or session.ended_at is not None:
        return False
    await store.caught_up(*key)
    for found in epochs.values():
        for turn_id in found.turns:
            turn = await store.turn(*key, turn_id)
            if turn is None or turn.outcome in (None, Outcome.LOST):
                found.wanted.add(turn_id)
    whole = any(found.wanted for found in epochs.values())
    stored = {epoch: Stored() for epoch in epochs}
    open_now = Unfinished()
    tools_of: dict[int, Mapping[str, Mapping[str, Any]]] = {}
    async for rows in pages(store, key, None if whole else (min(epochs), 0)):
        for row in rows:
            wanted, tells = row.epoch in stored, whole and row.type in READ
            data = orjson.loads(row.data) if wanted or tells else {}
            if wanted:
                if row.epoch not in tools_of:
                    tools_of[row.epoch] = dict(open_now.tools)
                stored[row.epoch].take(Shown(row.n, row.turn_id, row.prompt_id, row.type, data, row.at, True))
            if tells:
                open_now.see(row.type, data)
    for epoch, found in epochs.items():
        stored[epoch].tools = tools_of.get(epoch, open_now.tools)
        found.fold = Recovered(epoch, stored[epoch])
    return True


def _fold(epochs: Mapping[int, _Epoch], lines: bytes, durable: bool) -> None:
    for line in lines.splitlines():
        for epoch, item in _shown(line, durable=durable):
            found = epochs.get(epoch)
            wanted = found is not None and (item.turn_id is None or item.turn_id in found.wanted)
            if not wanted or found is None or found.fold is None:
                continue
            try:
                found.fold.take(item)
            except (KeyError, TypeError, ValueError) as error:
                log.error("event %d.%d (%s) that a dead replica left is none: %r", epoch, item.n, item.type, error)


def _row(key: Key, epoch: int, item: Shown) -> RecordRow:
    name = record_id(key[1], item.turn_id or outside_of(epoch), item.n)
    data = orjson.dumps(item.data)
    return RecordRow(*key, name, item.turn_id, item.prompt_id, epoch, item.n, item.type, data, item.at)


async def _write(store: Store, clock: Clock, key: Key, rows: Sequence[RecordRow], epoch: _Epoch) -> None:
    late = 0
    for start in range(0, len(rows), BATCH):
        late += await _batch(store, clock, rows[start : start + BATCH])
    if late:
        log.error("%d records of session %s that a dead replica had shown came too late", late, key[1])
        return
    questions, prompts = await _questions(store, rows), await _prompts(store, key, rows, epoch)
    if questions or prompts:
        await store.append([], questions, prompts)


async def _batch(store: Store, clock: Clock, rows: Sequence[RecordRow]) -> int:
    """Write records; how many came too late. One that the store refuses takes no neighbour with it (case G2)."""
    try:
        return (await store.write_batch(rows)).quarantined
    except RunnerError as error:
        if error.code != "internal":
            raise
    done = await one_by_one(rows, store.write_batch, lambda row: store.quarantine([row], REFUSED, clock.now_ms()))
    return done.quarantined


async def _prompts(store: Store, key: Key, rows: Sequence[RecordRow], epoch: _Epoch) -> list[PromptRow]:
    """Prompts whose ending was told, and is not stored: told once, it stays."""
    found = []
    for row in rows:
        data: dict[str, Any] = orjson.loads(row.data) if row.type == EventType.PROMPT_ENDED else {}
        known = await store.prompt(*key, data["prompt_id"]) if data else None
        if known is None or known.state not in OPEN_PROMPT:
            continue
        by = data.get("absorbed_by")
        outcome = OUTCOMES.get(PromptState(data["state"]), Outcome.CANCELLED)
        failed = RunnerError("internal", "The prompt could not be run.") if outcome is Outcome.FAILED else None
        turn_id = next(iter(epoch.turns), None) if by is not None else None
        result = result_outside_of_turns(
            key[1], known.prompt_id, outcome, turn_id=turn_id, absorbed_by=by, error=failed
        )
        found.append(replace(known, state=data["state"], result=known.result or result))
    return found


async def _questions(store: Store, rows: Sequence[RecordRow]) -> list[InteractionRow]:
    """Questions whose closing was told, and is not stored."""
    found = []
    for row in rows:
        data: dict[str, Any] = orjson.loads(row.data) if row.type == EventType.INTERACTION_CLOSED else {}
        known = await store.interaction(row.project, data["interaction_id"]) if data else None
        if known is not None and known.status in OPEN_QUESTION:
            reason = {"reason": data["reason"]} if "reason" in data else {}
            found.append(replace(known, status=data["status"], answer={**(known.answer or {}), **reason} or None))
    return found
