"""A command as this process carries it: who asked for what, the turns that it marked, what it came to (DESIGN 3.7)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from runner.rules import command as rules
from runner.rules.turn import End
from runner.session.port import Reply
from runner.store.port import CommandRow
from runner.terms import CommandKind, CommandOutcome, CommandState, Outcome, SessionState

if TYPE_CHECKING:
    from runner.session.run import TurnRun

CLOSED: Final = frozenset(state for state, moves in rules.MOVES.items() if not moves)


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client asks for; ``arrived_at`` is loop time, ``wait_seconds`` how long its request may wait.

    ``keep_queue``: what is queued is not cancelled with what runs.
    """

    kind: CommandKind
    arrived_at: float
    expected: str | None = None
    idempotency_key: str | None = None
    wait_seconds: float = 0.0
    keep_queue: bool = False


@dataclass(slots=True, eq=False)
class Issued:
    """One command on its way through this process.

    Attributes:
        row: as it is stored, or shall be.
        runs: the turns whose ending settles it.
        marked: whom it means was decided, and they were told.
        stored: the store has its row.
        written: its outcome went to the store with the ending of a turn.
        keeps_seat: a kill that came too late for the seat that is there now.
        outcome: what it came to, once that is known.
        cancelled_prompts: what it cancelled in the queue.
        saved: the store was asked to keep it, be it in vain.
        done: nothing is left to do for it.
        reply_to: replicas that wait for its outcome.
    """

    row: CommandRow
    runs: list[TurnRun] = field(default_factory=list)
    marked: bool = False
    stored: bool = False
    written: bool = False
    keeps_seat: bool = False
    outcome: CommandOutcome | None = None
    cancelled_prompts: list[str] = field(default_factory=list)
    saved: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    reply_to: set[str] = field(default_factory=set)

    @property
    def kind(self) -> CommandKind:
        """What it asks for."""
        return CommandKind(self.row.kind)

    @property
    def turn_id(self) -> str | None:
        """The turn that it stops: of several on their way the one that became a turn."""
        admitted = [run for run in self.runs if run.is_admitted]
        first = next(iter(admitted or self.runs), None)
        return first.turn_id if first is not None else self.row.turn_id

    @property
    def came_to(self) -> CommandOutcome | None:
        """Its outcome as far as it shows: a turn that has ended has settled it, even if that was not noticed yet."""
        if self.outcome is not None:
            return self.outcome
        return next((settled_by(run.ended.result())[1] for run in self.runs if run.ended.done()), None)


async def ending_of(runs: Sequence[TurnRun]) -> tuple[TurnRun, End] | None:
    """The first of these turns that is admitted, with its ending; None when none of them is."""
    waiting = {run.admitted: run for run in runs}
    while waiting:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for admitted in done:
            run = waiting.pop(admitted)
            if run.is_admitted:
                return run, await asyncio.shield(run.ended)
    return None


def settled_by(end: End) -> tuple[CommandState, CommandOutcome]:
    """What the commands of a turn came to."""
    return rules.settled(end.outcome, end.error.code if end.error is not None else None)


def rows_of_ending(commands: Sequence[Issued], end: End, at: int) -> list[CommandRow]:
    """Stored commands as the ending of their turn leaves them; a pause settles none."""
    if end.outcome is Outcome.PAUSED:
        return []
    state, outcome = settled_by(end)
    return [
        replace(issued.row, turn_id=issued.turn_id, state=state.value, outcome=outcome.value, finished_at=at)
        for issued in commands
    ]


def reply_of(
    row: CommandRow, turn_id: str | None, outcome: CommandOutcome | None, cancelled_prompts: Sequence[str] = ()
) -> Reply:
    """What the client is told: 202 while the turn is stopping, 200 when nothing is left to do (DESIGN 4)."""
    stopping = outcome is None
    body: dict[str, Any] = {
        "command_id": row.command_id,
        "state": (SessionState.STOPPING if stopping else SessionState.IDLE).value,
        "turn_id": turn_id,
        "cancelled_prompts": list(cancelled_prompts),
        "outcome": outcome.value if outcome is not None else None,
    }
    return Reply(202 if stopping else 200, body)


def outcome_of(row: CommandRow) -> CommandOutcome | None:
    """The outcome of a stored command."""
    return CommandOutcome(row.outcome) if row.outcome is not None else None
