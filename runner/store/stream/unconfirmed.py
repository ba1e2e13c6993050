"""What a sender gave to the stream and nobody acknowledged yet: kept until the floor passes it."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from runner.ids import Key
from runner.rules.delivery import EntryId, may_trim
from runner.store.port import RecordRow


@dataclass(slots=True, eq=False)
class Held:
    """One record, and the size of its payload; ``entry_id`` None: it is not in the stream as far as anybody knows."""

    row: RecordRow
    size: int
    entry_id: EntryId | None = None


class Unconfirmed:
    """The records of this process, session by session; ``bytes`` is what their payloads take."""

    def __init__(self) -> None:
        self.bytes = 0
        self._sessions: dict[Key, dict[str, Held]] = {}
        self._order: list[tuple[EntryId, int, Held]] = []
        self._pushed = 0

    def __bool__(self) -> bool:
        return bool(self._sessions)

    def __len__(self) -> int:
        return sum(len(held) for held in self._sessions.values())

    def hold(self, rows: Sequence[RecordRow], payloads: Sequence[bytes]) -> list[Held]:
        """Keep records; those that are kept already stay as they are. What is kept, in order."""
        kept = []
        for row, payload in zip(rows, payloads, strict=True):
            session = self._sessions.setdefault((row.project, row.session_id), {})
            known = session.get(row.record_id)
            if known is None:
                known = session[row.record_id] = Held(row, len(payload))
                self.bytes += len(payload)
            kept.append(known)
        return kept

    def published(self, held: Sequence[Held], entry_ids: Sequence[EntryId]) -> None:
        """They are in the stream now, each as an entry."""
        for one, entry_id in zip(held, entry_ids, strict=True):
            one.entry_id = entry_id
            self._pushed += 1
            heapq.heappush(self._order, (entry_id, self._pushed, one))

    def confirm(self, floor: EntryId) -> None:
        """Forget what the store has."""
        while self._order and may_trim(self._order[0][0], floor):
            entry_id, _, held = heapq.heappop(self._order)
            if held.entry_id == entry_id:
                self._forget(held.row)

    def begin_anew(self) -> None:
        """The stream lost what it had: nothing is in it as far as anybody knows."""
        self._order.clear()
        for held in self.all():
            held.entry_id = None

    def rows(self, key: Key) -> list[RecordRow]:
        """A session's records, by cursor."""
        found = (held.row for held in self._sessions.get(key, {}).values())
        return sorted(found, key=lambda row: row.cursor)

    def all(self) -> list[Held]:
        """Everything, the oldest of each session first."""
        return [held for session in self._sessions.values() for held in session.values()]

    def unpublished(self) -> list[Held]:
        """What has to be given to the stream, or to the store."""
        return [held for held in self.all() if held.entry_id is None]

    def forget(self, rows: Iterable[RecordRow]) -> None:
        """The store has these."""
        for row in rows:
            self._forget(row)

    def forget_session(self, key: Key) -> None:
        """Nothing of a session counts any more."""
        self.forget(self.rows(key))

    def knows(self, rows: Sequence[RecordRow]) -> Collection[str]:
        """Ids of those that are kept."""
        return {row.record_id for row in rows if row.record_id in self._sessions.get((row.project, row.session_id), {})}

    def _forget(self, row: RecordRow) -> None:
        key = (row.project, row.session_id)
        session = self._sessions.get(key)
        held = session.pop(row.record_id, None) if session is not None else None
        if held is not None:
            held.entry_id = None
            self.bytes -= held.size
            if not session:
                del self._sessions[key]
