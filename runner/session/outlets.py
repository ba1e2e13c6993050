"""The owner's side of the live bus: a session is shown at other replicas while they say that somebody follows it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from runner.errors import RunnerError
from runner.leases.live import LiveBus
from runner.leases.port import Note
from runner.rules.following import Place, sent_next
from runner.rules.pool import Key
from runner.session.live_entry import Entry, encode
from runner.session.registry import Registry
from runner.session.services import Services
from runner.session.session import Session
from runner.turn.log import Chunk, LogCut

log = logging.getLogger("runner.session")
WATCH: Final = "watch"
"""Kind of the note by which a replica says which sessions are followed at it."""
WATCHED_SECONDS: Final = 10.0
RETRY_SECONDS: Final = 0.5
BEGIN_SECONDS: Final = 1.0
REPLAY_BYTES: Final = 1024 * 1024
LARGE_BYTES: Final = 2 * 1024 * 1024
"""A larger chunk does not go over the bus: who follows reads its record in the store."""


class Wish(NamedTuple):
    """What a replica says about one session that is followed at it.

    Attributes:
        place: where it is.
        mark: to be answered once the store has everything shown so far; empty for none.
        cut: a reader of it was given up, it did not leave.
        bye: nobody follows it there any more.
    """

    place: Place
    mark: str = ""
    cut: bool = False
    bye: bool = False


class Outlets:
    """Publishes the logs of this replica's sessions to the replicas that watch them, one outlet for each.

    A watch that is not renewed for ``WATCHED_SECONDS`` lapses; until then it is a reader of the session (DESIGN 3.4).
    """

    def __init__(self, services: Services, registry: Registry, bus: LiveBus) -> None:
        self._services = services
        self._registry = registry
        self._bus = bus
        self._outlets: dict[tuple[str, Key], Outlet] = {}
        self._opening: dict[tuple[str, Key], Wish] = {}

    def note(self, note: Note) -> None:
        """What a replica says about the sessions that are followed at it."""
        watcher = str(note["from"])
        for key, wish in wishes_of(note):
            outlet = self._outlets.get((watcher, key))
            if outlet is not None:
                self._renew(outlet, wish)
            elif wish.bye:
                self._opening.pop((watcher, key), None)
            else:
                if (watcher, key) not in self._opening:
                    self._services.tasks.spawn(f"show {key[1]}", self._open(watcher, key))
                self._opening[watcher, key] = wish

    async def _open(self, watcher: str, key: Key) -> None:
        """Show a session, if it is this replica's to show; else its follower finds who has it."""
        try:
            elsewhere = await self._services.owners.elsewhere(*key)
            session = await self._registry.find(key) if elsewhere is None else None
        except RunnerError as error:
            log.debug("session %s cannot be shown at %s: %s", key[1], watcher, error)
            session = None
        wish = self._opening.pop((watcher, key), None)
        if wish is None or session is None or not session.exists:
            return
        outlet = Outlet(session, watcher, self._services, self._bus)
        self._outlets[watcher, key] = outlet
        self._renew(outlet, wish)
        try:
            await outlet.run()
        finally:
            if self._outlets.get((watcher, key)) is outlet:
                del self._outlets[watcher, key]

    def _renew(self, outlet: Outlet, wish: Wish) -> None:
        outlet.renew(wish)
        if outlet.closed:
            self._outlets.pop((outlet.watcher, outlet.session.key), None)
        elif wish.mark:
            self._services.tasks.spawn(f"settle {outlet.session.session_id}", outlet.settle(wish.mark))


