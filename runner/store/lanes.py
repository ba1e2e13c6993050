"""What waits for a store, session by session: one lane each, with the newest rows that only the spool has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from runner.ids import Key
from runner.store.port import InteractionRow, PromptRow, RecordRow, SessionRow, TurnRow


@dataclass(slots=True, eq=False)
class Lane:
    """One session's writes: one at a time, in order. The rows are there as long as entries wait."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0
    waiting: int = 0
    last_turn: str | None = None
    session: SessionRow | None = None
    turns: dict[str, TurnRow] = field(default_factory=dict)
    prompts: dict[str, PromptRow] = field(default_factory=dict)
    interactions: dict[str, InteractionRow] = field(default_factory=dict)

    def note(self, turn_id: str | None, parameters: dict[str, Any]) -> None:
        """Remember the rows of a write that waits now."""
        self.last_turn = turn_id or self.last_turn
        whole = parameters.get("admission") or parameters.get("ending")
        if whole is not None:
            self.session = whole.session
            self.turns[whole.turn.turn_id] = whole.turn
            prompts = [row for row in (whole.prompt, *getattr(whole, "others", ())) if row is not None]
            interactions: Sequence[InteractionRow] = whole.interactions
        else:
            row = parameters.get("row")
            self.session = row if isinstance(row, SessionRow) else self.session
            prompts, interactions = list(parameters.get("prompts", ())), parameters.get("interactions", ())
        self.prompts.update((row.prompt_id, row) for row in prompts)
        self.interactions.update((row.interaction_id, row) for row in interactions)

    def newest_turn(self) -> TurnRow | None:
        """The turn of the highest epoch among those that wait."""
        return max(self.turns.values(), key=lambda row: row.epoch, default=None)

    def open_turns(self) -> list[TurnRow] | None:
        """Turns without an ending; None when no turn waits, for then nothing is known."""
        return [row for row in self.turns.values() if row.outcome is None] if self.turns else None

    def forget(self) -> None:
        """Nothing waits any more."""
        self.waiting = 0
        self.session = None
        self.turns.clear()
        self.prompts.clear()
        self.interactions.clear()


class Lanes:
    """The lanes that are in use or hold something."""

    def __init__(self) -> None:
        self._lanes: dict[Key, Lane] = {}

    def of(self, key: Key) -> Lane:
        """A session's lane; made when there is none."""
        return self._lanes.setdefault(key, Lane())

    def waiting(self, key: Key) -> Lane | None:
        """A session's lane while entries wait in it."""
        lane = self._lanes.get(key)
        return lane if lane is not None and lane.waiting else None

    def all_waiting(self) -> list[tuple[Key, Lane]]:
        """Every lane with entries."""
        return [(key, lane) for key, lane in self._lanes.items() if lane.waiting]

    @asynccontextmanager
    async def enter(self, key: Key) -> AsyncIterator[Lane]:
        """Be the only one in a session's lane."""
        lane = self.of(key)
        lane.users += 1
        try:
            async with lane.lock:
                yield lane
        finally:
            lane.users -= 1
            if not lane.users and not lane.waiting:
                del self._lanes[key]


def turn_of(
    records: Sequence[RecordRow], interactions: Sequence[InteractionRow] = (), prompts: Sequence[PromptRow] = ()
) -> str | None:
    """The newest turn that rows belong to; None when they belong to none."""
    owned = [row for row in records if row.turn_id is not None]
    if owned:
        return max(owned, key=lambda row: row.epoch).turn_id
    named = [*(row.turn_id for row in interactions), *(row.turn_id for row in prompts)]
    return next((turn_id for turn_id in named if turn_id is not None), None)
