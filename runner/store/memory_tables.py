"""What the store's twin in memory holds, and how its rows are upserted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from runner.clock import Clock, SystemClock
from runner.errors import RunnerError
from runner.rules.interaction import CLOSED
from runner.rules.late import Late, Standing, asked_late, late
from runner.store import rows
from runner.store.memory_commands import MemoryCommands
from runner.store.memory_feed import MemoryFeed
from runner.store.port import Appended, InteractionRow, PromptRow, RecordRow, SessionRow, TurnRow
from runner.terms import Outcome

Key = tuple[str, str, str]
Cursor = tuple[str, str, int, int]

_REFUSED: Final = "The store refused a row: the cursor {0}.{1} of session {2} belongs to another record."


class MemoryTables(MemoryFeed):
    """Rows as SQL parameters, by their keys.

    Attributes:
        unavailable: while True, every call raises ``store_unavailable``.
    """

    def __init__(self, store_id: str = "store_memory", clock: Clock | None = None) -> None:
        super().__init__()
        self.store_id = store_id
        self._clock = clock or SystemClock()
        self.unavailable = False
        self._sessions: dict[tuple[str, str], rows.Parameters] = {}
        self._turns: dict[tuple[str, str], rows.Parameters] = {}
        self._epochs: dict[tuple[str, str, int], str] = {}
        self._prompts: dict[Key, rows.Parameters] = {}
        self._interactions: dict[tuple[str, str], rows.Parameters] = {}
        self._records: dict[Cursor, rows.Parameters] = {}
        self._record_ids: set[tuple[str, str]] = set()
        self._aside: dict[tuple[str, str], tuple[int, rows.Parameters]] = {}
        self._asides = 0
        self._pruned: dict[tuple[str, str], tuple[int, int]] = {}
        self._commands = MemoryCommands()

    def _prompts_of(self, key: tuple[str, str] | None) -> list[PromptRow]:
        found = [rows.prompt_row(row) for name, row in self._prompts.items() if key is None or name[:2] == key]
        return sorted(found, key=lambda row: (row.seq, row.prompt_id))

    def _usable(self) -> None:
        if self.unavailable:
            raise RunnerError("store_unavailable", "The store cannot be used.")

    def _all_turns(self) -> list[TurnRow]:
        return [rows.turn_row(row) for row in self._turns.values()]

    def _newest_turn(self, project: str, session_id: str) -> TurnRow | None:
        mine = [turn for turn in self._all_turns() if (turn.project, turn.session_id) == (project, session_id)]
        return max(mine, key=lambda turn: turn.epoch, default=None)

    def _judge_and_save(self, records: Sequence[RecordRow], unasked: int, gone: int = 0) -> Appended:
        """Write records that count, set late ones aside.

        ``unasked``: questions that were late; ``gone``: other rows of deleted sessions.
        """
        judged = [(row, self._late(row)) for row in records]
        fresh = self._fresh(row for row, why in judged if why is None)
        self._save((), (), fresh)
        aside = [(row, why) for row, why in judged if why not in (None, Late.SESSION_DELETED)]
        for row, why in aside:
            self._set_aside(row, str(why), self._clock.now_ms())
        dropped = sum(why is Late.SESSION_DELETED for _, why in judged)
        return Appended(len(judged) - len(aside) - dropped, len(aside) + unasked, dropped + gone)

    def _late(self, row: RecordRow) -> Late | None:
        """Why a record does not count; one that is stored already does."""
        if (row.project, row.record_id) in self._record_ids:
            return None
        newest = self._newest_epochs(row.project, row.session_id)
        return late(row.turn_id, row.epoch, self._standing(row), *newest, ended=self._over(row))

    def _over(self, row: RecordRow | InteractionRow | PromptRow | TurnRow) -> bool:
        session = self._sessions.get((row.project, row.session_id))
        return session is not None and rows.session_row(session).ended_at is not None

    def _deleted(self, row: RecordRow | InteractionRow | PromptRow) -> bool:
        return self._over(row) and self._newest_turn(row.project, row.session_id) is None

    def _asked_late(self, row: InteractionRow) -> bool:
        if row.status in CLOSED or (row.project, row.interaction_id) in self._interactions:
            return False
        return asked_late(self._standing(row), self._newest_epochs(row.project, row.session_id)[0])

    def _standing(self, row: RecordRow | InteractionRow) -> Standing | None:
        stored = self._turns.get((row.project, row.turn_id)) if row.turn_id is not None else None
        turn = rows.turn_row(stored) if stored is not None else None
        if turn is None or turn.session_id != row.session_id:
            return None
        return Standing(turn.epoch, turn.outcome is not None, turn.outcome == Outcome.PAUSED)

    def _newest_epochs(self, project: str, session_id: str) -> tuple[int, int]:
        """The highest epoch of the session's turns, and of its row's head; 0 for none."""
        turn, session = self._newest_turn(project, session_id), self._sessions.get((project, session_id))
        return turn.epoch if turn is not None else 0, rows.session_row(session).head_epoch if session else 0

    def _set_aside(self, row: RecordRow, reason: str, at: int) -> None:
        name = (row.project, row.record_id)
        if name not in self._record_ids and name not in self._aside and not self._deleted(row):
            self._asides += 1
            self._aside[name] = (self._asides, rows.quarantine_parameters(row, reason, at))

    def _fresh(self, records: Iterable[RecordRow]) -> dict[Cursor, RecordRow]:
        """Those not known yet; a cursor that belongs to another record refuses them all."""
        fresh: dict[Cursor, RecordRow] = {}
        ids = set(self._record_ids)
        for row in records:
            if (row.project, row.record_id) in ids:
                continue
            cursor = (row.project, row.session_id, row.epoch, row.n)
            if cursor in self._records or cursor in fresh:
                raise RunnerError("internal", _REFUSED.format(row.epoch, row.n, row.session_id))
            fresh[cursor] = row
            ids.add((row.project, row.record_id))
        return fresh

    def _fresh_or_refused(self, records: Iterable[RecordRow]) -> tuple[dict[Cursor, RecordRow], list[RecordRow]]:
        fresh: dict[Cursor, RecordRow] = {}
        refused: list[RecordRow] = []
        for row in records:
            try:
                fresh = self._fresh((*fresh.values(), row))
            except RunnerError:
                refused.append(row)
        return fresh, refused

    def _save_session(self, row: SessionRow) -> None:
        key = (row.project, row.session_id)
        stored = rows.session_row(self._sessions[key]) if key in self._sessions else None
        if stored is not None:
            over = stored.ended_at is not None
            if over or (row.head_epoch, row.head_n) < (stored.head_epoch, stored.head_n):
                return
            row = replace(row, created_at=stored.created_at)
        self._sessions[key] = rows.session_parameters(row)
        self._feed_session(stored, row)

    def _save(
        self,
        prompts: Iterable[PromptRow | None],
        interactions: Iterable[InteractionRow],
        records: dict[Cursor, RecordRow],
    ) -> None:
        for row in prompts:
            if row is not None:
                self._save_prompt(row)
        for interaction in interactions:
            self._save_interaction(interaction)
        for cursor, record in records.items():
            self._records[cursor] = record
            self._record_ids.add((record.project, record.record_id))
        self._feed_records(records.values())

    def _save_prompt(self, row: PromptRow) -> None:
        key = (row.project, row.session_id, row.prompt_id)
        if key in self._prompts:
            stored = rows.prompt_row(self._prompts[key])
            row = replace(stored, state=row.state, turn_id=row.turn_id, result=row.result)
        self._prompts[key] = rows.prompt_parameters(row)

    def _save_interaction(self, row: InteractionRow) -> None:
        key = (row.project, row.interaction_id)
        if key in self._interactions:
            stored = rows.interaction_row(self._interactions[key])
            if stored.status in CLOSED:
                return
            row = replace(
                stored,
                turn_id=row.turn_id,
                status=row.status,
                expires_at=row.expires_at,
                request=row.request,
                answer=row.answer,
            )
        self._interactions[key] = rows.interaction_parameters(row)
