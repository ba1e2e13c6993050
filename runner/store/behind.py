"""A store that stands before another one and passes every call on: what changes a few of them begins here."""

from __future__ import annotations

from collections.abc import Sequence

from runner.rules.feed import Position, Span
from runner.store.port import (
    Admission,
    Appended,
    CommandRow,
    EndedTurn,
    Ending,
    Expired,
    FeedRow,
    InteractionRow,
    PromptRow,
    QuarantinedRow,
    RecordKey,
    RecordRow,
    SessionRow,
    Store,
    TurnRow,
)


class StoreBehind:
    """``Store`` by means of ``remote``; ``close`` closes that too."""

    def __init__(self, remote: Store) -> None:
        self.store_id = remote.store_id
        self._remote = remote

    async def admit(self, admission: Admission) -> bool:
        return await self._remote.admit(admission)

    async def end(self, ending: Ending) -> bool:
        return await self._remote.end(ending)

    async def save_session(self, row: SessionRow) -> None:
        await self._remote.save_session(row)

    async def append(
        self,
        records: Sequence[RecordRow],
        interactions: Sequence[InteractionRow] = (),
        prompts: Sequence[PromptRow] = (),
    ) -> Appended:
        return await self._remote.append(records, interactions, prompts)

    async def write_batch(self, records: Sequence[RecordRow]) -> Appended:
        return await self._remote.write_batch(records)

    async def create_session(self, row: SessionRow, records: Sequence[RecordRow]) -> bool:
        return await self._remote.create_session(row, records)

    async def caught_up(self, project: str, session_id: str) -> None:
        await self._remote.caught_up(project, session_id)

    async def quarantine(self, records: Sequence[RecordRow], reason: str, at: int) -> None:
        await self._remote.quarantine(records, reason, at)

    async def quarantined(self, project: str, limit: int, after: int = 0) -> list[tuple[int, QuarantinedRow]]:
        return await self._remote.quarantined(project, limit, after)

    async def submit_command(self, row: CommandRow) -> CommandRow:
        return await self._remote.submit_command(row)

    async def claim_command(
        self, project: str, command_id: str, replica_id: str, now: int, until: int, max_deliveries: int
    ) -> CommandRow | None:
        return await self._remote.claim_command(project, command_id, replica_id, now, until, max_deliveries)

    async def settle_command(self, project: str, command_id: str, state: str, outcome: str | None, at: int) -> bool:
        return await self._remote.settle_command(project, command_id, state, outcome, at)

    async def command(self, project: str, command_id: str) -> CommandRow | None:
        return await self._remote.command(project, command_id)

    async def open_commands(self, key: tuple[str, str] | None = None) -> list[CommandRow]:
        return await self._remote.open_commands(key)

    async def answer_interaction(self, row: InteractionRow, expected_status: str) -> bool:
        return await self._remote.answer_interaction(row, expected_status)

    async def session(self, project: str, session_id: str) -> SessionRow | None:
        return await self._remote.session(project, session_id)

    async def sessions(self, project: str, limit: int, before: tuple[int, str] | None = None) -> list[SessionRow]:
        return await self._remote.sessions(project, limit, before)

    async def prompt(self, project: str, session_id: str, prompt_id: str) -> PromptRow | None:
        return await self._remote.prompt(project, session_id, prompt_id)

    async def waiting_prompts(self, key: tuple[str, str] | None = None) -> list[PromptRow]:
        return await self._remote.waiting_prompts(key)

    async def context_prompts(self, key: tuple[str, str]) -> list[PromptRow]:
        return await self._remote.context_prompts(key)

    async def turn(self, project: str, session_id: str, turn_id: str) -> TurnRow | None:
        return await self._remote.turn(project, session_id, turn_id)

    async def last_turn(self, project: str, session_id: str) -> TurnRow | None:
        return await self._remote.last_turn(project, session_id)

    async def open_turns(self, key: tuple[str, str] | None = None) -> list[TurnRow]:
        return await self._remote.open_turns(key)

    async def paused_turns(self) -> list[TurnRow]:
        return await self._remote.paused_turns()

    async def records(
        self, project: str, session_id: str, after: tuple[int, int] | None, limit: int
    ) -> list[RecordRow]:
        return await self._remote.records(project, session_id, after, limit)

    async def feed(self, project: str, after: Position, limit: int) -> list[FeedRow]:
        return await self._remote.feed(project, after, limit)

    async def feed_span(self, project: str) -> Span:
        return await self._remote.feed_span(project)

    async def trim_feed(self, project: str | None, before_ms: int, limit: int) -> int:
        return await self._remote.trim_feed(project, before_ms, limit)

    async def interactions(
        self, project: str, session_id: str | None = None, status: str | None = None
    ) -> list[InteractionRow]:
        return await self._remote.interactions(project, session_id, status)

    async def open_interactions(self, status: str) -> list[InteractionRow]:
        return await self._remote.open_interactions(status)

    async def interaction(self, project: str, interaction_id: str) -> InteractionRow | None:
        return await self._remote.interaction(project, interaction_id)

    async def delete_session_content(self, project: str, session_id: str) -> None:
        await self._remote.delete_session_content(project, session_id)

    async def expired_records(self, project: str | None, before_ms: int, limit: int) -> list[RecordKey]:
        return await self._remote.expired_records(project, before_ms, limit)

    async def delete_records(self, keys: Sequence[RecordKey]) -> int:
        return await self._remote.delete_records(keys)

    async def expired_quarantine(self, project: str | None, before_ms: int, limit: int) -> list[RecordKey]:
        return await self._remote.expired_quarantine(project, before_ms, limit)

    async def delete_quarantined(self, keys: Sequence[RecordKey]) -> int:
        return await self._remote.delete_quarantined(keys)

    async def count_expired(self, project: str | None, before_ms: int) -> Expired:
        return await self._remote.count_expired(project, before_ms)

    async def unstorable(self, project: str, session_id: str) -> list[tuple[int, int]]:
        return await self._remote.unstorable(project, session_id)

    async def pruned_to(self, project: str, session_id: str) -> tuple[int, int] | None:
        return await self._remote.pruned_to(project, session_id)

    async def ended_turns(self, project: str | None, after: tuple[int, str, str], limit: int) -> list[EndedTurn]:
        return await self._remote.ended_turns(project, after, limit)

    async def add_ending(self, record: RecordRow) -> bool:
        return await self._remote.add_ending(record)

    async def ready(self) -> bool:
        return await self._remote.ready()

    async def close(self) -> None:
        await self._remote.close()
