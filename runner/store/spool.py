"""A store behind a local spool: what cannot wait for an unreachable store is durable here first (DESIGN 3.9)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from runner.clock import Clock
from runner.store.behind import StoreBehind
from runner.store.lanes import turn_of
from runner.store.port import (
    Admission,
    Appended,
    CommandRow,
    EndedTurn,
    Ending,
    InteractionRow,
    PromptRow,
    QuarantinedRow,
    RecordKey,
    RecordRow,
    SessionRow,
    Store,
    TurnRow,
)
from runner.store.replay import Granted
from runner.store.spool_file import SpoolFile
from runner.store.spooling import MaySpool, OnRejected, Spool

SPOOL_BYTES: Final = 256 * 1024 * 1024


class SpooledStore(StoreBehind):
    """``Store`` over another one that may be unreachable; made by ``open``.

    Admissions, endings, appended rows and session rows of a turn that ``may_spool`` are written to a local file while
    the store gives no answer, and answered as if they counted. Behind a write that waits, everything of its session
    waits; a task replays it in order once the store is back, also after kill -9. Reads of such a session answer from
    what waits where that is enough, else with ``store_unavailable``. ``write_batch`` never waits here: a stream keeps
    what its worker could not write.
    """

    def __init__(self, remote: Store, spool: Spool) -> None:
        super().__init__(remote)
        self._spool = spool
        self._closed = False

    @classmethod
    async def open(
        cls,
        remote: Store,
        path: Path,
        clock: Clock,
        *,
        may_spool: MaySpool | None = None,
        granted: Granted | None = None,
        on_rejected: OnRejected | None = None,
        max_bytes: int = SPOOL_BYTES,
    ) -> Self:
        """Open the spool and begin to replay what an earlier process left in it.

        Args:
            remote: the store; ``close`` closes it too.
            path: of the spool's file, for this process alone.
            clock: its monotonic reading must be the running loop's.
            may_spool: ``(project, session_id, turn_id)``: whether the turn's lease is still valid; asked just before a
                write is spooled. Without it nothing is spooled.
            granted: what the lease plane said of a turn whose admission waits; without it the store alone decides.
            on_rejected: ``(project, session_id, turn_id)`` of a spooled write that did not count after all: its turn
                was refused, ended otherwise, or some of its records came too late. They are in quarantine.
            max_bytes: bound of what may wait; beyond it writes are ``store_unavailable``.

        Raises:
            RunnerError: ``store_unavailable``: the file cannot be used, or holds writes for another store.
        """
        file = await SpoolFile.open(path)
        spool = Spool(remote, file, clock, max_bytes)
        store = cls(remote, spool)
        store.decide(may_spool=may_spool, granted=granted, on_rejected=on_rejected)
        try:
            await spool.start(path, remote.store_id)
        except BaseException:
            await file.close()
            raise
        return store

    @staticmethod
    async def known_id(path: Path) -> str:
        """The id of the store that a spool was last used with, empty for a new one: for ``HttpStore.open``.

        Raises:
            RunnerError: ``store_unavailable``: the file cannot be used.
        """
        file = await SpoolFile.open(path)
        try:
            return await file.store_id() or ""
        finally:
            await file.close()

    def decide(
        self,
        *,
        may_spool: MaySpool | None = None,
        granted: Granted | None = None,
        on_rejected: OnRejected | None = None,
    ) -> None:
        """Set who decides what, as in ``open``; what is None stays."""
        self._spool.may_spool = may_spool or self._spool.may_spool
        self._spool.granted = granted or self._spool.granted
        self._spool.on_rejected = on_rejected or self._spool.on_rejected

    @property
    def waiting(self) -> int:
        """How many writes wait."""
        return self._spool.waiting

    @property
    def bytes(self) -> int:
        """What they take on disk."""
        return self._spool.bytes

    async def admit(self, admission: Admission) -> bool:
        turn = admission.turn
        key = (turn.project, turn.session_id)
        own = {"admission": admission}
        return await self._spool.write(key, turn.turn_id, "admit", own, lambda: self._remote.admit(admission), True)

    async def end(self, ending: Ending) -> bool:
        turn = ending.turn
        if turn.outcome is None:
            raise ValueError("an ending has an outcome")
        key = (turn.project, turn.session_id)
        own = {"ending": ending}
        return await self._spool.write(key, turn.turn_id, "end", own, lambda: self._remote.end(ending), True)

    async def save_session(self, row: SessionRow) -> None:
        key = (row.project, row.session_id)
        await self._spool.write(key, None, "save_session", {"row": row}, lambda: self._remote.save_session(row), None)

    async def append(
        self,
        records: Sequence[RecordRow],
        interactions: Sequence[InteractionRow] = (),
        prompts: Sequence[PromptRow] = (),
    ) -> Appended:
        first = next((row for rows in (records, interactions, prompts) for row in rows), None)
        if first is None:
            return Appended(0)
        own = {"records": records, "interactions": interactions, "prompts": prompts}
        return await self._spool.write(
            (first.project, first.session_id),
            turn_of(records, interactions, prompts),
            "append",
            own,
            lambda: self._remote.append(records, interactions, prompts),
            Appended(len(records)),
        )

    async def quarantine(self, records: Sequence[RecordRow], reason: str, at: int) -> None:
        """As the port says; spooled whatever ``may_spool`` says, for it shows nothing to anybody."""
        if not records:
            return
        key = (records[0].project, records[0].session_id)
        own = {"records": records, "reason": reason, "at": at}
        work = self._remote.quarantine
        await self._spool.write(key, None, "quarantine", own, lambda: work(records, reason, at), None, always=True)

    async def caught_up(self, project: str, session_id: str) -> None:
        await self._spool.caught_up((project, session_id))
        await self._remote.caught_up(project, session_id)

    async def add_ending(self, record: RecordRow) -> bool:
        await self._spool.caught_up((record.project, record.session_id))
        return await self._remote.add_ending(record)

    async def answer_interaction(self, row: InteractionRow, expected_status: str) -> bool:
        await self._spool.caught_up((row.project, row.session_id))
        return await self._remote.answer_interaction(row, expected_status)

    async def submit_command(self, row: CommandRow) -> CommandRow:
        """As the port says; spooled like what else its turn writes, for a Stop does not wait for the store."""
        key = (row.project, row.session_id)
        own = {"row": row}
        work = self._remote.submit_command
        return await self._spool.write(key, row.turn_id, "submit_command", own, lambda: work(row), row)

    async def delete_session_content(self, project: str, session_id: str) -> None:
        await self._spool.caught_up((project, session_id))
        await self._remote.delete_session_content(project, session_id)

    # -- reads -------------------------------------------------------------------------------------------------------

    async def session(self, project: str, session_id: str) -> SessionRow | None:
        return await self._spool.read(
            (project, session_id), lambda: self._remote.session(project, session_id), lambda lane: lane.session
        )

    async def prompt(self, project: str, session_id: str, prompt_id: str) -> PromptRow | None:
        return await self._spool.read(
            (project, session_id),
            lambda: self._remote.prompt(project, session_id, prompt_id),
            lambda lane: lane.prompts.get(prompt_id),
        )

    async def waiting_prompts(self, key: tuple[str, str] | None = None) -> list[PromptRow]:
        if key is not None:
            await self._spool.caught_up(key)
        return await self._remote.waiting_prompts(key)

    async def context_prompts(self, key: tuple[str, str]) -> list[PromptRow]:
        await self._spool.caught_up(key)
        return await self._remote.context_prompts(key)

    async def turn(self, project: str, session_id: str, turn_id: str) -> TurnRow | None:
        return await self._spool.read(
            (project, session_id),
            lambda: self._remote.turn(project, session_id, turn_id),
            lambda lane: lane.turns.get(turn_id),
        )

    async def last_turn(self, project: str, session_id: str) -> TurnRow | None:
        return await self._spool.read(
            (project, session_id),
            lambda: self._remote.last_turn(project, session_id),
            lambda lane: lane.newest_turn(),
        )

    async def records(
        self, project: str, session_id: str, after: tuple[int, int] | None, limit: int
    ) -> list[RecordRow]:
        await self._spool.caught_up((project, session_id))
        return await self._remote.records(project, session_id, after, limit)

    async def interactions(
        self, project: str, session_id: str | None = None, status: str | None = None
    ) -> list[InteractionRow]:
        if session_id is None:
            await self._spool.settled()
        else:
            await self._spool.caught_up((project, session_id))
        return await self._remote.interactions(project, session_id, status)

    async def interaction(self, project: str, interaction_id: str) -> InteractionRow | None:
        for key, lane in self._spool.lanes.all_waiting():
            if key[0] == project and interaction_id in lane.interactions:
                return await self._spool.read(
                    key,
                    lambda: self._remote.interaction(project, interaction_id),
                    lambda lane: lane.interactions.get(interaction_id),
                )
        return await self._remote.interaction(project, interaction_id)

    async def open_turns(self, key: tuple[str, str] | None = None) -> list[TurnRow]:
        if key is None:
            await self._spool.settled()
            return await self._remote.open_turns()
        return await self._spool.read(key, lambda: self._remote.open_turns(key), lambda lane: lane.open_turns())

    async def paused_turns(self) -> list[TurnRow]:
        await self._spool.settled()
        return await self._remote.paused_turns()

    async def open_interactions(self, status: str) -> list[InteractionRow]:
        await self._spool.settled()
        return await self._remote.open_interactions(status)

    async def open_commands(self, key: tuple[str, str] | None = None) -> list[CommandRow]:
        await self._spool.settled()
        return await self._remote.open_commands(key)

    async def sessions(self, project: str, limit: int, before: tuple[int, str] | None = None) -> list[SessionRow]:
        await self._spool.settled()
        return await self._remote.sessions(project, limit, before)

    async def command(self, project: str, command_id: str) -> CommandRow | None:
        await self._spool.settled()
        return await self._remote.command(project, command_id)

    async def quarantined(self, project: str, limit: int, after: int = 0) -> list[tuple[int, QuarantinedRow]]:
        await self._spool.settled()
        return await self._remote.quarantined(project, limit, after)

    async def expired_records(self, project: str | None, before_ms: int, limit: int) -> list[RecordKey]:
        await self._spool.settled()
        return await self._remote.expired_records(project, before_ms, limit)

    async def ended_turns(self, project: str | None, after: tuple[int, str, str], limit: int) -> list[EndedTurn]:
        await self._spool.settled()
        return await self._remote.ended_turns(project, after, limit)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await self._spool.close()
            await self._remote.close()
