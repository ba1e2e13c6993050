"""The beat shell: sends first beats, renews what this replica holds, and notices by itself what it lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from runner.clock import Clock
from runner.errors import RunnerError
from runner.leases.port import BeatAnswer, Heartbeat, LeasePlane
from runner.rules.story import Tell, untold
from runner.tasks import Tasks

log = logging.getLogger("runner.leases")

END_TRIES: Final = 5
LAPSED: Final = BeatAnswer(admitted=False, is_current_turn=False, owner=None, epoch=0, lease_seconds=0.0)

Key = tuple[str, str]


@dataclass(slots=True, eq=False)
class _Held:
    """What this replica renews for one session: a running or paused turn, or the parked seat of its last turn."""

    beat: Heartbeat
    granted_at: float
    lease_seconds: float
    due: float
    in_flight: bool = False
    failing: bool = False


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
        tell: hears of every beat but renewals that changed nothing.
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
        tell: Tell = untold,
    ) -> None:
        self._plane = plane
        self._clock = clock
        self._beat_seconds = beat_seconds
        self._retry_seconds = beat_seconds / 5
        self._timeout = beat_timeout_seconds
        self._on_lost = on_lost
        self._rivals = rivals
        self._tell = tell
        self._held: dict[Key, _Held] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = Tasks("heartbeats")
        self._closed = False

    def __len__(self) -> int:
        return len(self._held)

    def holds(self, project: str, session_id: str, turn_id: str) -> bool:
        """Whether the last grant of this turn is still valid: asked before something is spooled (DESIGN 3.9)."""
        held = self._held.get((project, session_id))
        return (
            held is not None
            and held.beat.turn_id == turn_id
            and self._clock.monotonic() < held.granted_at + held.lease_seconds
        )

    async def first(self, beat: Heartbeat) -> BeatAnswer:
        """Send a turn's first beat; when it is admitted, renew it from now on in place of the session's former entry.

        Raises:
            RunnerError: ``plane_unavailable`` when no answer came in time. What the plane may have granted all the
                same is given back behind, also when the call is cancelled.
        """
        sent = self._clock.monotonic()
        try:
            answer = await self._send(beat)
        except BaseException:
            _ = self._tasks.spawn(f"give-back:{beat.turn_id}", self._retry_end(replace(beat, phase="ended")))
            raise
        self._told(beat.phase, beat, answer)
        if answer.admitted:
            renewal = replace(beat, predecessor=None, epoch_floor=answer.epoch)
            self._renew(renewal, sent, sent + self._beat_seconds, answer.lease_seconds)
        return answer

    async def end(self, beat: Heartbeat) -> BeatAnswer | None:
        """Send a ``paused``, ``parked`` or ``ended`` beat: one try, at most the beat time-out, retried behind.

        ``paused`` and ``parked`` are renewed from now on if the turn was held, ``ended`` stops the renewal. Call it
        once per change.

        Returns:
            The plane's answer; None when it did not come in time.
        """
        key = (beat.project, beat.session_id)
        sent = self._clock.monotonic()
        held = self._held.get(key)
        entry = None
        if held is not None and held.beat.turn_id == beat.turn_id:
            del self._held[key]
            if beat.phase != "ended":
                renewal = replace(beat, predecessor=None, epoch_floor=held.beat.epoch_floor)
                entry = self._renew(renewal, held.granted_at, sent + self._retry_seconds, held.lease_seconds)
        try:
            answer = await self._send(beat)
        except (RunnerError, asyncio.CancelledError) as error:
            if beat.phase == "ended" and not self._closed:
                _ = self._tasks.spawn(f"end:{beat.turn_id}", self._retry_end(beat))
            if isinstance(error, RunnerError):
                self._told("unanswered", beat, None)
                return None
            raise
        self._told(beat.phase, beat, answer)
        if entry is not None:
            self._settle(key, entry, sent, answer)
        return answer

    async def close(self) -> None:
        """Stop renewing; nothing is released here (``LeasePlane.release_replica`` does)."""
        self._closed = True
        self._held.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._tasks.close(self._timeout)

    async def _send(self, beat: Heartbeat) -> BeatAnswer:
        try:
            async with asyncio.timeout(self._timeout):
                return await self._plane.beat(beat)
        except TimeoutError:
            raise RunnerError("plane_unavailable", f"The lease plane gave no answer in {self._timeout:g} s.") from None
        except RunnerError:
            raise
        except Exception as error:
            log.exception("the lease plane failed on a beat of turn %s", beat.turn_id)
            raise RunnerError("plane_unavailable", "The lease plane failed.") from error

    async def _retry_end(self, beat: Heartbeat) -> None:
        """An end beat is scoped by its turn, so a late one can harm nobody; it gives way to a new first beat."""
        for _ in range(END_TRIES):
            held = self._held.get((beat.project, beat.session_id))
            if held is not None and held.beat.turn_id == beat.turn_id:
                return
            try:
                await self._send(beat)
                return
            except RunnerError:
                await asyncio.sleep(self._beat_seconds)
        log.warning("the end beat of turn %s was given up; its lease runs out by itself", beat.turn_id)

    def _renew(self, beat: Heartbeat, granted_at: float, due: float, lease_seconds: float) -> _Held:
        held = _Held(beat, granted_at, lease_seconds, due)
        if not self._closed:
            self._held[beat.project, beat.session_id] = held
            self._arm(due)
        return held

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
        for held in self._held.values():
            if not held.in_flight:
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
            elif not held.in_flight and held.due <= now:
                held.in_flight = True
                _ = self._tasks.spawn(f"beat:{held.beat.turn_id}", self._beat(key, held))

    def _lapsed(self, held: _Held, now: float) -> bool:
        return now >= held.granted_at + held.lease_seconds and self._rivals()

    async def _beat(self, key: Key, held: _Held) -> None:
        sent = self._clock.monotonic()
        try:
            answer = await self._send(held.beat)
        except RunnerError as error:
            if not held.failing:
                log.warning("a beat of turn %s failed: %s", held.beat.turn_id, error.message)
            held.failing = True
            held.due = self._clock.monotonic() + self._retry_seconds
        else:
            self._settle(key, held, sent, answer)
        finally:
            held.in_flight = False
        if self._held.get(key) is held:
            self._arm(held.due)

    def _settle(self, key: Key, held: _Held, sent: float, answer: BeatAnswer) -> None:
        """An answer counts from when its beat was sent, and only for the entry that asked."""
        if self._held.get(key) is not held:
            return
        if not answer.admitted:
            self._lose(key, held, answer)
            return
        held.granted_at, held.lease_seconds = sent, answer.lease_seconds
        held.due = sent + self._beat_seconds
        held.failing = False

    def _lose(self, key: Key, held: _Held, answer: BeatAnswer) -> None:
        del self._held[key]
        self._told("lost", held.beat, answer)
        try:
            self._on_lost(held.beat.turn_id, answer)
        except Exception:
            log.exception("telling about the lost lease of turn %s failed", held.beat.turn_id)

    def _told(self, event: str, beat: Heartbeat, answer: BeatAnswer | None) -> None:
        before = {"phase": beat.phase, "predecessor": beat.predecessor}
        after = None
        if answer is not None:
            after = {"admitted": answer.admitted, "owner": answer.owner, "epoch": answer.epoch}
        self._tell((beat.project, beat.session_id), beat.turn_id, event, before, after)
