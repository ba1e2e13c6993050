"""The spool at work: what may not wait for an unreachable store waits here, and is replayed in order (DESIGN 3.9)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from runner.clock import Clock
from runner.errors import RunnerError
from runner.ids import Key
from runner.store.codec import decode_parameters, encode
from runner.store.lanes import Lane, Lanes
from runner.store.port import Appended, Store
from runner.store.replay import Granted, Replay, Replayed, Waits
from runner.store.spool_file import Entry, SpoolFile
from runner.tasks import Tasks

log = logging.getLogger("runner.store")

DOWN_SECONDS: Final = 1.0
FIRST_RETRY_SECONDS: Final = 0.2
LAST_RETRY_SECONDS: Final = 5.0
LAST_REPLAY_SECONDS: Final = 2.0
PAGE: Final = 50

T = TypeVar("T")
MaySpool = Callable[[str, str, str], bool]
OnRejected = Callable[[str, str, str], None]


async def hand_in(path: Path, store: Store, clock: Clock) -> int:
    """Write what waits in the spool of a dead process to the store, in its place; how many writes that were.

    Nothing is done where there is no such file, where it cannot be read, or where its process lives again: then it
    replays by itself.

    Raises:
        RunnerError: ``store_unavailable``: some of it waits on.
    """
    try:
        file = await SpoolFile.open_if_free(path)
    except RunnerError as error:
        log.error("what a dead runner left cannot be handed in: %s", error.message)
        return 0
    if file is None:
        return 0
    try:
        if await file.store_id() != store.store_id:
            return 0
        return await _hand_in(file, Replay(store, clock, lambda project, session_id, turn_id: True))
    finally:
        await file.close()


async def _hand_in(file: SpoolFile, replay: Replay) -> int:
    count = 0
    while page := await file.after(0, 1):
        done = await replay.write(page[0])
        if done is not Replayed.WRITTEN:
            log.error("a spooled %s of turn %s does not count: %s", page[0].call, page[0].turn_id, done.value)
        await settle(file, page[0], done)
        count += 1
    return count


async def settle(file: SpoolFile, entry: Entry, done: Replayed) -> None:
    """Take an entry out of the line, as it ended."""
    if done is Replayed.IMPOSSIBLE:
        await file.refuse(entry)
    else:
        await file.drop(entry, reject_turn=done is Replayed.REJECTED and entry.call == "admit")


class Spool:
    """One ordered way to a store for each session, through a file while the store gives no answer.

    Attributes:
        may_spool, granted, on_rejected: see ``SpooledStore``.
    """

    def __init__(self, remote: Store, file: SpoolFile, clock: Clock, max_bytes: int) -> None:
        self.may_spool: MaySpool = lambda project, session_id, turn_id: False
        self.granted: Granted = lambda project, session_id, turn_id: True
        self.on_rejected: OnRejected = lambda project, session_id, turn_id: None
        self.lanes = Lanes()
        self._file = file
        self._clock = clock
        self._max_bytes = max_bytes
        self._replay = Replay(remote, clock, self._grant)
        self._tasks = Tasks("spool")
        self._down_until = 0.0
        self._probes = 0
        self._why = ""
        self._wake = asyncio.Event()
        self._back = asyncio.Event()

    def _grant(self, project: str, session_id: str, turn_id: str) -> bool | None:
        return self.granted(project, session_id, turn_id)

    @property
    def waiting(self) -> int:
        """How many writes wait."""
        return sum(lane.waiting for _, lane in self.lanes.all_waiting())

    @property
    def bytes(self) -> int:
        """What they take on disk."""
        return self._file.bytes

    async def start(self, path: Path, store_id: str) -> None:
        """Take up what an earlier process left, and begin to replay it.

        Raises:
            RunnerError: ``store_unavailable``: the file cannot be used, or holds writes for another store.
        """
        known = await self._file.store_id()
        seq = 0
        while page := await self._file.after(seq, PAGE):
            for entry in page:
                self._lane_of(entry).waiting += 1
            seq = page[-1].seq
        if known is not None and known != store_id and self.waiting:
            raise RunnerError("store_unavailable", f"{path} holds {self.waiting} writes for store {known}.")
        _ = await self._file.store_id(store_id)
        if self.waiting:
            log.warning("%d writes of an earlier runner wait for the store", self.waiting)
            self._wake.set()
        _ = self._tasks.spawn("replay", self._replay_for_ever())

    async def close(self) -> None:
        """Replay once more, bounded, where something waits; the rest stays in the file."""
        if self.waiting and not self._is_down():
            try:
                async with asyncio.timeout(LAST_REPLAY_SECONDS):
                    _ = await self._replay_round()
            except TimeoutError:
                log.warning("%d writes wait for the next start", self.waiting)
        await self._tasks.close()
        await self._file.close()

    def _lane_of(self, entry: Entry) -> Lane:
        lane = self.lanes.of(entry.key)
        if not entry.rejected:
            try:
                lane.note(entry.turn_id, decode_parameters(entry.call, entry.payload))
            except (RunnerError, AttributeError):
                log.error("an entry of session %s in the spool cannot be read", entry.session_id)
        return lane

    async def write(
        self,
        key: Key,
        turn_id: str | None,
        call: str,
        parameters: dict[str, Any],
        work: Callable[[], Awaitable[T]],
        spooled: T,
        *,
        always: bool = False,
    ) -> T:
        """Write to the store; while it is unreachable, to the spool, where that is allowed.

        Args:
            key: the session.
            turn_id: whose write it is; None: of the turn whose writes wait already, if any.
            call: of the port, with its ``parameters``: what is replayed.
            parameters: see ``call``.
            work: the call itself.
            spooled: the answer for a write that waits.
            always: spool it whatever ``may_spool`` says.

        Raises:
            RunnerError: what the store raised; ``store_unavailable`` also for a full spool.
        """
        async with self.lanes.enter(key) as lane:
            turn = turn_id or (lane.last_turn if lane.waiting else None)

            def allowed() -> bool:
                return always or (turn is not None and self.may_spool(*key, turn))

            if not (self._is_down() and allowed()):
                try:
                    await self._catch_up(lane, key)
                    return await self._reached(work())
                except RunnerError as error:
                    if error.code != "store_unavailable" or not allowed():
                        raise
            await self._put(lane, key, turn, call, parameters)
            return spooled

    async def _put(self, lane: Lane, key: Key, turn_id: str | None, call: str, parameters: dict[str, Any]) -> None:
        payload = encode(parameters)
        if self._file.bytes + len(payload) > self._max_bytes:
            raise RunnerError(
                "store_unavailable", f"The store is unreachable and the spool is full ({self._max_bytes} bytes)."
            )
        # Counted before it is written: a cancelled call is carried out, and nothing may overtake it.
        lane.waiting += 1
        self._wake.set()
        try:
            await self._file.put(key, turn_id, call, payload)
        except RunnerError:
            lane.waiting -= 1
            raise
        lane.note(turn_id, parameters)

    # -- reads -------------------------------------------------------------------------------------------------------

    async def read(self, key: Key, work: Callable[[], Awaitable[T]], here: Callable[[Lane], T | None]) -> T:
        """Read of a session: from the store once it has all that waited, else what ``here`` finds in the lane.

        Raises:
            RunnerError: what the store raised, where ``here`` finds nothing.
        """
        if self.lanes.waiting(key) is not None:
            try:
                if self._is_down():
                    raise RunnerError("store_unavailable", self._why)
                await self.caught_up(key)
            except RunnerError as error:
                waiting = self.lanes.waiting(key)
                found = here(waiting) if waiting is not None else None
                if error.code != "store_unavailable" or found is None:
                    raise
                return found
        return await work()

    async def caught_up(self, key: Key) -> None:
        """Have the store know all that waited of a session.

        Raises:
            RunnerError: ``store_unavailable``: some of it still waits.
        """
        if self.lanes.waiting(key) is not None:
            async with self.lanes.enter(key) as lane:
                await self._catch_up(lane, key)

    async def settled(self) -> None:
        """Replay what waits, as far as that is possible now: before a read across sessions."""
        if self.waiting and not self._is_down():
            _ = await self._replay_round()

    # -- replay ------------------------------------------------------------------------------------------------------

    def _is_down(self) -> bool:
        """Whether the store failed a moment ago, or somebody is finding out: one caller waits for that, not all."""
        return self._down_until > 0 and (self._probes > 0 or self._clock.monotonic() < self._down_until)

    async def _reached(self, work: Awaitable[T]) -> T:
        """The answer of the store; notes whether it gave one."""
        probing = self._down_until > 0
        self._probes += probing
        try:
            answer = await work
        except RunnerError as error:
            if error.code == "store_unavailable":
                self._down_until = self._clock.monotonic() + DOWN_SECONDS
                self._why = error.message
            raise
        finally:
            self._probes -= probing
        if self._down_until and not (isinstance(answer, Appended) and answer.on_the_way):
            self._down_until = 0.0
            self._back.set()
        return answer

    async def _catch_up(self, lane: Lane, key: Key) -> None:
        """Replay what waits of a session; the caller is alone in its lane.

        Raises:
            RunnerError: ``store_unavailable``: some of it still waits.
        """
        while lane.waiting:
            entry = await self._file.first(key)
            if entry is None:
                lane.forget()
                return
            try:
                done = await self._reached(self._replay.write(entry))
            except Waits:
                message = f"The admission of turn {entry.turn_id} waits for the lease plane."
                raise RunnerError("store_unavailable", message) from None
            await self._settle(entry, done)
            lane.waiting = max(1, lane.waiting - 1)

    async def _settle(self, entry: Entry, done: Replayed) -> None:
        await settle(self._file, entry, done)
        if done is Replayed.WRITTEN or entry.turn_id is None:
            return
        log.error("a spooled %s of turn %s does not count: %s", entry.call, entry.turn_id, done.value)
        try:
            self.on_rejected(*entry.key, entry.turn_id)
        except Exception:
            log.exception("telling about the rejected turn %s failed", entry.turn_id)

    async def _replay_for_ever(self) -> None:
        pause = FIRST_RETRY_SECONDS
        while True:
            await self._wake.wait()
            self._back.clear()
            if await self._replay_round():
                self._wake.clear()
                pause = FIRST_RETRY_SECONDS
                if not self.waiting:
                    continue
                self._wake.set()
            await self._pause(pause)
            pause = min(pause * 2, LAST_RETRY_SECONDS)

    async def _pause(self, seconds: float) -> None:
        """Wait, but no longer than until the store answers somebody."""
        try:
            async with asyncio.timeout(seconds):
                await self._back.wait()
        except TimeoutError:
            return

    async def _replay_round(self) -> bool:
        """Try every lane once; False when the store gave no answer."""
        for key, _ in self.lanes.all_waiting():
            try:
                async with self.lanes.enter(key) as lane:
                    await self._catch_up(lane, key)
            except RunnerError as error:
                if self._is_down():
                    log.debug("the spool waits: %s", error.message)
                    return False
                if error.code != "store_unavailable":
                    log.error("session %s holds up its spool: %s", key[1], error)
            except Exception:
                log.exception("replaying session %s failed", key[1])
        return True
