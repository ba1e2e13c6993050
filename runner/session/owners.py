"""Who owns a session when there are several replicas, and what a dead one left (DESIGN 3.1.7, 3.1.10, 3.9)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Final, TypeVar

from runner.clock import Clock
from runner.errors import RunnerError, owned_elsewhere
from runner.leases.port import BeatAnswer, Heartbeat, LeasePlane, Note, ReplicaInfo
from runner.rules.pool import Key
from runner.session.outage import Outage
from runner.session.reconcile import close_session
from runner.store.port import Store, TurnRow
from runner.terms import Outcome

log = logging.getLogger("runner.session")
WATCH_SECONDS: Final = 1.0
CLOSING: Final = "closing-"
AWAY: Final = frozenset({"plane_unavailable", "store_unavailable"})

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Another replica that serves a session; ``advertise_url`` None: nobody can reach it."""

    replica_id: str
    advertise_url: str | None


class Owners:
    """Looks owners up, proves deaths, and ends the turns of the dead.

    Args:
        me: this replica as the others know it; may be replaced until the first request.
        plane: where leases live; one that is not shared makes every call here a constant.
        store: the store that the replicas share.
        clock: for instants of endings.
        holds: whether this replica holds a session itself, without asking anybody.
        proven_dead: whether a replica is provably gone: same boot of the same machine, and its lock file is free.
        hand_in: gives the store what a dead replica had accepted or shown and not handed in yet; a context inside
            which its turns get their endings.
        lost_after_seconds: how long a turn may be without a holder before the sweep ends it.
        answer_seconds: longest wait for one answer of the plane.
        on_lost: told of each turn that was ended as lost.
    """

    def __init__(
        self,
        me: ReplicaInfo,
        plane: LeasePlane,
        store: Store,
        clock: Clock,
        *,
        holds: Callable[[Key], bool],
        proven_dead: Callable[[ReplicaInfo], bool],
        hand_in: Callable[[ReplicaInfo], AbstractAsyncContextManager[None]],
        lost_after_seconds: float,
        answer_seconds: float,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.me = me
        self._plane = plane
        self._store = store
        self._clock = clock
        self._holds = holds
        self._proven_dead = proven_dead
        self._hand_in = hand_in
        self._lost_after = lost_after_seconds
        self._answer_seconds = answer_seconds
        self._on_lost = on_lost
        self._unheld: dict[tuple[str, str], float] = {}
        self._forgotten: dict[tuple[str, str], tuple[str, float]] = {}
        self._swept = 0.0
        self._tries = count(1)
        self.rivals = False
        """Whether other replicas were there when the plane last told; a single one rides an outage out."""
        self._urls: dict[str, str | None] = {}
        self._burials: dict[str, asyncio.Task[None]] = {}
        self._closings: set[asyncio.Task[bool]] = set()
        self._outage = Outage("asking the plane who has a session")

    @property
    def shared(self) -> bool:
        """Whether there may be other replicas."""
        return self._plane.shared

    async def elsewhere(self, project: str, session_id: str) -> Elsewhere | None:
        """The other replica that holds a session; None when this one does or nobody.

        An owner that is provably gone is nobody. While the plane cannot be asked, the store's open turn tells, and the
        owner is where it was last.
        """
        if not self._plane.shared or self._holds((project, session_id)):
            return None
        try:
            holder = await self._ask(self._plane.look(project, session_id))
        except RunnerError as error:
            self._outage.met(error.message)
            return await self._by_store((project, session_id))
        self._outage.over()
        if holder is None or holder.replica_id == self.me.replica_id:
            return None
        if holder.advertise_url is None and await self.gone(holder.replica_id):
            return None
        return Elsewhere(holder.replica_id, holder.advertise_url)

    async def _by_store(self, key: Key) -> Elsewhere | None:
        try:
            turn = await self.open_elsewhere(key)
        except RunnerError:
            return None
        return Elsewhere(turn.replica_id, self._urls.get(turn.replica_id)) if turn is not None else None

    async def open_elsewhere(self, key: Key) -> TurnRow | None:
        """The newest open turn of a session where another replica runs it: the owner, as far as the store tells.

        Raises:
            RunnerError: ``store_unavailable``.
        """
        turns = await self._store.open_turns(key)
        return turns[-1] if turns and turns[-1].replica_id != self.me.replica_id else None

    async def unsettled(self, project: str, session_id: str) -> bool:
        """Whether another replica's turn of a session has no ending yet: who had it may renew what a plane forgot."""
        try:
            turns = await self._store.open_turns((project, session_id))
        except RunnerError:
            return True
        return any(turn.replica_id != self.me.replica_id for turn in turns)

    async def reachable(self) -> bool:
        """Whether the plane answers now."""
        if not self._plane.shared:
            return True
        try:
            await self._announced()
        except RunnerError:
            return False
        return True

    async def gone(self, replica_id: str) -> bool:
        """Whether a replica is provably gone; then its leases are released and its turns have their ending."""
        if not self._plane.shared or replica_id == self.me.replica_id:
            return False
        try:
            known = {info.replica_id: info for info in await self._announced()}
        except RunnerError:
            return False
        info = known.get(replica_id)
        if info is None or not self._proven_dead(info):
            return False
        await self.bury(info)
        return True

    async def push(self, replica_id: str, note: Note) -> bool:
        """Send a note to another replica; False when nobody listened, or the plane is away."""
        try:
            return await self._plane.push(replica_id, note)
        except RunnerError as error:
            log.warning("a note to %s was not sent: %s", replica_id, error.message)
            return False

    async def others(self) -> list[ReplicaInfo]:
        """Announced replicas but this one, those that are provably gone left out."""
        return [info for info in await self._announced() if not self._proven_dead(info)]

    async def _announced(self) -> list[ReplicaInfo]:
        others = [info for info in await self._ask(self._plane.replicas()) if info.replica_id != self.me.replica_id]
        self.rivals = bool(others)
        self._urls = {info.replica_id: info.advertise_url for info in others}
        return others

    async def watch(self) -> None:
        """Look for replicas that died, for ever; a failing round does not end it."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                await self._watch_forgotten()
                for info in await self._announced():
                    if self._proven_dead(info):
                        await self.bury(info)
            except RunnerError as error:
                log.debug("a watch round failed: %s", error.message)
            except Exception:
                log.exception("a watch round failed")

    async def bury(self, dead: ReplicaInfo) -> None:
        """Take over from a dead replica: its leases are free at once, and each of its turns ends as ``lost``.

        Several callers share one burial; cancelling one of them does not stop it.

        Raises:
            RunnerError: ``plane_unavailable``, ``store_unavailable``: the next watch round tries again.
        """
        burial = self._burials.get(dead.replica_id)
        if burial is None:
            burial = asyncio.create_task(self._bury(dead), name=f"bury {dead.replica_id}")
            self._burials[dead.replica_id] = burial
            burial.add_done_callback(lambda _: self._burials.pop(dead.replica_id, None))
            burial.add_done_callback(_noted)
        await asyncio.shield(burial)

    async def _bury(self, dead: ReplicaInfo) -> None:
        async with self._hand_in(dead):
            turns = [turn for turn in await self._store.open_turns() if turn.replica_id == dead.replica_id]
            held = await self._ask(self._plane.release_replica(dead.replica_id))
            try:
                await self._close_each(turns)
            except RunnerError:
                # Announced again, it is found again.
                await self._ask(self._plane.announce(dead))
                raise
        log.warning("replica %s is gone: %d leases released, %d turns ended", dead.replica_id, held, len(turns))

    async def settle(self, key: Key, turn_id: str | None) -> None:
        """See that a turn which does not run here has its ending, where it can.

        Raises:
            RunnerError: ``owned_elsewhere``: another replica runs it.
        """
        owner = await self.elsewhere(*key)
        turn = await self._store.turn(*key, turn_id) if owner is None and turn_id is not None else None
        if turn is not None and (turn.outcome is not None or await self._closed_behind(turn)):
            return
        text = "Another replica runs this prompt. Try again to attach to it."
        raise owned_elsewhere(text, owner.replica_id if owner else None)

    async def _closed_behind(self, turn: TurnRow) -> bool:
        """``close_lost`` for a request: a client that goes away leaves no lease behind."""
        closing = asyncio.create_task(self.close_lost(turn), name=f"close {turn.turn_id}")
        self._closings.add(closing)
        closing.add_done_callback(self._closings.discard)
        closing.add_done_callback(_noted)
        return await asyncio.shield(closing)

    def forgotten(self, turn: TurnRow) -> bool:
        """Whether the plane forgot the lease of an open turn: its replica may be alive and has not renewed it yet."""
        return (turn.project, turn.turn_id) in self._forgotten

    async def close_lost(self, turn: TurnRow, *, gone: bool = False) -> bool:
        """End a turn whose replica is gone, under a lease of its own: nobody else writes the session meanwhile.

        False when somebody has taken the session: whoever admits a turn there ends what came before. False too when
        the plane forgot the turn's lease (``forgotten``), until nobody renewed it for one lease time; ``gone``: the
        replica is known to be gone, whatever the plane remembers.
        """
        key = (turn.project, turn.session_id)
        if not gone and await self.gone(turn.replica_id):
            # It is buried now: what it had shown came before the ending.
            known = await self._store.turn(*key, turn.turn_id)
            if known is not None and known.outcome is not None:
                return True
        row = await self._store.session(*key)
        if row is None:
            log.error("session %s has no row", turn.session_id)
            return False
        left = None if gone else turn
        async with self.alone(key, max(row.head_epoch, turn.epoch), turn.turn_id, left) as epoch:
            if epoch is not None:
                if await close_session(self._store, self._clock, key, turn, epoch):
                    self._on_lost()
                self._forgotten.pop((turn.project, turn.turn_id), None)
        return epoch is not None

    @asynccontextmanager
    async def alone(self, key: Key, floor: int, what: str, left: TurnRow | None = None) -> AsyncIterator[int | None]:
        """Keep everybody from a session in which no turn runs; the epoch of that, None when somebody has it.

        ``left``: an open turn whose lease must be over; on a plane that forgot it, its silence for one lease time.

        Raises:
            RunnerError: ``plane_unavailable``.
        """
        name = self._closing(what)
        beat = Heartbeat(*key, name, self.me.replica_id, epoch_floor=floor, left=left.turn_id if left else None)
        answer = await self._ask(self._plane.beat(beat))
        if left is not None and self._waited(left, answer):
            beat = replace(beat, turn_id=self._closing(what), left=None)
            answer = await self._ask(self._plane.beat(beat))
        if not answer.admitted:
            yield None
            return
        try:
            yield answer.epoch
        finally:
            await asyncio.shield(self._ask(self._plane.beat(replace(beat, phase="ended"))))

    async def let_go(self, turn: TurnRow) -> None:
        """Release what the plane keeps for a turn that has its ending, while it still names that turn.

        Raises:
            RunnerError: ``plane_unavailable``.
        """
        if not self._plane.shared or turn.outcome in (None, Outcome.PAUSED):
            return
        holder = await self._ask(self._plane.look(turn.project, turn.session_id))
        if holder is not None and holder.alive == turn.turn_id:
            over = Heartbeat(turn.project, turn.session_id, turn.turn_id, holder.replica_id, phase="ended")
            await self._ask(self._plane.beat(over))

    def _closing(self, what: str) -> str:
        """A name of its own for each try: one that failed is a tombstone, and would be refused for good."""
        return f"{CLOSING}{next(self._tries)}-{self.me.replica_id}-{what}"[:128]

    def _waited(self, left: TurnRow, answer: BeatAnswer) -> bool:
        """Whether a plane that forgot the lease of ``left`` has heard nothing of it for one lease time."""
        turn = (left.project, left.turn_id)
        if answer.admitted or answer.owner is not None:
            self._forgotten.pop(turn, None)
            return False
        now = self._clock.monotonic()
        _, since = self._forgotten.setdefault(turn, (left.session_id, now))
        return now - since > answer.lease_seconds

    async def _watch_forgotten(self) -> None:
        """Drop what was renewed or has its ending; all of it when nobody could have renewed anything."""
        try:
            for (project, turn_id), (session_id, _) in list(self._forgotten.items()):
                held = await self._ask(self._plane.look(project, session_id)) is not None
                turn = None if held else await self._store.turn(project, session_id, turn_id)
                if turn is None or turn.outcome is not None:
                    self._forgotten.pop((project, turn_id), None)
        except RunnerError:
            self._forgotten.clear()
            raise

    async def _close_each(self, turns: Iterable[TurnRow]) -> None:
        """End these turns; one that cannot be ended keeps none of the others from its ending, and is raised last."""
        failed: RunnerError | None = None
        for turn in turns:
            try:
                await self.close_lost(turn, gone=True)
            except RunnerError as error:
                if error.code in AWAY:
                    raise
                log.warning("turn %s of a replica that is gone has no ending: %s", turn.turn_id, error.message)
                failed = error
        if failed is not None:
            raise failed

    async def sweep_lost(self) -> None:
        """End turns that nobody has held for ``lost_after_seconds`` although their replica is not proven dead."""
        now = self._clock.monotonic()
        if now - self._swept > self._lost_after / 2:
            # What was seen before a pause says nothing about the time in between.
            self._unheld.clear()
        due = []
        turns = {(turn.project, turn.turn_id): turn for turn in await self._store.open_turns()}
        self._unheld = {key: since for key, since in self._unheld.items() if key in turns}
        for key, turn in turns.items():
            holder = await self._ask(self._plane.look(turn.project, turn.session_id))
            if holder is not None and holder.alive == turn.turn_id:
                self._unheld.pop(key, None)
            elif now - self._unheld.setdefault(key, now) >= self._lost_after:
                due.append(turn)
        self._swept = now
        await self._close_each(due)

    async def _ask(self, call: Awaitable[Answer]) -> Answer:
        try:
            async with asyncio.timeout(self._answer_seconds):
                return await call
        except TimeoutError:
            raise RunnerError("plane_unavailable", "The lease plane gives no answer.") from None


def _noted(task: asyncio.Task[Answer]) -> None:
    """Whoever asked for it may have gone away."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.debug("%s failed: %s", task.get_name(), error)
