"""The store of a plane, called over HTTP (DESIGN 3.9, 4)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import Any, Final

from pydantic import ValidationError

from runner.errors import RunnerError
from runner.rules.feed import Position, Span
from runner.store.codec import decode_answer, encode
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
    TurnRow,
)
from runner.store.rows import bounded, by_project, meant
from runner.wire.plane import STORE_HEADER, PlaneClient

log = logging.getLogger("runner.store")

CALL_SECONDS: Final = 5.0
BATCH_BYTES: Final = 4 * 1024 * 1024
PAGE_ROWS: Final = 500


class HttpStore:
    """``Store`` over a plane's ``/v1/coordination/store/{call}``; ``open`` makes one.

    A plane that gives no answer is ``store_unavailable``; the call may have been written all the same.
    """

    def __init__(
        self, url: str, tokens: Mapping[str, str], *, store_id: str = "", seconds: float = CALL_SECONDS
    ) -> None:
        self.store_id = store_id
        # What is refused for a token is right once the token is: it must not count as a row that no store will take.
        code = "store_unavailable"
        self._client = PlaneClient(url, tokens, unreachable=code, unwelcome=code, seconds=seconds)

    @classmethod
    async def open(
        cls, url: str, tokens: Mapping[str, str], *, known_id: str = "", seconds: float = CALL_SECONDS
    ) -> HttpStore:
        """A store whose identity is known.

        Args:
            url: of the plane.
            tokens: a token of scope ``runner`` for each project.
            known_id: the plane's store id of an earlier start: with it an unreachable plane is no obstacle.
            seconds: longest wait for one answer.

        Raises:
            RunnerError: ``store_unavailable``: unreachable, another store than ``known_id``, or a token that the plane
                does not accept.
        """
        store = cls(url, tokens, store_id=known_id, seconds=seconds)
        try:
            await store._meet()
        except BaseException:
            await store.close()
            raise
        return store

    async def _meet(self) -> None:
        try:
            _, headers = await self._client.post("store/ready", b"{}")
        except RunnerError as error:
            if not self.store_id or error.code != "store_unavailable":
                raise
            log.error("starting although the store cannot be reached: %s", error.message)
        else:
            self._check(headers.get(STORE_HEADER, ""))

    def _check(self, told: str) -> None:
        """Another store than before must not get what was meant for that one."""
        if not told or told != (self.store_id or told):
            raise RunnerError("store_unavailable", f"The plane has store {told or 'none'}, not {self.store_id}.")
        self.store_id = told

    async def _call(self, call: str, of: str | None, /, **parameters: Any) -> Any:
        body, headers = await self._client.post(f"store/{call}", encode(parameters), of)
        self._check(headers.get(STORE_HEADER, ""))
        try:
            return decode_answer(call, body)
        except ValidationError:
            raise RunnerError("store_unavailable", f"The plane's answer to {call} cannot be read.") from None

    async def _across(self, call: str, order: str, **parameters: Any) -> list[Any]:
        """Of every project that this runner has a token for."""
        found = [row for project in self._client.projects for row in await self._call(call, project, **parameters)]
        return sorted(found, key=attrgetter(order))

    async def _paged(
        self, call: str, project: str, limit: int, behind: str, place: Callable[[Any], Any], **parameters: Any
    ) -> list[Any]:
        """Page by page: the parameter ``behind`` says where one begins, at the ``place`` of the last row so far."""
        found: list[Any] = []
        while (left := bounded(limit) - len(found)) > 0:
            wanted = min(left, PAGE_ROWS)
            page = await self._call(call, project, project=project, limit=wanted, **parameters)
            found += page
            if len(page) < wanted:
                break
            parameters[behind] = place(page[-1])
        return found

    async def admit(self, admission: Admission) -> bool:
        return bool(await self._call("admit", admission.turn.project, admission=admission))

    async def end(self, ending: Ending) -> bool:
        if ending.turn.outcome is None:
            raise ValueError("an ending has an outcome")
        *before, rest = _batches(ending.records)
        for records in before:
            await self.append(records)
        try:
            return bool(await self._call("end", ending.turn.project, ending=replace(ending, records=rest)))
        except RunnerError as error:
            if error.code != "too_large" or not rest:
                raise _refused(error) from None
        await self.append(rest)
        return await self.end(replace(ending, records=()))

    async def save_session(self, row: SessionRow) -> None:
        await self._call("save_session", row.project, row=row)

    async def append(
        self,
        records: Sequence[RecordRow],
        interactions: Sequence[InteractionRow] = (),
        prompts: Sequence[PromptRow] = (),
    ) -> Appended:
        done = Appended(0)
        *before, rest = _batches(records)
        for batch in before:
            done += await self._append(batch, (), ())
        if done.quarantined or done.dropped:
            interactions, prompts = (), ()
        return done + await self._append(rest, interactions, prompts)

    async def _append(
        self, records: Sequence[RecordRow], interactions: Sequence[InteractionRow], prompts: Sequence[PromptRow]
    ) -> Appended:
        project = next((row.project for rows in (records, interactions, prompts) for row in rows), None)
        if project is None:
            return Appended(0)
        own = {"records": records, "interactions": interactions, "prompts": prompts}
        try:
            answer: Appended = await self._call("append", project, **own)
            return answer
        except RunnerError as error:
            if error.code != "too_large" or len(records) < 2:
                raise _refused(error) from None
        middle = len(records) // 2
        done = await self._append(records[:middle], (), ())
        if done.quarantined or done.dropped:
            interactions, prompts = (), ()
        return done + await self._append(records[middle:], interactions, prompts)

    async def write_batch(self, records: Sequence[RecordRow]) -> Appended:
        done = Appended(0)
        for project, rows in by_project(meant(records)).items():
            for batch in _batches(rows):
                if batch:
                    try:
                        done += await self._call("write_batch", project, records=batch)
                    except RunnerError as error:
                        raise _refused(error) from None
        return done

    async def create_session(self, row: SessionRow, records: Sequence[RecordRow]) -> bool:
        return bool(await self._call("create_session", row.project, row=row, records=records))

    async def caught_up(self, project: str, session_id: str) -> None:
        await self._call("caught_up", project, project=project, session_id=session_id)

    async def quarantine(self, records: Sequence[RecordRow], reason: str, at: int) -> None:
        for batch in _batches(records):
            if batch:
                await self._call("quarantine", batch[0].project, records=batch, reason=reason, at=at)

    async def quarantined(self, project: str, limit: int, after: int = 0) -> list[tuple[int, QuarantinedRow]]:
        return await self._paged("quarantined", project, limit, "after", itemgetter(0), after=after)

    async def submit_command(self, row: CommandRow) -> CommandRow:
        submitted: CommandRow = await self._call("submit_command", row.project, row=row)
        return submitted

    async def claim_command(
        self, project: str, command_id: str, replica_id: str, now: int, until: int, max_deliveries: int
    ) -> CommandRow | None:
        claimed: CommandRow | None = await self._call(
            "claim_command",
            project,
            project=project,
            command_id=command_id,
            replica_id=replica_id,
            now=now,
            until=until,
            max_deliveries=max_deliveries,
        )
        return claimed

    async def settle_command(self, project: str, command_id: str, state: str, outcome: str | None, at: int) -> bool:
        own = {"project": project, "command_id": command_id, "state": state, "outcome": outcome, "at": at}
        return bool(await self._call("settle_command", project, **own))

    async def command(self, project: str, command_id: str) -> CommandRow | None:
        found: CommandRow | None = await self._call("command", project, project=project, command_id=command_id)
        return found

    async def open_commands(self, key: tuple[str, str] | None = None) -> list[CommandRow]:
        if key is None:
            return await self._across("open_commands", "arrived_at")
        return list(await self._call("open_commands", key[0], key=key))

    async def answer_interaction(self, row: InteractionRow, expected_status: str) -> bool:
        return bool(await self._call("answer_interaction", row.project, row=row, expected_status=expected_status))

    async def session(self, project: str, session_id: str) -> SessionRow | None:
        found: SessionRow | None = await self._call("session", project, project=project, session_id=session_id)
        return found

    async def sessions(self, project: str, limit: int, before: tuple[int, str] | None = None) -> list[SessionRow]:
        place = attrgetter("updated_at", "session_id")
        return await self._paged("sessions", project, limit, "before", place, before=before)

    async def prompt(self, project: str, session_id: str, prompt_id: str) -> PromptRow | None:
        own = {"project": project, "session_id": session_id, "prompt_id": prompt_id}
        found: PromptRow | None = await self._call("prompt", project, **own)
        return found

    async def waiting_prompts(self, key: tuple[str, str] | None = None) -> list[PromptRow]:
        if key is None:
            return await self._across("waiting_prompts", "seq")
        return list(await self._call("waiting_prompts", key[0], key=key))

    async def context_prompts(self, key: tuple[str, str]) -> list[PromptRow]:
        return list(await self._call("context_prompts", key[0], key=key))

    async def turn(self, project: str, session_id: str, turn_id: str) -> TurnRow | None:
        own = {"project": project, "session_id": session_id, "turn_id": turn_id}
        found: TurnRow | None = await self._call("turn", project, **own)
        return found

    async def last_turn(self, project: str, session_id: str) -> TurnRow | None:
        found: TurnRow | None = await self._call("last_turn", project, project=project, session_id=session_id)
        return found

    async def open_turns(self, key: tuple[str, str] | None = None) -> list[TurnRow]:
        if key is None:
            return await self._across("open_turns", "started_at")
        return list(await self._call("open_turns", key[0], key=key))

    async def paused_turns(self) -> list[TurnRow]:
        return await self._across("paused_turns", "started_at")

    async def records(
        self, project: str, session_id: str, after: tuple[int, int] | None, limit: int
    ) -> list[RecordRow]:
        place = attrgetter("cursor")
        return await self._paged("records", project, limit, "after", place, after=after, session_id=session_id)

    async def interactions(
        self, project: str, session_id: str | None = None, status: str | None = None
    ) -> list[InteractionRow]:
        own = {"project": project, "session_id": session_id, "status": status}
        return list(await self._call("interactions", project, **own))

    async def open_interactions(self, status: str) -> list[InteractionRow]:
        return await self._across("open_interactions", "created_at", status=status)

    async def interaction(self, project: str, interaction_id: str) -> InteractionRow | None:
        own = {"project": project, "interaction_id": interaction_id}
        found: InteractionRow | None = await self._call("interaction", project, **own)
        return found

    async def delete_session_content(self, project: str, session_id: str) -> None:
        await self._call("delete_session_content", project, project=project, session_id=session_id)

    def _projects(self, project: str | None) -> Sequence[str]:
        return [project] if project is not None else list(self._client.projects)

    async def _merged(self, call: str, project: str | None, limit: int, **more: Any) -> list[Any]:
        """Of the projects that a call means: their first rows together, in the order of one project after another."""
        found: list[Any] = []
        for name in self._projects(project):
            if (left := bounded(limit) - len(found)) > 0:
                found += await self._call(call, name, project=name, limit=left, **more)
        return found

    async def feed(self, project: str, after: Position, limit: int) -> list[FeedRow]:
        return await self._paged("feed", project, limit, "after", attrgetter("position"), after=after)

    async def feed_span(self, project: str) -> Span:
        return Span(*await self._call("feed_span", project, project=project))

    async def trim_feed(self, project: str | None, before_ms: int, limit: int) -> int:
        trimmed = 0
        for name in self._projects(project):
            own = {"project": name, "before_ms": before_ms, "limit": limit - trimmed}
            trimmed += await self._call("trim_feed", name, **own)
        return trimmed

    async def expired_records(self, project: str | None, before_ms: int, limit: int) -> list[RecordKey]:
        return await self._merged("expired_records", project, limit, before_ms=before_ms)

    async def delete_records(self, keys: Sequence[RecordKey]) -> int:
        return sum([await self._call("delete_records", name, keys=own) for name, own in by_project(keys).items()])

    async def expired_quarantine(self, project: str | None, before_ms: int, limit: int) -> list[RecordKey]:
        return await self._merged("expired_quarantine", project, limit, before_ms=before_ms)

    async def delete_quarantined(self, keys: Sequence[RecordKey]) -> int:
        return sum([await self._call("delete_quarantined", name, keys=own) for name, own in by_project(keys).items()])

    async def count_expired(self, project: str | None, before_ms: int) -> Expired:
        all_of = Expired({}, {})
        for name in self._projects(project):
            found: Expired = await self._call("count_expired", name, project=name, before_ms=before_ms)
            all_of = Expired(all_of.records | found.records, all_of.quarantined | found.quarantined)
        return all_of

    async def pruned_to(self, project: str, session_id: str) -> tuple[int, int] | None:
        found: tuple[int, int] | None = await self._call("pruned_to", project, project=project, session_id=session_id)
        return found

    async def unstorable(self, project: str, session_id: str) -> list[tuple[int, int]]:
        return list(await self._call("unstorable", project, project=project, session_id=session_id))

    async def ended_turns(self, project: str | None, after: tuple[int, str, str], limit: int) -> list[EndedTurn]:
        found: list[EndedTurn] = []
        for name in self._projects(project):
            found += await self._call("ended_turns", name, project=name, after=after, limit=bounded(limit))
        return sorted(found)[: bounded(limit)]

    async def add_ending(self, record: RecordRow) -> bool:
        return bool(await self._call("add_ending", record.project, record=record))

    async def ready(self) -> bool:
        try:
            return bool(await self._call("ready", None))
        except RunnerError:
            return False

    async def close(self) -> None:
        await self._client.close()


def _batches(records: Sequence[RecordRow]) -> list[Sequence[RecordRow]]:
    """The records in order, cut where a request would grow beyond ``BATCH_BYTES``; the last may be empty."""
    batches: list[Sequence[RecordRow]] = []
    start = size = 0
    for index, row in enumerate(records):
        size += len(row.data) + 256
        if size > BATCH_BYTES and index > start:
            batches.append(records[start:index])
            start, size = index, len(row.data) + 256
    return [*batches, records[start:]]


def _refused(error: RunnerError) -> RunnerError:
    """What no request can carry is a row that the store refuses."""
    return RunnerError("internal", error.message) if error.code == "too_large" else error
