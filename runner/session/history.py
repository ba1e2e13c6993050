"""Readers of a session's past: durable records first, then the live log, with nothing lost in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final, Protocol

import orjson

from runner.clock import Clock, rfc3339
from runner.errors import RunnerError
from runner.ids import Cursor, format_cursor, parse_cursor
from runner.rules.fork import origin_of
from runner.rules.history import overshot
from runner.rules.pool import Key
from runner.rules.retention import misses
from runner.session.port import ReaderCut, ReaderEnded
from runner.session.prompts import Presence
from runner.session.session import Session
from runner.store.port import RecordRow, Store
from runner.terms import EventType
from runner.turn.journal import Head
from runner.turn.log import LogCut, LogEnded, LogReader, SessionLog
from runner.wire.codec import EventFormatter, event_line, to_json

PAGE: Final = 500
UNREADABLE: Final = "the past cannot be read now; read on from your last cursor"


def cursor_of(text: str | None) -> Cursor | None:
    """A client's cursor.

    Raises:
        RunnerError: ``invalid_request`` when it is not one.
    """
    if text is None:
        return None
    cursor = parse_cursor(text)
    if cursor is None:
        raise RunnerError("invalid_request", "after: must be a cursor such as 3.17.", field="after")
    return cursor


def record_view(row: RecordRow) -> dict[str, Any]:
    """The record of DESIGN 4.1."""
    return {**record_head(row), "data": orjson.loads(row.data)}


def record_head(row: RecordRow) -> dict[str, Any]:
    """The record without its data."""
    return {
        "record_id": row.record_id,
        "session_id": row.session_id,
        "turn_id": row.turn_id,
        "prompt_id": row.prompt_id,
        "cursor": format_cursor(*row.cursor),
        "type": row.type,
        "at": rfc3339(row.at),
    }


def as_event(row: RecordRow) -> bytes:
    """A record as the event line that it stands for."""
    formatter = EventFormatter(row.turn_id, row.prompt_id)
    return formatter.line(format_cursor(*row.cursor), rfc3339(row.at), row.type, row.data)


async def pages(store: Store, key: Key, after: Cursor | None) -> AsyncIterator[list[RecordRow]]:
    """The records of a session behind a cursor, oldest first."""
    while True:
        rows = await store.records(*key, after, PAGE)
        if rows:
            yield rows
        if len(rows) < PAGE:
            return
        after = rows[-1].cursor


async def prompt_events(store: Store, session: Session, prompt_id: str) -> list[bytes]:
    """Event lines of an ended prompt, page by page; a fork's own one, whatever its source called the same."""
    origin, parts = origin_of(session.agent_state), list[bytes]()
    async for rows in pages(store, session.key, parse_cursor(origin["head"]) if origin else None):
        lines = [as_event(row) for row in rows if row.prompt_id == prompt_id]
        if lines:
            parts.append(b"".join(lines))
    return parts


class Source(Protocol):
    """What is read live: a session of this replica, or the mirror of one that another replica has."""

    @property
    def key(self) -> Key: ...
    @property
    def head(self) -> Head: ...
    @property
    def log(self) -> SessionLog: ...
    @property
    def log_since(self) -> Cursor: ...
    @property
    def presence(self) -> Presence: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def over(self) -> bool: ...
    @property
    def taken(self) -> bool: ...

    async def settle(self) -> None:
        """See that the store has every record that was shown before this call."""
        ...


async def next_of(reader: LogReader, seconds: float) -> bytes | None:
    """What a reader of a log gets next, as ``session.port.Reader`` says."""
    try:
        return await reader.next(seconds)
    except LogEnded:
        raise ReaderEnded from None
    except LogCut as cut:
        raise ReaderCut(str(cut)) from None


async def next_live(session: Source, reader: LogReader, seconds: float) -> bytes | None:
    """``next_of`` the live log of a session, whose readers are counted."""
    try:
        return await next_of(reader, seconds)
    except ReaderCut:
        session.presence.cut()
        raise


