"""What must hold in every run: at each step, and when everything has come to rest. The oracle of the simulation."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, Final

from runner.rules.story import Told
from runner.rules.turn import End
from runner.store.port import TurnRow
from runner.terms import Outcome, TurnPhase
from tests.simulation.ledger import Stopped
from tests.simulation.replicas import PROJECT
from tests.simulation.world import World

STOP_SECONDS: Final = 60.0
"""An answer to a Stop without ``wait_seconds``, whatever is slow: its road, a plane that hangs, ten seconds of kill."""


class Violation(AssertionError):
    """Something that must always hold does not."""


def check_step(world: World) -> None:
    """What must hold at any moment."""
    faults = [*world.store.faults, *world.ledger.faults, *(fault for plane in world.planes for fault in plane.faults)]
    if faults:
        raise Violation(faults[0])
    epochs: set[tuple[str, int]] = set()
    for node in world.nodes:
        if not node.up:
            continue
        for run, _ in node.sessions._runs.values():
            turn = run._turn
            if turn.driver is None or run.machine.phase not in (TurnPhase.PROMPTING, TurnPhase.CANCELLING):
                continue
            key = (turn.session.session_id, turn.epoch)
            if key in epochs:
                raise Violation(f"two turns run in epoch {turn.epoch} of session {key[0]}")
            epochs.add(key)


async def check_rest(world: World) -> None:
    """What must hold once nothing is under way."""
    check_step(world)
    for session_id in world.session_ids:
        if await world.store.session(PROJECT, session_id) is not None and session_id not in world.ledger.deleted:
            await _check_session(world, session_id)
    _check_replicas(world)
    for replica in world.replicas:
        for key in replica.services.stories.sessions():
            _check_story(replica.services.stories.of(key))
    await _check_commands(world)
    _check_stops(world)


async def _check_session(world: World, session_id: str) -> None:
    found = (row for row in world.store._all_turns() if row.session_id == session_id)
    turns = sorted(found, key=lambda turn: turn.epoch)
    records = await world.store.records(PROJECT, session_id, None, 10_000)
    done = {row.turn_id: json.loads(row.data) for row in records if row.type == "done"}
    if sum(row.type == "done" for row in records) != len(done):
        raise Violation(f"a turn of {session_id} has two done records")
    for turn in turns:
        if turn.outcome is None:
            raise Violation(f"turn {turn.turn_id} has no ending")
        if (turn.result or {}).get("error", {}).get("code") == "internal":
            raise Violation(f"turn {turn.turn_id} failed inside the runner")
        if turn.turn_id not in done or done[turn.turn_id]["outcome"] != turn.outcome:
            raise Violation(f"turn {turn.turn_id} ended {turn.outcome}, its record says {done.get(turn.turn_id)}")
    if set(done) - {turn.turn_id for turn in turns}:
        raise Violation(f"done records without a turn: {set(done) - {turn.turn_id for turn in turns}}")
    cursors = [(row.epoch, row.n) for row in records]
    if cursors != sorted(set(cursors)):
        raise Violation(f"cursors of {session_id} are not in order")
    await _check_prompts(world, session_id, turns)
    await _check_questions(world, session_id, turns)
    _check_cancelled(world, turns)


def _cancelled(result: dict[str, Any]) -> bool:
    """A Stop came while the prompt was prepared: nothing of it is stored."""
    return result["turn_id"] is None and result["outcome"] == "cancelled"


async def _check_prompts(world: World, session_id: str, turns: list[TurnRow]) -> None:
    """Dispatched = admitted + refused + attached; no prompt was lost or sent twice."""
    rows = [row for row in world.ledger.dispatched if row.session_id == session_id]
    began = Counter(turn.prompt_id for turn in turns if turn.resumes is None)
    for prompt_id in {row.prompt_id for row in rows}:
        answers = [row.answer for row in rows if row.prompt_id == prompt_id]
        token = next(row.token for row in rows if row.prompt_id == prompt_id)
        stored = await world.store.prompt(PROJECT, session_id, prompt_id)
        accepted = [row for row in rows if row.prompt_id == prompt_id and row.answer == "accepted"]
        stopped = all(row.turn_id is None and (row.result is None or _cancelled(row.result)) for row in accepted)
        if accepted and not stopped and (stored is None or began[prompt_id] != 1):
            raise Violation(f"prompt {prompt_id} was accepted and began {began[prompt_id]} turns")
        if set(answers) <= {"refused"} and (stored is not None or began[prompt_id] or world.ledger.frames[token]):
            raise Violation(f"prompt {prompt_id} was refused, yet it is there")
        mine = [turn for turn in turns if turn.prompt_id == prompt_id]
        asked_again = [turn for turn in mine if turn.resumes is not None and (turn.result or {}).get("start") != "hit"]
        if world.ledger.frames[token] > 1 + len(asked_again):
            raise Violation(f"prompt {prompt_id} was sent {world.ledger.frames[token]} times")
        if stored is None:
            continue
        completed = [turn for turn in mine if turn.outcome == Outcome.COMPLETED]
        if len(completed) > 1 or (completed and not world.ledger.frames[token]):
            raise Violation(f"prompt {prompt_id} was completed {len(completed)} times, its agent never got it")
        waits = bool(mine) and mine[-1].outcome in (Outcome.PAUSED, Outcome.LOST) and mine[-1] is turns[-1]
        if stored.state == "active" and not waits:
            raise Violation(f"prompt {prompt_id} is {stored.state}, its last turn {mine[-1].outcome if mine else None}")


async def _check_questions(world: World, session_id: str, turns: list[TurnRow]) -> None:
    """A question is open only while its chain waits: paused, or its resume was lost before the agent had anything."""
    rows = await world.store.interactions(PROJECT, session_id)
    unanswered = [row for row in rows if row.status in ("pending", "answered")]
    paused = bool(turns) and turns[-1].outcome in (Outcome.PAUSED, Outcome.LOST)
    if unanswered and not paused:
        raise Violation(f"question {unanswered[0].interaction_id} is {unanswered[0].status}, nothing is paused")


def _check_cancelled(world: World, turns: list[TurnRow]) -> None:
    """Cancelled exactly where a command was applied: each cancelled turn has a Stop that may have meant it."""
    for turn in turns:
        if turn.outcome == Outcome.CANCELLED and not any(_meant(stop, turn, turns) for stop in world.ledger.stopped):
            raise Violation(f"turn {turn.turn_id} was cancelled and nobody asked for it")


def _meant(stop: Stopped, turn: TurnRow, turns: list[TurnRow]) -> bool:
    if stop.session_id != turn.session_id or stop.error in ("execution_mismatch", "not_found"):
        return False
    if stop.expected is not None:
        return stop.expected in (turn.turn_id, *_chain(turn, turns))
    return True


def _chain(turn: TurnRow, turns: list[TurnRow]) -> list[str]:
    found, by_id = [], {row.turn_id: row for row in turns}
    while turn.resumes is not None:
        found.append(turn.resumes)
        turn = by_id[turn.resumes]
    return found


def _check_stops(world: World) -> None:
    turns = world.store._all_turns()
    cancelled = {turn.turn_id for turn in turns if turn.outcome == Outcome.CANCELLED}
    cancelled |= {name for turn in turns if turn.turn_id in cancelled for name in _chain(turn, turns)}
    for stop in world.ledger.stopped:
        if stop.replied_at is None or stop.session_id in world.ledger.deleted:
            continue
        frozen = sum(max(0.0, min(end, stop.replied_at) - max(start, stop.at)) for start, end in world.frozen)
        if stop.replied_at - stop.at > STOP_SECONDS + frozen:
            raise Violation(f"a {stop.kind} of {stop.session_id} took {stop.replied_at - stop.at:.0f} s")
        turn_id = stop.body.get("turn_id")
        if stop.body.get("outcome") == "stopped" and turn_id and turn_id not in cancelled:
            raise Violation(f"a {stop.kind} says that it stopped {turn_id}, which was not cancelled")


async def _check_commands(world: World) -> None:
    unsettled = await world.store.open_commands()
    if unsettled:
        raise Violation(f"command {unsettled[0].command_id} is {unsettled[0].state} without an outcome")


def _check_replicas(world: World) -> None:
    for node in world.nodes:
        book, sessions = node.replica.services.pool.book, node.sessions
        seats = {seat.seat_id for seat in book.seats.values()}
        if not seats <= set(node.provider.alive) <= seats | set(book.tearing):
            raise Violation(f"{node.replica_id} has seats {seats}, sandboxes {set(node.provider.alive)}")
        if sessions._runs:
            raise Violation(f"{node.replica_id} still runs {list(sessions._runs)}")
    for session_id in world.planes[-1].running():
        raise Violation(f"a turn still holds {session_id}")


def _check_story(moves: list[Told]) -> None:
    """No eviction of busy, no park without label and settlement."""
    endings: dict[str, End] = {}
    for told in moves:
        if told.machine == "turn":
            for effect in told.effects:
                if isinstance(effect, End):
                    endings[told.id] = effect
        elif told.machine == "pool" and isinstance(told.event, tuple):
            name, details = told.event
            if name == "remove" and told.before == "busy" and details["verdict"] in ("evicted", "expired"):
                raise Violation(f"busy seat {told.id} was {details['verdict']}")
            if name == "park":
                _check_park(told, endings.get(details["turn_id"]))


def _check_park(told: Told, end: End | None) -> None:
    """The allowlist of DESIGN 3.4, written down a second time."""
    if end is None:
        return
    fine = (
        (end.outcome is Outcome.COMPLETED and told.after == "idle")
        or (end.outcome is Outcome.PAUSED and told.after == "awaiting_approval")
        or (
            end.outcome is Outcome.CANCELLED
            and told.after == "idle"
            and end.label is not None
            and end.label.value in ("cancel", "abort_prompt", "steer", "new_prompt")
            and end.settled is not False
            and not end.survivors
        )
    )
    if not fine:
        raise Violation(f"seat {told.id} was parked {told.after} after {end}")


def tables(world: World) -> dict[str, Any]:
    """What of every table this run visited."""
    visited: dict[str, set[Any]] = {
        "turn": set(),
        "pool": set(),
        "lease": set(),
        "command": set(),
        "interaction": set(),
    }
    for replica in world.replicas:
        for key in replica.services.stories.sessions():
            for told in replica.services.stories.of(key):
                if told.machine == "turn":
                    visited["turn"].add((told.before.phase.value, type(told.event).__name__))
                elif told.machine == "pool":
                    name = told.event if isinstance(told.event, str) else told.event[0]
                    visited["pool"].add((name, str(told.before or ""), str(told.after or "")))
    visited["lease"] = {str(move.value) for plane in world.planes for move in plane.moves}
    visited["command"] = {(str(before), str(after)) for before, after in world.store.commands}
    visited["interaction"] = {(str(before), str(after)) for before, after in world.store.questions}
    return visited
