"""The store's twin in memory: same answers as ``SqliteStore``, nothing durable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from runner.errors import RunnerError
from runner.rules.interaction import CLOSED
from runner.store import rows
from runner.store.port import (
    Admission,
    Ending,
    InteractionRow,
    PromptRow,
    RecordRow,
    SessionRow,
    TurnRow,
)

Key = tuple[str, str, str]
Cursor = tuple[str, str, int, int]

_REFUSED: Final = "The store refused a row: the cursor {0}.{1} of session {2} belongs to another record."


class MemoryStore:
    """``Store`` over dictionaries; rows are copied as JSON on their way in and out.

    ``unavailable``: while True every call raises ``store_unavailable``, like a full or missing disk.
    """

    def __init__(self, store_id: str = "store_memory") -> None:
        self.store_id = store_id
        self.unavailable = False
        self._sessions: dict[tuple[str, str], rows.Parameters] = {}
        self._turns: dict[tuple[str, str], rows.Parameters] = {}
        self._epochs: dict[tuple[str, str, int], str] = {}
        self._prompts: dict[Key, rows.Parameters] = {}
        self._interactions: dict[tuple[str, str], rows.Parameters] = {}
        self._records: dict[Cursor, rows.Parameters] = {}
        self._record_ids: set[tuple[str, str]] = set()

    async def admit(self, admission: Admission) -> bool:
        self._usable()
        turn = admission.turn
        by_id, by_epoch = (turn.project, turn.turn_id), (turn.project, turn.session_id, turn.epoch)
        if by_id in self._turns or by_epoch in self._epochs:
            return False
        fresh = self._fresh(admission.records)
        self._turns[by_id] = rows.turn_parameters(turn)
        self._epochs[by_epoch] = turn.turn_id
        self._save_session(admission.session)
        self._save([admission.prompt], admission.interactions, fresh)
        return True

    async def end(self, ending: Ending) -> bool:
        self._usable()
        turn = ending.turn
        if turn.outcome is None:
            raise ValueError("an ending has an outcome")
        key = (turn.project, turn.turn_id)
        stored = rows.turn_row(self._turns[key]) if key in self._turns else None
        if stored is None or stored.outcome is not None:
            return False
        if (stored.session_id, stored.epoch) != (turn.session_id, turn.epoch):
            return False
        fresh = self._fresh(ending.records)
        ended = replace(
            stored, outcome=turn.outcome, stop_reason=turn.stop_reason, ended_at=turn.ended_at, result=turn.result
        )
        self._turns[key] = rows.turn_parameters(ended)
        self._save_session(ending.session)
        self._save([ending.prompt, *ending.others], ending.interactions, fresh)
        return True

    async def save_session(self, row: SessionRow) -> None:
        self._usable()
        self._save_session(row)

    async def append(
        self,
        records: Sequence[RecordRow],
        interactions: Sequence[InteractionRow] = (),
        prompts: Sequence[PromptRow] = (),
    ) -> None:
        self._usable()
        self._save(prompts, interactions, self._fresh(records))

    async def answer_interaction(self, row: InteractionRow, expected_status: str) -> bool:
        self._usable()
        key = (row.project, row.interaction_id)
        stored = rows.interaction_row(self._interactions[key]) if key in self._interactions else None
        if stored is None or stored.status != expected_status:
            return False
        self._interactions[key] = rows.interaction_parameters(replace(stored, status=row.status, answer=row.answer))
        return True

    async def session(self, project: str, session_id: str) -> SessionRow | None:
        self._usable()
        found = self._sessions.get((project, session_id))
        return rows.session_row(found) if found else None

    async def sessions(self, project: str, limit: int, before: tuple[int, str] | None = None) -> list[SessionRow]:
        self._usable()
        mine = [rows.session_row(row) for (owner, _), row in self._sessions.items() if owner == project]
        mine.sort(key=lambda row: (row.updated_at, row.session_id), reverse=True)
        later = [row for row in mine if before is None or (row.updated_at, row.session_id) < before]
        return later[: rows.bounded(limit)]

    async def prompt(self, project: str, session_id: str, prompt_id: str) -> PromptRow | None:
        self._usable()
        found = self._prompts.get((project, session_id, prompt_id))
        return rows.prompt_row(found) if found else None

    async def turn(self, project: str, session_id: str, turn_id: str) -> TurnRow | None:
        self._usable()
        found = self._turns.get((project, turn_id))
        row = rows.turn_row(found) if found else None
        return row if row is not None and row.session_id == session_id else None

    async def last_turn(self, project: str, session_id: str) -> TurnRow | None:
        self._usable()
        mine = [turn for turn in self._all_turns() if (turn.project, turn.session_id) == (project, session_id)]
        return max(mine, key=lambda turn: turn.epoch, default=None)

    async def open_turns(self) -> list[TurnRow]:
        self._usable()
        found = [turn for turn in self._all_turns() if turn.outcome is None]
        return sorted(found, key=lambda turn: (turn.started_at, turn.project, turn.session_id, turn.epoch))

    async def records(
        self, project: str, session_id: str, after: tuple[int, int] | None, limit: int
    ) -> list[RecordRow]:
        self._usable()
        mine = sorted(
            key for key in self._records if key[:2] == (project, session_id) and (after is None or key[2:] > after)
        )
        return [rows.record_row(self._records[key]) for key in mine[: rows.bounded(limit)]]

    async def interactions(
        self, project: str, session_id: str | None = None, status: str | None = None
    ) -> list[InteractionRow]:
        self._usable()
        found = (rows.interaction_row(row) for row in self._interactions.values())
        wanted = [
            row
            for row in found
            if row.project == project and session_id in (None, row.session_id) and status in (None, row.status)
        ]
        return sorted(wanted, key=lambda row: row.created_at)[-rows.ROWS_MAX :]

    async def open_interactions(self, status: str) -> list[InteractionRow]:
        self._usable()
        found = (rows.interaction_row(row) for row in self._interactions.values())
        return sorted((row for row in found if row.status == status), key=lambda row: row.created_at)

    async def interaction(self, project: str, interaction_id: str) -> InteractionRow | None:
        self._usable()
        found = self._interactions.get((project, interaction_id))
        return rows.interaction_row(found) if found else None

    async def delete_session_content(self, project: str, session_id: str) -> None:
        session = await self.session(project, session_id)
        if session is None or session.ended_at is None:
            return
        key = (project, session_id)
        self._sessions[key] = rows.session_parameters(replace(session, config={}, agent_state={}))
        for turn in self._all_turns():
            if (turn.project, turn.session_id) == key:
                del self._turns[project, turn.turn_id]
                del self._epochs[project, session_id, turn.epoch]
        for prompt in [known for known in self._prompts if known[:2] == key]:
            del self._prompts[prompt]
        for cursor in [known for known in self._records if known[:2] == key]:
            self._record_ids.remove((project, rows.record_row(self._records.pop(cursor)).record_id))
        for row in await self.interactions(project, session_id):
            del self._interactions[project, row.interaction_id]

    async def ready(self) -> bool:
        return not self.unavailable

    async def close(self) -> None:
        self.unavailable = True

    def _usable(self) -> None:
        if self.unavailable:
            raise RunnerError("store_unavailable", "The store cannot be used.")

    def _all_turns(self) -> list[TurnRow]:
        return [rows.turn_row(row) for row in self._turns.values()]

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

    def _save_session(self, row: SessionRow) -> None:
        key = (row.project, row.session_id)
        if key in self._sessions:
            stored = rows.session_row(self._sessions[key])
            ended_at = row.ended_at if stored.ended_at is None else stored.ended_at
            row = replace(row, created_at=stored.created_at, ended_at=ended_at)
        self._sessions[key] = rows.session_parameters(row)

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
            self._records[cursor] = rows.record_parameters(record)
            self._record_ids.add((record.project, record.record_id))

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
