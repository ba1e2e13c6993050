"""The store's twin in memory: same answers as ``SqliteStore``, nothing durable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runner.store import rows
from runner.store.memory_upkeep import MemoryUpkeep
from runner.store.port import (
    Admission,
    Appended,
    CommandRow,
    Ending,
    InteractionRow,
    PromptRow,
    QuarantinedRow,
    RecordRow,
    SessionRow,
    TurnRow,
)
from runner.terms import Outcome, PromptState


class MemoryStore(MemoryUpkeep):
    """``Store`` over dictionaries; rows are copied as JSON on their way in and out.

    ``unavailable``: while True every call raises ``store_unavailable``, like a full or missing disk. ``clock`` tells
    when a late record was set aside.
    """

    async def admit(self, admission: Admission) -> bool:
        self._usable()
        turn = admission.turn
        by_id, by_epoch = (turn.project, turn.turn_id), (turn.project, turn.session_id, turn.epoch)
        newest, head = self._newest_epochs(turn.project, turn.session_id)
        if self._over(turn) or by_id in self._turns or by_epoch in self._epochs or max(newest, head) > turn.epoch:
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
        fresh, refused = self._fresh_or_refused(ending.records)
        ended = replace(
            stored, outcome=turn.outcome, stop_reason=turn.stop_reason, ended_at=turn.ended_at, result=turn.result
        )
        self._turns[key] = rows.turn_parameters(ended)
        self._save_session(ending.session)
        self._save([ending.prompt, *ending.others], ending.interactions, fresh)
        for row in refused:
            self._set_aside(row, rows.REFUSED, self._clock.now_ms())
        self._commands.of_ending(ending.commands)
        return True

    async def save_session(self, row: SessionRow) -> None:
        self._usable()
        self._save_session(row)

    async def append(
        self,
        records: Sequence[RecordRow],
        interactions: Sequence[InteractionRow] = (),
        prompts: Sequence[PromptRow] = (),
    ) -> Appended:
        self._usable()
        unasked = sum(self._asked_late(row) for row in interactions)
        told = {(row.project, row.session_id) for row in records}
        given: list[InteractionRow | PromptRow] = [*interactions, *prompts]
        others = [row for row in given if (row.project, row.session_id) not in told]
        done = self._judge_and_save(records, unasked, sum(map(self._deleted, others)))
        if not done.quarantined and not done.dropped:
            self._save(prompts, interactions, {})
        return done

    async def write_batch(self, records: Sequence[RecordRow]) -> Appended:
        self._usable()
        return self._judge_and_save(rows.meant(records), 0)

    async def create_session(self, row: SessionRow, records: Sequence[RecordRow]) -> bool:
        self._usable()
        if (row.project, row.session_id) in self._sessions:
            return False
        fresh = self._fresh(records)
        self._save_session(row)
        self._save((), (), fresh)
        if records:
            self._unfeed((row.project, row.session_id))
        return True

    async def caught_up(self, project: str, session_id: str) -> None:
        self._usable()

    async def quarantine(self, records: Sequence[RecordRow], reason: str, at: int) -> None:
        self._usable()
        for row in records:
            self._set_aside(row, reason, at)

    async def quarantined(self, project: str, limit: int, after: int = 0) -> list[tuple[int, QuarantinedRow]]:
        self._usable()
        mine = [(n, row) for (owner, _), (n, row) in self._aside.items() if owner == project and n > after]
        return [rows.quarantined_row((n, *row)) for n, row in mine[: rows.bounded(limit)]]

    async def submit_command(self, row: CommandRow) -> CommandRow:
        self._usable()
        return self._commands.submit(row)

    async def claim_command(
        self, project: str, command_id: str, replica_id: str, now: int, until: int, max_deliveries: int
    ) -> CommandRow | None:
        self._usable()
        return self._commands.claim(project, command_id, replica_id, now, until, max_deliveries)

    async def settle_command(self, project: str, command_id: str, state: str, outcome: str | None, at: int) -> bool:
        self._usable()
        return self._commands.settle(project, command_id, state, outcome, at)

    async def command(self, project: str, command_id: str) -> CommandRow | None:
        self._usable()
        return self._commands.of(project, command_id)

    async def open_commands(self, key: tuple[str, str] | None = None) -> list[CommandRow]:
        self._usable()
        return self._commands.without_outcome(key)

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

    async def waiting_prompts(self, key: tuple[str, str] | None = None) -> list[PromptRow]:
        self._usable()
        return [row for row in self._prompts_of(key) if row.state == PromptState.QUEUED]

    async def context_prompts(self, key: tuple[str, str]) -> list[PromptRow]:
        self._usable()
        return [row for row in self._prompts_of(key) if row.kind != "prompt"][-rows.CONTEXT_MAX :]

    async def turn(self, project: str, session_id: str, turn_id: str) -> TurnRow | None:
        self._usable()
        found = self._turns.get((project, turn_id))
        row = rows.turn_row(found) if found else None
        return row if row is not None and row.session_id == session_id else None

    async def last_turn(self, project: str, session_id: str) -> TurnRow | None:
        self._usable()
        return self._newest_turn(project, session_id)

    async def open_turns(self, key: tuple[str, str] | None = None) -> list[TurnRow]:
        self._usable()
        found = [
            turn
            for turn in self._all_turns()
            if turn.outcome is None and key in (None, (turn.project, turn.session_id))
        ]
        return sorted(found, key=_age)

    async def paused_turns(self) -> list[TurnRow]:
        self._usable()
        going_on = [key for key, row in self._sessions.items() if rows.session_row(row).ended_at is None]
        newest = [turn for key in going_on if (turn := self._newest_turn(*key)) is not None]
        return sorted((turn for turn in newest if turn.outcome == Outcome.PAUSED), key=_age)

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
        for name in [name for name, (_, row) in self._aside.items() if (name[0], row[1]) == key]:
            del self._aside[name]
        self._pruned.pop(key, None)
        self._commands.delete(key)
        self._unfeed(key)

    async def ready(self) -> bool:
        return not self.unavailable

    async def close(self) -> None:
        self.unavailable = True


def _age(turn: TurnRow) -> tuple[int, str, str, int]:
    return turn.started_at, turn.project, turn.session_id, turn.epoch
