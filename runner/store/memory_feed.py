"""The project feed of the store's twin in memory."""

from __future__ import annotations

from collections.abc import Iterable

from runner.rules.feed import FED, SESSION_ENDED, Position, Span
from runner.store.port import FeedRow, RecordRow, SessionRow
from runner.store.rows import bounded


class MemoryFeed:
    """The part of ``MemoryStore`` that is about the feed: items by number; none is given out twice."""

    def __init__(self) -> None:
        self._fed: dict[int, FeedRow] = {}
        self._newest = 0
        self._floors: dict[str, int] = {}

    def _usable(self) -> None:
        """Raises ``RunnerError`` while the store is out of order."""
        raise NotImplementedError

    def _feed_records(self, rows: Iterable[RecordRow]) -> None:
        """Records were inserted."""
        for row in rows:
            if row.type in FED:
                text = row.data.decode()
                self._feed_item(row.project, row.session_id, row.turn_id, row.type, row.cursor, text, row.at)

    def _feed_session(self, before: SessionRow | None, row: SessionRow) -> None:
        """A session was saved."""
        if row.ended_at is not None and (before is None or before.ended_at is None):
            place = (row.head_epoch, row.head_n)
            self._feed_item(row.project, row.session_id, None, SESSION_ENDED, place, "{}", row.ended_at)

    def _feed_item(
        self, project: str, session_id: str, turn_id: str | None, type: str, place: tuple[int, int], data: str, at: int
    ) -> None:
        self._newest += 1
        self._fed[self._newest] = FeedRow(
            project, (0, self._newest), session_id, turn_id, type, place[0], place[1], data, at
        )

    async def feed(self, project: str, after: Position, limit: int) -> list[FeedRow]:
        self._usable()
        mine = [row for row in self._fed.values() if row.project == project and row.position > after]
        return mine[: bounded(limit)]

    async def feed_span(self, project: str) -> Span:
        self._usable()
        return Span((0, self._floors.get(project, 0)), (0, self._newest))

    async def trim_feed(self, project: str | None, before_ms: int, limit: int) -> int:
        self._usable()
        old = [row for row in self._fed.values() if project in (None, row.project) and row.at < before_ms]
        gone = sorted(old, key=lambda row: (row.at, row.position))[: bounded(limit)]
        for row in gone:
            n = row.position[1]
            del self._fed[n]
            self._floors[row.project] = max(n, self._floors.get(row.project, 0))
        return len(gone)

    def _unfeed(self, key: tuple[str, str]) -> None:
        """The content of an ended session goes; that it ended stays."""
        for n, row in list(self._fed.items()):
            if (row.project, row.session_id) == key and row.type != SESSION_ENDED:
                del self._fed[n]
