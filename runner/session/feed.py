"""The project feed: what becomes of all sessions of a project, read from the store (DESIGN 4).

Any replica answers, and a gateway too: what every one of them writes is in the store, and nothing else is told.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Final

from runner.clock import Clock, rfc3339
from runner.errors import RunnerError
from runner.ids import format_cursor
from runner.rules import feed
from runner.rules.feed import Position
from runner.session.history import UNREADABLE, next_of
from runner.session.outage import Outage
from runner.session.port import Reader, ReaderCut, ReaderEnded
from runner.store.port import FeedRow, Store
from runner.tasks import Tasks
from runner.terms import EventType
from runner.turn.log import Chunk, SessionLog
from runner.wire.codec import event_line, feed_line, ping_line, to_json

log = logging.getLogger("runner.session")
PAGE: Final = 500
POLL_SECONDS: Final = 1.0
EAGER_SECONDS: Final = 0.05


def position_of(text: str | None, name: str = "after") -> Position | None:
    """A client's feed cursor; ``name`` is what carried it.

    Raises:
        RunnerError: ``invalid_request`` when it is not one.
    """
    if text is None:
        return None
    position = feed.parse_position(text)
    if position is None:
        raise RunnerError("invalid_request", f"{name}: must be a cursor of the feed such as 0-17.", field=name)
    return position


class Feeds:
    """The feeds that are being followed at this replica: one poll of the store for each project, however many follow.

    Args:
        store: what all replicas share.
        clock: for instants of lines that no event makes.
        tasks: owns the polls.
        ring_bytes: see ``SessionLog``; so is ``buffer_bytes``.
    """

    def __init__(self, store: Store, clock: Clock, tasks: Tasks, ring_bytes: int, buffer_bytes: int) -> None:
        self.store = store
        self.clock = clock
        self.tasks = tasks
        self._sizes = ring_bytes, buffer_bytes
        self._tails: dict[str, Tail] = {}

    def stir(self, project: str) -> None:
        """An item of this project is on its way to the store here: look soon."""
        tail = self._tails.get(project)
        if tail is not None:
            tail.stir()

    async def reader(self, project: str, after: str | None, follow: bool) -> Reader:
        """See ``session.port.Sessions.feed``."""
        position = position_of(after)
        tail = self._tail(project) if follow else None
        try:
            if tail is not None:
                await tail.begun()
            span = await self.store.feed_span(project)
            return FeedReader(self, project, feed.start(position, follow, span), span.end, tail)
        except BaseException:
            if tail is not None:
                self.left(tail)
            raise

    def _tail(self, project: str) -> Tail:
        tail = self._tails.get(project)
        if tail is None:
            tail = self._tails[project] = Tail(self, project, SessionLog(*self._sizes))
        tail.followers += 1
        return tail

    def left(self, tail: Tail) -> None:
        """A follower has gone; the last one ends the poll."""
        tail.followers -= 1
        if tail.followers == 0:
            del self._tails[tail.project]
            tail.stop()


class Tail:
    """The newest part of one project's feed, polled; ``position`` is how far it is read."""

    def __init__(self, feeds: Feeds, project: str, lines: SessionLog) -> None:
        self.project = project
        self.lines = lines
        self.position: Position = (0, 0)
        self.followers = 0
        self._feeds = feeds
        self._outage = Outage(f"the feed of project {project}")
        self._owed = 0
        self._eager_until = 0.0
        self._stirred = asyncio.Event()
        self._begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = feeds.tasks.spawn(f"feed of {project}", self._follow())

    async def begun(self) -> None:
        """Wait until it is known from where on items are gathered.

        Raises:
            RunnerError: ``store_unavailable``.
        """
        await asyncio.shield(self._begun)

    def stir(self) -> None:
        """Something is on its way."""
        self._owed += 1
        self._eager_until = asyncio.get_running_loop().time() + POLL_SECONDS
        self._stirred.set()

    def stop(self) -> None:
        """Nobody follows any more."""
        self._task.cancel()
        if self._begun.done() and not self._begun.cancelled():
            self._begun.exception()

    async def _follow(self) -> None:
        try:
            self.position = (await self._feeds.store.feed_span(self.project)).end
            self._begun.set_result(None)
        except Exception as error:
            self._begun.set_exception(error)
            return
        while True:
            await self._pause()
            try:
                await self._poll()
            except Exception as error:
                self._outage.met(error)
            else:
                self._outage.over()

    async def _pause(self) -> None:
        """Until the next look: soon while something of this replica is on its way, at the latest after 1 s."""
        self._stirred.clear()
        eager = self._owed > 0 and asyncio.get_running_loop().time() < self._eager_until
        if eager:
            await asyncio.sleep(EAGER_SECONDS)
            return
        self._owed = 0
        try:
            async with asyncio.timeout(POLL_SECONDS):
                await self._stirred.wait()
        except TimeoutError:
            pass

    async def _poll(self) -> None:
        while True:
            page = await self._feeds.store.feed(self.project, self.position, PAGE)
            self._owed = max(0, self._owed - len(page))
            for row in page:
                self.lines.append(Chunk(*row.position, row.position[1], None, as_line(row)))
                self.position = row.position
            if len(page) < PAGE:
                return


class FeedReader:
    """Implements ``session.port.Reader``: what is kept behind a position, then, with a tail, what comes.

    It subscribes to the tail before it reads the store: what is behind the tail's position comes from there.
    """

    def __init__(self, feeds: Feeds, project: str, start: feed.Start, end: Position, tail: Tail | None) -> None:
        self._feeds = feeds
        self._project = project
        self._start = start
        self._until = tail.position if tail is not None else end
        self._tail = tail
        self._live = tail.lines.reader(at=tail.lines.end) if tail is not None else None
        if self._live is not None:
            self._live.skip_to(max(start.after, self._until))
        self._past = self._read_past()
        self._in_past = True

    async def _read_past(self) -> AsyncIterator[bytes]:
        after, told = self._start.after, feed.format_position(self._start.after)
        if self._start.resync:
            at = rfc3339(self._feeds.clock.now_ms())
            yield event_line(told, None, None, at, EventType.RESYNC, to_json({"from": told}))
        else:
            # A follower that meets nothing new still learns the cursor from which it can come back.
            yield ping_line(told)
        while after < self._until:
            page = await self._feeds.store.feed(self._project, after, PAGE)
            due = [row for row in page if row.position <= self._until]
            if due:
                yield b"".join([as_line(row) for row in due])
                after = due[-1].position
            if len(due) < PAGE:
                return

    async def next(self, seconds: float) -> bytes | None:
        """See ``session.port.Reader``."""
        if self._in_past:
            try:
                async for lines in self._past:
                    return lines
            except RunnerError as error:
                raise ReaderCut(f"{UNREADABLE}: {error.message}") from None
            self._in_past = False
        if self._live is None:
            raise ReaderEnded
        return await next_of(self._live, seconds)

    @property
    def ended(self) -> bool:
        """See ``session.port.Reader``."""
        return False

    def close(self, *, cut: bool = False) -> None:
        """See ``session.port.Reader``."""
        tail, self._tail = self._tail, None
        if tail is not None and self._live is not None:
            self._live.close()
            self._feeds.left(tail)


def as_line(row: FeedRow) -> bytes:
    """An item as the line that clients read."""
    return feed_line(
        feed.format_position(row.position),
        row.session_id,
        format_cursor(row.epoch, row.n),
        row.turn_id,
        rfc3339(row.at),
        row.type,
        row.data.encode(),
    )
