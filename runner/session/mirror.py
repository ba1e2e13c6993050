"""The followers' side of the live bus: one copy of a session's log for all that follow it at this replica."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from runner.clock import Clock
from runner.errors import RunnerError
from runner.ids import Cursor, Ids
from runner.leases.live import OLDEST, LiveBus
from runner.rules.following import Place, known_of
from runner.rules.pool import Key
from runner.session.history import HistoryReader, cursor_of
from runner.session.live_entry import Entry, decode
from runner.session.outlets import Wish, note_of
from runner.session.owners import Owners
from runner.session.port import Reader, ReaderCut
from runner.session.prompts import Presence
from runner.store.port import Store
from runner.tasks import Tasks
from runner.turn.journal import Head
from runner.turn.log import SessionLog

log = logging.getLogger("runner.session")
RENEW_SECONDS: Final = 2.5
READ_SECONDS: Final = 1.0
RETRY_SECONDS: Final = 0.5
ATTACH_SECONDS: Final = 2.0
SETTLE_SECONDS: Final = 3.0
DEAF_SECONDS: Final = (10.0, 600.0)

Tell = Callable[["Mirror", Wish], None]


class Followers(Presence):
    """Who follows here; the owner counts them as one reader."""

    def __init__(self, on_left: Callable[[], None], on_cut: Callable[[], None]) -> None:
        super().__init__()
        self._on_left = on_left
        self._on_cut = on_cut

    def left(self, now: float) -> None:
        """One reader detached."""
        super().left(now)
        self._on_left()

    def cut(self) -> None:
        """One reader was given up."""
        super().cut()
        self._on_cut()


class Mirror:
    """A copy of one session's log at its owner; what ``HistoryReader`` reads. Fed by ``Mirrors`` alone.

    Args:
        key: the session.
        owner: the replica whose log it is.
        sessions_log: empty.
        clock: of readers.
        ids: for marks.
        tell: sends the owner a wish, at once.
    """

    taken = False

    def __init__(self, key: Key, owner: str, sessions_log: SessionLog, clock: Clock, ids: Ids, tell: Tell) -> None:
        self.key = key
        self.owner = owner
        self.log = sessions_log
        self.log_since: Cursor = (0, 0)
        self.head = Head()
        self.clock = clock
        self.over = False
        self.closed = False
        self.presence = Followers(self._left, lambda: self._tell_if_open(Wish(self.place, cut=True)))
        self._ids = ids
        self._tell = tell
        self._series = ""
        self._needed = 0
        self._lost = False
        self._began = asyncio.Event()
        self._marks: dict[str, asyncio.Future[bool]] = {}
        self._next_mark: asyncio.Future[bool] | None = None

    @property
    def place(self) -> Place:
        """What it needs next."""
        return Place(self._series, self._needed, self._lost)

    async def begun(self, seconds: float) -> bool:
        """Whether the owner shows the session, asked again and again for ``seconds``."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not self._began.is_set() and not self.closed and loop.time() < deadline:
            self._tell_if_open(Wish(self.place))
            try:
                async with asyncio.timeout_at(min(deadline, loop.time() + RETRY_SECONDS)):
                    await self._began.wait()
            except TimeoutError:
                continue
        return self._began.is_set() and not self.closed

    async def settle(self) -> None:
        """See that the store has every record that was shown before this call; those who wait share one question.

        Raises:
            ReaderCut: the owner does not say so in time.
        """
        waiting = self._next_mark
        if waiting is None:
            waiting = self._next_mark = asyncio.get_running_loop().create_future()
            if not self._marks:
                self._set_mark()
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                durable = await asyncio.shield(waiting)
        except TimeoutError:
            durable = False
            self._unanswered(waiting)
        if not durable or self.closed:
            raise ReaderCut("The replica that holds this session does not say what it has stored.")

    def _unanswered(self, waiting: asyncio.Future[bool]) -> None:
        self._marks = {mark: other for mark, other in self._marks.items() if other is not waiting}
        if not self._marks:
            self._set_mark()

    def _set_mark(self) -> None:
        waiting, self._next_mark = self._next_mark, None
        if waiting is not None:
            mark = self._ids.mint("mark")
            self._marks[mark] = waiting
            self._tell_if_open(Wish(self.place, mark=mark))

    def take(self, entry: Entry) -> None:
        """What the owner tells."""
        self.head.epoch, self.head.n = entry.head
        if entry.since is not None:
            self._begin(entry, entry.since)
        if entry.series == self._series:
            self._append(entry)
        for mark, durable in (entry.marks or {}).items():
            waiting = self._marks.pop(mark, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(durable)
        if entry.marks and not self._marks:
            self._set_mark()

    def _begin(self, entry: Entry, since: Cursor) -> None:
        self._series, self._needed, self._lost = entry.series, entry.first, False
        self.log.restart()
        self.log_since = since
        self._began.set()

    def _append(self, entry: Entry) -> None:
        known = known_of(self._needed, entry.first, len(entry.chunks))
        if known is None:
            if not self._lost:
                self._lost = True
                self._tell_if_open(Wish(self.place))
            return
        self._lost = False
        for chunk in entry.chunks[known:]:
            self.log.append(chunk)
        self._needed += len(entry.chunks) - known
        if entry.over != self.over:
            self.over = entry.over
            self.log.wake()

    def _left(self) -> None:
        if self.presence.count == 0:
            self._tell_if_open(Wish(self.place, bye=True))
            self.close()

    def _tell_if_open(self, wish: Wish) -> None:
        if not self.closed:
            self._tell(self, wish)

    def close(self) -> None:
        """Cut whoever still reads it; they go on by their cursors, somewhere else."""
        if self.closed:
            return
        self.closed = True
        self.log.restart()
        for waiting in [*self._marks.values(), *([self._next_mark] if self._next_mark else [])]:
            if not waiting.done():
                waiting.set_result(False)


class Mirrors:
    """Opens followers over the live bus.

    Args:
        replica_id: this replica.
        bus: what its entries come by.
        owners: passes its wishes on.
        store: where the past is.
        clock: of readers.
        ids: for marks.
        ring_bytes, buffer_bytes: of ``SessionLog``, for each mirror.
    """

    def __init__(
        self,
        replica_id: str,
        bus: LiveBus,
        owners: Owners,
        store: Store,
        clock: Clock,
        ids: Ids,
        *,
        ring_bytes: int,
        buffer_bytes: int,
    ) -> None:
        self._me = replica_id
        self._bus = bus
        self._owners = owners
        self._store = store
        self._clock = clock
        self._ids = ids
        self._bounds = (ring_bytes, buffer_bytes)
        self._tasks = Tasks("mirrors")
        self._mirrors: dict[tuple[Key, str], Mirror] = {}
        self._deaf: dict[str, tuple[float, float]] = {}
        self._wanted = asyncio.Event()
        self._told: asyncio.Queue[tuple[str, Mapping[Key, Wish]]] = asyncio.Queue()
        self._up = True

    def start(self) -> None:
        """Read the bus, and renew what is watched."""
        self._tasks.spawn("read", self._read())
        self._tasks.spawn("tell", self._push())
        self._tasks.spawn("renew", self._renew())

    async def close(self) -> None:
        """Stop; followers are cut."""
        self._drop_all()
        await self._tasks.close()

    def serves(self, owner: str) -> bool:
        """Whether ``follow`` is better than another way: the bus is there, and the owner answered lately."""
        deaf_until, _ = self._deaf.get(owner, (0.0, 0.0))
        return self._up and self._clock.monotonic() >= deaf_until

    async def follow(self, key: Key, owner: str, after: str | None) -> Reader | None:
        """A reader of history behind ``after`` and of what ``owner`` shows live; None: not over the bus.

        Raises:
            RunnerError: ``invalid_request``: ``after`` is no cursor.
        """
        cursor = cursor_of(after)
        if not self._up:
            return None
        mirror = self._mirror(key, owner)
        mirror.presence.count += 1
        try:
            if not await mirror.begun(ATTACH_SECONDS):
                self._is_deaf(owner)
                return None
            self._deaf.pop(owner, None)
            if cursor is not None and cursor > mirror.head.cursor:
                await mirror.settle()
            return None if mirror.closed else HistoryReader(self._store, mirror, cursor, True)
        except ReaderCut:
            return None
        finally:
            mirror.presence.left(self._clock.monotonic())

    def _mirror(self, key: Key, owner: str) -> Mirror:
        mirror = self._mirrors.get((key, owner))
        if mirror is None or mirror.closed:
            fresh = SessionLog(*self._bounds)
            mirror = self._mirrors[key, owner] = Mirror(key, owner, fresh, self._clock, self._ids, self._tell)
            self._wanted.set()
        return mirror

    def _is_deaf(self, owner: str) -> None:
        """It is not asked again for a while, each time for longer: it may be one that knows no live bus."""
        now = self._clock.monotonic()
        _, seconds = self._deaf.get(owner, (0.0, 0.0))
        seconds = min(max(DEAF_SECONDS[0], 2 * seconds), DEAF_SECONDS[1])
        self._deaf = {name: last for name, last in self._deaf.items() if last[0] + DEAF_SECONDS[1] > now}
        self._deaf[owner] = (now + seconds, seconds)

    def _tell(self, mirror: Mirror, wish: Wish) -> None:
        if wish.bye and self._mirrors.get((mirror.key, mirror.owner)) is mirror:
            del self._mirrors[mirror.key, mirror.owner]
        self._told.put_nowait((mirror.owner, {mirror.key: wish}))

    async def _push(self) -> None:
        """One after the other: a goodbye never overtakes a welcome."""
        while True:
            owner, wishes = await self._told.get()
            try:
                await self._owners.push(owner, note_of(self._me, wishes))
            except Exception:
                log.exception("what is followed of %s was not told to it", owner)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            by_owner: dict[str, dict[Key, Wish]] = {}
            for mirror in self._mirrors.values():
                by_owner.setdefault(mirror.owner, {})[mirror.key] = Wish(mirror.place)
            for owner, wishes in by_owner.items():
                self._told.put_nowait((owner, wishes))

    async def _read(self) -> None:
        place = OLDEST
        while True:
            if self._up and not self._mirrors:
                self._wanted.clear()
                await self._wanted.wait()
            try:
                arrived = await self._bus.read(self._me, place, READ_SECONDS)
            except RunnerError as error:
                if self._up:
                    log.warning("followers of other replicas do without the live bus for now: %s", error.message)
                place, self._up = OLDEST, False
                self._drop_all()
                await asyncio.sleep(RETRY_SECONDS)
                continue
            place, self._up = arrived.place, True
            for data in arrived.entries:
                self._take(data)

    def _take(self, data: bytes) -> None:
        try:
            entry = decode(data)
        except ValueError:
            log.exception("an entry of the live bus cannot be read")
            return
        mirror = self._mirrors.get((entry.key, entry.owner))
        if mirror is not None:
            mirror.take(entry)

    def _drop_all(self) -> None:
        mirrors, self._mirrors = list(self._mirrors.values()), {}
        for mirror in mirrors:
            mirror.close()
        while not self._told.empty():
            self._told.get_nowait()
