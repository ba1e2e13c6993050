"""The beat shell: sends first beats, renews what this replica holds, and notices by itself what it lost."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from typing import Final

from runner.clock import Clock
from runner.errors import RunnerError
from runner.ids import Key
from runner.leases.held import REFUSED_KEPT, Held, ended
from runner.leases.line import Announcer, OnCommands, PlaneLine
from runner.leases.port import BeatAnswer, Heartbeat, Holder, LeasePlane, ReplicaInfo
from runner.metrics import Metrics
from runner.rules.story import Tell, untold
from runner.tasks import Tasks

log = logging.getLogger("runner.leases")

END_TRIES: Final = 5
GIVEN_UP_KEPT: Final = 8
LAPSED: Final = BeatAnswer(admitted=False, is_current_turn=False, owner=None, epoch=0, lease_seconds=0.0)


class Heartbeats:
    """All beats of one replica: one timer for every renewal, one entry per session.

    Args:
        plane: where leases live.
        clock: its monotonic reading must be the running loop's.
        beat_seconds: time between renewals of one session.
        beat_timeout_seconds: longest wait for one answer.
        on_lost: called once when a held session is lost: with the plane's answer, or with ``LAPSED`` when the lease
            ran out unanswered and ``rivals()`` says that another owner has become possible. For a running turn that
            is a cancel; for a parked seat its end. Its exceptions are logged.
        rivals: whether another replica could take a lapsed lease; a single replica rides an outage out (DESIGN 3.1.7).
        on_commands: called with project, session and the pending commands of every answer that carries some.
        tell, metrics: hears of every beat but renewals that changed nothing; counts questions without an answer.
    """

    def __init__(
        self,
        plane: LeasePlane,
        clock: Clock,
        *,
        beat_seconds: float,
        beat_timeout_seconds: float,
        on_lost: Callable[[str, BeatAnswer], None],
        rivals: Callable[[], bool] = lambda: False,
        on_commands: OnCommands = lambda project, session_id, commands: None,
        tell: Tell = untold,
        metrics: Metrics | None = None,
    ) -> None:
        self._line = PlaneLine(plane, clock, beat_timeout_seconds, on_commands, metrics or Metrics())
        self._announcer = Announcer(self._line, beat_seconds)
        self._clock = clock
        self._beat_seconds = beat_seconds
        self._retry_seconds = beat_seconds / 5
        self._timeout = beat_timeout_seconds
        self._on_lost = on_lost
        self._rivals = rivals
        self._tell = tell
        self._held: dict[Key, Held] = {}
        self._firsts: Counter[Key] = Counter()
        self._orphans: dict[str, Held] = {}
        self._refused: deque[str] = deque(maxlen=REFUSED_KEPT)
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = Tasks("heartbeats")
        self._closed = False

    def __len__(self) -> int:
        return len(self._held)

    def holds(self, project: str, session_id: str, turn_id: str) -> bool:
        """Whether the last grant of this turn is still valid: asked before something is spooled (DESIGN 3.9)."""
        held = self._held.get((project, session_id))
        if held is None or held.beat.turn_id != turn_id:
            return False
        return self._clock.monotonic() < held.granted_at + held.lease_seconds

    def fenced(self, project: str, session_id: str, turn_id: str) -> bool | None:
        """May a turn count (DESIGN 3.1.7)? None while an ``unfenced`` one waits for the plane, False if refused."""
        held = self._held.get((project, session_id))
        waits = held is not None and held.beat.turn_id == turn_id and held.lease_seconds == inf
        return None if waits else turn_id not in self._refused

    def granted(self, project: str, session_id: str) -> BeatAnswer | None:
        """The last grant of what this replica holds of a session, with its epoch and start; None when it holds none."""
        held = self._held.get((project, session_id))
        return held.granted if held is not None else None

    def plane_now(self) -> float:
        """The plane's clock now, seconds; see ``PlaneClock``."""
        return self._line.now()

    async def first(self, beat: Heartbeat) -> BeatAnswer:
        """Send a turn's first beat; when it is admitted, renew it from now on in place of the session's former entry.

        A session in which another turn of this replica runs is refused without asking. Renewals of the former entry
        stand still meanwhile, so that a take-over is no loss.

        Raises:
            RunnerError: ``plane_unavailable`` when no answer came in time. What the plane may have granted all the
                same is given back behind, also when the call is cancelled.
        """
        key = (beat.project, beat.session_id)
        held = self._held.get(key)
        if (
            held is not None
            and held.beat.phase == "running"
            and held.beat.turn_id not in (beat.turn_id, beat.predecessor)
        ):
            answer = BeatAnswer(False, False, beat.replica_id, 0, held.lease_seconds, now=self.plane_now())
            self._told(beat.phase, beat, answer)
            return answer
        sent = self._clock.monotonic()
        try:
            with self._asking(key):
                answer = await self._line.beat(beat)
        except BaseException:
            self._doubt(key, beat)
            raise
        self._told(beat.phase, beat, answer)
        if answer.admitted:
            self._enter(key, beat, answer, sent, sent + self._beat_seconds, answer.lease_seconds)
        return answer

    def unfenced(self, beat: Heartbeat) -> BeatAnswer:
        """Admit a turn without the plane, right after its first beat had no answer (DESIGN 3.1.7).

        It has the epoch that comes next as far as this replica knows. The plane grants exactly that one as soon as it
        answers, or the turn is lost; until then ``holds`` is true of it.
        """
        key, now = (beat.project, beat.session_id), self._clock.monotonic()
        held = self._held.get(key)
        known = held.granted.epoch if held is not None else 0
        epoch, at = max(known, beat.epoch_floor) + 1, self.plane_now()
        answer = BeatAnswer(True, True, beat.replica_id, epoch, self._timeout, started_at=at, now=at)
        if held is not None and beat.turn_id in held.given_up:
            held.given_up.remove(beat.turn_id)
        self._told("unfenced", beat, answer)
        entry = self._enter(key, beat, answer, now, now + self._retry_seconds, inf)
        entry.beat = replace(beat, epoch=epoch, started_at=at)
        return answer

    async def give_back(self, beat: Heartbeat) -> None:
        """Undo an admission that did not become durable: the session is again what it was before ``first``.

        The chain or seat that the turn took over is restored in one beat, or told as lost if its lease is gone; without
        one the turn is ended. One try, at most the beat time-out, retried behind.
        """
        key = (beat.project, beat.session_id)
        held = self._held.get(key)
        former = held.former if held is not None and held.beat.turn_id == beat.turn_id else None
        if held is None or former is None:
            orphan = self._orphans.pop(beat.turn_id, None)
            await self.end(ended(beat))
            if orphan is not None:
                self._tell_lost(orphan, LAPSED)
            return
        if held.lease_seconds != inf:
            former.granted_at, former.lease_seconds = held.granted_at, held.lease_seconds
        former.given_up.append(beat.turn_id)
        former.due, former.in_flight = self._clock.monotonic(), True
        self._held[key] = former
        await self._beat(key, former)

    async def end(self, beat: Heartbeat) -> BeatAnswer | None:
        """Send a ``paused``, ``parked`` or ``ended`` beat: one try, at most the beat time-out, retried behind.

        ``paused`` and ``parked`` are renewed from now on if the turn was held, ``ended`` stops the renewal. Call it
        once per change.

        Returns:
            The plane's answer; None when it did not come in time.
        """
        key = (beat.project, beat.session_id)
        sent = self._clock.monotonic()
        held, entry = self._held.get(key), None
        _ = self._orphans.pop(beat.turn_id, None)
        if held is not None and held.beat.turn_id == beat.turn_id:
            del self._held[key]
            beat = replace(beat, predecessor=None, epoch=held.granted.epoch, started_at=held.granted.started_at)
            if beat.phase == "ended":
                self._end_given_up(held)
            else:
                entry = self._enter(
                    key, beat, held.granted, held.granted_at, sent + self._retry_seconds, held.lease_seconds
                )
                entry.given_up = held.given_up
        elif held is not None and held.former is not None and held.former.beat.turn_id == beat.turn_id:
            held.former = None
        try:
            answer = await self._line.beat(beat)
        except (RunnerError, asyncio.CancelledError) as error:
            if beat.phase == "ended":
                self._end_behind(beat)
            if isinstance(error, RunnerError):
                self._told("unanswered", beat, None)
                return None
            raise
        self._told(beat.phase, beat, answer)
        if entry is not None:
            self._settle(key, entry, beat, sent, answer)
        return answer

    async def look(self, project: str, session_id: str) -> Holder | None:
        """``LeasePlane.look`` within the beat time-out; what it tells of the plane's clock is kept.

        Raises:
            RunnerError: ``plane_unavailable``.
        """
        return await self._line.look(project, session_id)

    def announce(self, replica: ReplicaInfo) -> None:
        """Make this replica known to the others, now and with the beats until ``close``, whatever happens to the plane.

        Another call replaces what is told. A plane that is not shared has nobody to tell.
        """
        if self._line.shared and not self._closed and self._announcer.tell(replica):
            _ = self._tasks.spawn("announce", self._announcer.run())

    async def close(self) -> None:
        """Stop renewing; nothing is released here (``LeasePlane.release_replica`` does)."""
        self._closed = True
        self._held.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._tasks.close(self._timeout)

    def _doubt(self, key: Key, beat: Heartbeat) -> None:
        """A first beat had no answer: what it may have taken goes back to the chain or seat that stood, or is ended."""
        held = self._held.get(key)
        if held is None or held.beat.phase == "running":
            self._end_behind(ended(beat))
            return
        held.given_up = [*held.given_up, beat.turn_id][-GIVEN_UP_KEPT:]
        held.due = self._clock.monotonic()
        self._arm(held.due)

    def _end_given_up(self, held: Held) -> None:
        for turn_id in held.given_up:
            self._end_behind(ended(replace(held.beat, turn_id=turn_id, epoch=0)))

    def _end_behind(self, beat: Heartbeat) -> None:
        if not self._closed:
            _ = self._tasks.spawn(f"end:{beat.turn_id}", self._retry_end(beat))

    async def _retry_end(self, beat: Heartbeat) -> None:
        """An end beat is scoped by its turn, so a late one can harm nobody; it gives way to a new first beat."""
        for _ in range(END_TRIES):
            held = self._held.get((beat.project, beat.session_id))
            if held is not None and held.beat.turn_id == beat.turn_id:
                return
            try:
                await self._line.beat(beat)
                return
            except RunnerError:
                await asyncio.sleep(self._beat_seconds)
        log.warning("the end beat of turn %s was given up; its lease runs out by itself", beat.turn_id)

    def _enter(
        self, key: Key, beat: Heartbeat, granted: BeatAnswer, granted_at: float, due: float, lease_seconds: float
    ) -> Held:
        renewal = replace(
            beat,
            predecessor=None,
            epoch_floor=granted.epoch,
            epoch=granted.epoch,
            started_at=granted.started_at,
        )
        former = self._held.get(key)
        if former is not None and (former.beat.phase == "running" or former.beat.turn_id == beat.turn_id):
            former = None
        held = Held(renewal, granted, granted_at, lease_seconds, due, former)
        if not self._closed:
            self._held[key] = held
            self._arm(due)
        return held

    @contextmanager
    def _asking(self, key: Key) -> Iterator[None]:
        """While a first beat is out, renewals of the session stand still and a refusal of one says nothing."""
        self._firsts[key] += 1
        try:
            yield
        finally:
            self._firsts[key] -= 1
            if not self._firsts[key]:
                del self._firsts[key]
            held = self._held.get(key)
            if held is not None:
                self._arm(held.due)

    def _arm(self, due: float) -> None:
        """Make sure that the timer rings at ``due`` at the latest."""
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        delay = max(0.0, due - self._clock.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        try:
            self._check()
            soonest = self._next()
        except Exception:
            log.exception("a round of renewals failed")
            soonest = self._clock.monotonic() + self._retry_seconds
        if self._held and not self._closed:
            self._arm(soonest)

    def _next(self) -> float:
        """When something is due next; an entry whose beat is out is looked at again when its lease runs out."""
        now = self._clock.monotonic()
        soonest = now + self._beat_seconds
        for key, held in self._held.items():
            if not held.in_flight and key not in self._firsts:
                soonest = min(soonest, held.due)
            lapse = held.granted_at + held.lease_seconds
            if lapse > now:
                soonest = min(soonest, lapse)
        return soonest

    def _check(self) -> None:
        now = self._clock.monotonic()
        for key, held in list(self._held.items()):
            if self._lapsed(held, now):
                self._lose(key, held, LAPSED)
            elif not held.in_flight and held.due <= now and key not in self._firsts:
                held.in_flight = True
                _ = self._tasks.spawn(f"beat:{held.beat.turn_id}", self._beat(key, held))

    def _lapsed(self, held: Held, now: float) -> bool:
        return now >= held.granted_at + held.lease_seconds and self._rivals()

    async def _beat(self, key: Key, held: Held) -> None:
        sent, beat = self._clock.monotonic(), held.next_beat()
        try:
            answer = await self._line.beat(beat)
        except RunnerError as error:
            if not held.failing:
                log.warning("a beat of turn %s failed: %s", held.beat.turn_id, error.message)
            held.failing = True
            held.due = self._clock.monotonic() + self._retry_seconds
        else:
            self._settle(key, held, beat, sent, answer)
        finally:
            held.in_flight = False
            if self._held.get(key) is held:
                self._arm(held.due)

    def _settle(self, key: Key, held: Held, beat: Heartbeat, sent: float, answer: BeatAnswer) -> None:
        """An answer counts from when its beat was sent, and only for the entry that asked."""
        if self._held.get(key) is not held:
            return
        doubted = key in self._firsts or bool(held.given_up)
        if beat.predecessor in held.given_up:
            held.given_up.remove(beat.predecessor)
            doubted = bool(held.given_up)
        if answer.admitted:
            held.granted, held.granted_at, held.lease_seconds = answer, sent, answer.lease_seconds
            held.failing = False
            if held.beat.predecessor is not None:
                held.beat = replace(held.beat, predecessor=None)
            held.due = self._clock.monotonic() if held.given_up else sent + self._beat_seconds
        elif doubted:
            held.due = self._clock.monotonic()
        else:
            self._lose(key, held, answer)

    def _lose(self, key: Key, held: Held, answer: BeatAnswer) -> None:
        del self._held[key]
        if held.lease_seconds == inf:
            self._refused.append(held.beat.turn_id)
        if held.former is not None:
            self._orphans[held.beat.turn_id] = held.former
        self._tell_lost(held, answer)

    def _tell_lost(self, held: Held, answer: BeatAnswer) -> None:
        self._told("lost", held.beat, answer)
        try:
            self._on_lost(held.beat.turn_id, answer)
        except Exception:
            log.exception("telling about the lost lease of turn %s failed", held.beat.turn_id)

    def _told(self, event: str, beat: Heartbeat, answer: BeatAnswer | None) -> None:
        before = {"phase": beat.phase, "predecessor": beat.predecessor}
        after = answer and {"admitted": answer.admitted, "owner": answer.owner, "epoch": answer.epoch}
        self._tell((beat.project, beat.session_id), beat.turn_id, event, before, after)