class HistoryReader:
    """History behind a cursor, then live events when following.

    It subscribes to the log before it reads the store, so that nothing falls in between (DESIGN 3.9).

    Args:
        store: where the past is.
        session: whose past.
        after: the last cursor that the reader has seen.
        follow: whether it goes on with what comes.
        of: only one prompt's events, until this result is there.
    """

    def __init__(
        self,
        store: Store,
        session: Source,
        after: Cursor | None,
        follow: bool,
        of: tuple[str, asyncio.Future[dict[str, Any]]] | None = None,
    ) -> None:
        self._store = store
        self._session = session
        self._after = after or (0, 0)
        self._follow = follow
        self._prompt_id = of[0] if of is not None else None
        self._resync = self._after > session.head.cursor
        if self._resync:
            self._after = (0, 0)
        self._log_reader = self._subscribe(of[1] if of is not None else None)
        self._past = self._read_past()
        self._in_past = True
        self._seam: Cursor | None = self._after
        self._open = True
        if follow:
            session.presence.count += 1

    def _subscribe(self, result: asyncio.Future[dict[str, Any]] | None) -> LogReader:
        log = self._session.log
        self._covered = log.covers(self._after, self._session.log_since)
        self._until = log.base_cursor if not self._covered else self._after
        # Who comes back by a cursor may have missed frames of what is still open, in a connection before this one.
        came_back = result is None and self._after != (0, 0)
        reader = log.reader(prompt_id=self._prompt_id, whole=came_back or not self._covered)
        reader.skip_to(self._after)
        if result is not None:
            reader.end_when(result.done)
            result.add_done_callback(lambda _: reader.wake())
        elif not self._follow:
            end = log.end
            reader.end_when(lambda: reader.position >= end)
        else:
            reader.end_when(lambda: self._session.over and not self._session.taken)
        return reader

    async def _read_past(self) -> AsyncIterator[bytes]:
        after, told = self._after, b""
        if self._resync:
            told = self._resync_from((0, 0))
        elif await self._saw_what_does_not_count():
            after = (after[0], 0)
            self._begin_again(after)
            told = self._resync_from(after)
        if self._covered:
            if told:
                yield told
            return
        await self._session.settle()
        more = True
        while more:
            page = await self._store.records(*self._session.key, after, PAGE)
            gone = await self._deleted(after)
            if gone is not None:
                told, after = self._resync_from(gone), gone
            due = [row for row in page if after < row.cursor and self._before_ring(row)]
            # A resync goes out with what follows: who is cut between the two would come back by a cursor it forgot.
            lines = [told, *(as_event(row) for row in due if self._prompt_id in (None, row.prompt_id))]
            if any(lines):
                told = b""
                yield b"".join(lines)
            if due:
                after = due[-1].cursor
            more = len(page) == PAGE and self._before_ring(page[-1])
        self._seam = max(after, self._after)
        self._log_reader.skip_to(self._seam)

    async def _saw_what_does_not_count(self) -> bool:
        """Whether an owner that was overtaken showed this reader more of an epoch than is kept of it."""
        epoch, n = self._after
        if epoch == 0 or epoch == self._session.head.cursor[0]:
            return False
        try:
            await self._session.settle()
            page = await self._store.records(*self._session.key, (epoch, n - 1), 1)
            return overshot(self._after, page[0].cursor if page else None, await self._pruned())
        except (RunnerError, ReaderCut):
            if not self._covered:
                raise
            return False

    async def _pruned(self) -> Cursor | None:
        return await self._store.pruned_to(*self._session.key)

    def _begin_again(self, after: Cursor) -> None:
        """Read from the store behind an earlier cursor; all of that epoch comes from there."""
        behind, base = (after[0] + 1, 0), self._session.log.base_cursor
        self._covered = False
        self._until = base if base is None or base > behind else behind

    def _resync_from(self, start: Cursor) -> bytes:
        return resync_line(format_cursor(*start), rfc3339(self._session.clock.now_ms()))

    def _before_ring(self, row: RecordRow) -> bool:
        return self._until is None or row.cursor < self._until

    async def _deleted(self, after: Cursor) -> Cursor | None:
        """The cursor up to which retention deleted what this reader has not seen; asked behind each page.

        Who comes without a cursor misses nothing: its history begins later.
        """
        if after == (0, 0) or self._prompt_id is not None:
            return None
        pruned = await self._pruned()
        return pruned if misses(after, pruned) else None

    async def next(self, seconds: float) -> bytes | None:
        """See ``session.port.Reader``."""
        try:
            if self._in_past:
                async for lines in self._past:
                    return lines
                self._in_past = False
            live = await next_live(self._session, self._log_reader, seconds)
            return await self._seamless(live) if live and self._seam is not None else live
        except RunnerError as error:
            self._session.presence.cut()
            raise ReaderCut(f"{UNREADABLE}: {error.message}") from None

    async def _seamless(self, live: bytes) -> bytes:
        """The first live lines, behind what the owner before this one wrote since the past was read.

        Whatever counts of an older epoch is in the store when a newer one is shown.
        """
        seam, self._seam = self._seam, None
        if seam is None or seam > self._session.log_since or self._prompt_id is not None:
            return live
        first = parse_cursor(orjson.loads(live.partition(b"\n")[0]).get("cursor") or "")
        if first is None or first[0] == seam[0]:
            return live
        rows = await self._store.records(*self._session.key, seam, PAGE)
        return b"".join(as_event(row) for row in rows if row.cursor < first) + live

    @property
    def ended(self) -> bool:
        """See ``session.port.Reader``."""
        return not self._in_past and self._log_reader.ended

    def close(self, *, cut: bool = False) -> None:
        """See ``session.port.Reader``."""
        if cut and self._open:
            self._session.presence.cut()
        if self._open:
            self._open = False
            self._log_reader.close()
            if self._follow:
                self._session.presence.left(self._session.clock.monotonic())


def resync_line(start: str, at: str) -> bytes:
    """Tells a reader to forget what it has: everything from ``start`` follows. It has no cursor of its own."""
    return event_line(None, None, None, at, EventType.RESYNC, to_json({"from": start}))