class Outlet:
    """Sends one session's log to one replica, in order, from where that replica is."""

    def __init__(self, session: Session, watcher: str, services: Services, bus: LiveBus) -> None:
        self.session = session
        self.watcher = watcher
        self.closed = False
        self._services = services
        self._bus = bus
        self._now: Callable[[], float] = services.clock.monotonic
        self._until = self._now() + WATCHED_SECONDS
        self._log_reader = session.log.reader()
        self._series = ""
        self._began = float("-inf")
        self._since: tuple[int, int] | None = None
        self._marks: dict[str, bool] = {}
        self._over = False
        session.presence.count += 1
        self._begin()

    def renew(self, wish: Wish) -> None:
        """What the replica says now."""
        if wish.cut:
            self.session.presence.cut()
        if wish.bye:
            self._close()
            return
        self._until = self._now() + WATCHED_SECONDS
        step = sent_next(wish.place, self._series, self.session.log.start)
        if step == "rewind":
            self._log_reader.position = min(wish.place.at, self._log_reader.position)
        elif step == "begin" and self._since is None and self._now() - self._began > BEGIN_SECONDS:
            self._begin()
        self._log_reader.wake()

    async def settle(self, mark: str) -> None:
        """Answer a mark: what is shown up to now is in the store, or cannot be written there for now."""
        durable = True
        try:
            await self.session.hand_over()
        except RunnerError as error:
            log.debug("what %s has shown is not durable yet: %s", self.session.session_id, error)
            durable = False
        self._marks[mark] = durable
        self._log_reader.wake()

    async def run(self) -> None:
        """Send what comes until nobody there follows any more."""
        try:
            while not self.closed and (left := self._until - self._now()) > 0:
                entry = self._due()
                if entry is None:
                    await self._log_reader.woken(left)
                else:
                    await self._send(encode(entry))
        finally:
            self._close()

    def _begin(self) -> None:
        """A new series, from the oldest chunk within ``REPLAY_BYTES``; the store has the records before it."""
        session = self.session
        position = session.log.recent(REPLAY_BYTES)
        oldest = session.log.chunk(position)
        self._log_reader.position = position
        head = session.head.cursor
        self._new_series((oldest.epoch, oldest.first - 1) if oldest is not None else head)

    def _new_series(self, since: tuple[int, int]) -> None:
        self._series = self._services.ids.mint("series")
        self._began = self._now()
        self._since = since

    def _due(self) -> Entry | None:
        """What goes out now, None when nothing is new."""
        session = self.session
        first, chunks = self._taken()
        over = session.over and not session.taken and self._log_reader.position >= session.log.end
        marks, self._marks = self._marks, {}
        if not chunks and not marks and self._since is None and over == self._over:
            return None
        since, self._since, self._over = self._since, None, over
        head = session.head.cursor
        owner = self._services.replica_id
        return Entry(session.key, owner, self._series, first, head, chunks, since, marks or None, over)

    def _taken(self) -> tuple[int, list[Chunk]]:
        first = self._log_reader.position
        try:
            chunks = self._log_reader.chunks()
        except LogCut:
            self._begin()
            first, chunks = self._log_reader.position, self._log_reader.chunks()
        large = [n for n, chunk in enumerate(chunks) if len(chunk.lines) + len(chunk.whole) > LARGE_BYTES]
        if large:
            behind = large[-1] + 1
            self._new_series((chunks[behind - 1].epoch, chunks[behind - 1].last))
            first, chunks = first + behind, chunks[behind:]
        return first, chunks

    async def _send(self, entry: bytes) -> None:
        """Until it is there, or nobody wants it any more; one that is there twice is noticed by its reader."""
        while not self.closed and self._now() < self._until:
            try:
                await self._bus.publish(self.watcher, [entry])
            except RunnerError as error:
                log.debug("session %s is not shown at %s for now: %s", self.session.session_id, self.watcher, error)
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return

    def _close(self) -> None:
        if not self.closed:
            self.closed = True
            self._log_reader.close()
            self._log_reader.wake()
            self.session.presence.left(self._now())


def note_of(sender: str, wishes: Mapping[Key, Wish]) -> Note:
    """The note that tells an owner of these sessions."""
    listed: list[Any] = [
        [*key, wish.place.series, wish.place.at, wish.place.lost, wish.mark, wish.cut, wish.bye]
        for key, wish in wishes.items()
    ]
    return {"kind": WATCH, "from": sender, "sessions": listed}


def wishes_of(note: Note) -> list[tuple[Key, Wish]]:
    """What ``note_of`` was made of."""
    return [
        (
            (str(project), str(session_id)),
            Wish(Place(str(series), int(at), bool(lost)), str(mark), bool(cut), bool(bye)),
        )
        for project, session_id, series, at, lost, mark, cut, bye in note["sessions"]
    ]
