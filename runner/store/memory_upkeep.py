"""Retention and missing endings of the store's twin in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from runner.rules.late import late
from runner.rules.retention import GOING_ON, expired
from runner.store import rows
from runner.store.memory_tables import MemoryTables
from runner.store.port import EndedTurn, Expired, RecordKey, RecordRow
from runner.terms import EventType


class MemoryUpkeep(MemoryTables):
    """What sweeps ask of a store."""

    async def expired_records(self, project: str | None, before_ms: int, limit: int) -> list[RecordKey]:
        self._usable()
        found = sorted((row.at, row.project, row.record_id) for row in self._expired(project, before_ms))
        return [RecordKey(*name) for _, *name in found[: rows.bounded(limit)]]

    async def delete_records(self, keys: Sequence[RecordKey]) -> int:
        self._usable()
        wanted = set(keys)
        gone = [name for name, row in self._records.items() if RecordKey(row[0], row[2]) in wanted]
        for name in gone:
            project, session_id, epoch, n = name
            row = rows.record_row(self._records.pop(name))
            self._record_ids.remove((project, row.record_id))
            self._move_head(project, session_id, (epoch, n))
            self._pruned[project, session_id] = max((epoch, n), self._pruned.get((project, session_id), (0, 0)))
        return len(gone)

    async def expired_quarantine(self, project: str | None, before_ms: int, limit: int) -> list[RecordKey]:
        self._usable()
        found = sorted((row[-1], number, *name) for name, (number, row) in self._old_asides(project, before_ms))
        return [RecordKey(*name) for _, _, *name in found[: rows.bounded(limit)]]

    async def delete_quarantined(self, keys: Sequence[RecordKey]) -> int:
        self._usable()
        return sum(self._aside.pop((key.project, key.record_id), None) is not None for key in set(keys))

    async def count_expired(self, project: str | None, before_ms: int) -> Expired:
        self._usable()
        records = Counter(row.project for row in self._expired(project, before_ms))
        aside = Counter(name[0] for name, _ in self._old_asides(project, before_ms))
        return Expired(dict(records), dict(aside))

    async def unstorable(self, project: str, session_id: str) -> list[tuple[int, int]]:
        self._usable()
        aside = (rows.quarantined_row((n, *row))[1] for n, row in self._aside.values())
        mine = [kept.record for kept in aside if kept.reason in rows.UNSTORABLE]
        own = [row for row in mine if (row.project, row.session_id) == (project, session_id)]
        return sorted(row.cursor for row in own)[: rows.ROWS_MAX]

    async def pruned_to(self, project: str, session_id: str) -> tuple[int, int] | None:
        self._usable()
        return self._pruned.get((project, session_id))

    async def ended_turns(self, project: str | None, after: tuple[int, str, str], limit: int) -> list[EndedTurn]:
        self._usable()
        found = [
            EndedTurn(turn.ended_at, *(name := (turn.project, turn.turn_id)), turn.session_id, self._has_ending(*name))
            for turn in self._all_turns()
            if turn.outcome is not None and turn.ended_at is not None and project in (None, turn.project)
        ]
        return sorted(row for row in found if row[:3] > after)[: rows.bounded(limit)]

    async def add_ending(self, record: RecordRow) -> bool:
        self._usable()
        turn = self._standing(record)
        newest = self._newest_epochs(record.project, record.session_id)
        if turn is None or not turn.ended or self._has_ending(record.project, record.turn_id or ""):
            return False
        if late(None, record.epoch, None, *newest) is not None:
            return False
        self._save((), (), self._fresh([record]))
        self._move_head(record.project, record.session_id, record.cursor)
        return True

    def _expired(self, project: str | None, before_ms: int) -> list[RecordRow]:
        every = (rows.record_row(row) for row in self._records.values())
        return [row for row in every if project in (None, row.project) and self._may_go(row, before_ms)]

    def _may_go(self, row: RecordRow, before_ms: int) -> bool:
        stored = self._turns.get((row.project, row.turn_id)) if row.turn_id is not None else None
        turn = rows.turn_row(stored) if stored is not None else None
        asked = self._prompts.get((row.project, row.session_id, row.prompt_id)) if row.prompt_id is not None else None
        return expired(
            before_ms,
            row.at,
            turn_goes_on=turn is not None and turn.outcome is None,
            turn_ended_at=turn.ended_at if turn is not None else None,
            prompt=rows.prompt_row(asked).state if asked is not None else None,
            outside_of_busy_session=(row.turn_id, row.prompt_id) == (None, None) and self._goes_on(row),
        )

    def _goes_on(self, row: RecordRow) -> bool:
        of = (row.project, row.session_id)
        open_turns = (turn.outcome is None for turn in self._all_turns() if (turn.project, turn.session_id) == of)
        return any(open_turns) or any(prompt.state in GOING_ON for prompt in self._prompts_of(of))

    def _old_asides(
        self, project: str | None, before_ms: int
    ) -> list[tuple[tuple[str, str], tuple[int, rows.Parameters]]]:
        return [
            (name, kept) for name, kept in self._aside.items() if project in (None, name[0]) and kept[1][-1] < before_ms
        ]

    def _has_ending(self, project: str, turn_id: str) -> bool:
        turn = rows.turn_row(self._turns[project, turn_id])
        pruned = self._pruned.get((project, turn.session_id), (-1, 0))
        return pruned[0] >= turn.epoch or any(
            (row.project, row.turn_id, row.type) == (project, turn_id, EventType.DONE)
            for row in map(rows.record_row, self._records.values())
        )

    def _move_head(self, project: str, session_id: str, cursor: tuple[int, int]) -> None:
        """No cursor that was given out durably is given out again."""
        stored = self._sessions.get((project, session_id))
        row = rows.session_row(stored) if stored is not None else None
        if row is not None and (row.head_epoch, row.head_n) < cursor:
            moved = replace(row, head_epoch=cursor[0], head_n=cursor[1])
            self._sessions[project, session_id] = rows.session_parameters(moved)
