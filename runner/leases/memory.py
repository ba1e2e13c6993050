"""The lease plane inside one process: the rule of ``runner.rules.lease`` over a bounded map."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from runner.clock import Clock
from runner.leases.port import BeatAnswer, Heartbeat
from runner.rules.lease import FREE, SessionLease, decide, release

SESSIONS_KEPT: Final = 10_000


class MemoryLeasePlane:
    """Leases of one process.

    Args:
        clock: its monotonic reading is the plane's time.
        lease_seconds: how long a grant lasts.
        has_ended: whether ``(project, session_id, turn_id)`` has its ending; None believes an owner that names a
            predecessor.
        keep: sessions remembered; past that, those that hold nothing are forgotten, longest silent first.
    """

    def __init__(
        self,
        clock: Clock,
        lease_seconds: float,
        *,
        has_ended: Callable[[str, str, str], bool] | None = None,
        keep: int = SESSIONS_KEPT,
    ) -> None:
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._has_ended = has_ended
        self._keep = keep
        self._leases: OrderedDict[tuple[str, str], SessionLease] = OrderedDict()

    def __len__(self) -> int:
        return len(self._leases)

    def lease(self, project: str, session_id: str) -> SessionLease:
        """The unexpired leases of a session, for diagnostics and tests."""
        return self._leases.get((project, session_id), FREE).at(self._clock.monotonic())

    async def beat(self, beat: Heartbeat) -> BeatAnswer:
        """Decide one beat; it never waits, so concurrent beats are decided one after the other."""
        key = (beat.project, beat.session_id)
        before = self._leases.get(key, FREE)
        now = self._clock.monotonic()
        ended = self._has_ended is None or (
            beat.predecessor is not None and self._has_ended(beat.project, beat.session_id, beat.predecessor)
        )
        after, answer = decide(before, beat, now, self._lease_seconds, predecessor_ended=ended)
        if after is not before:
            self._leases[key] = after
            self._leases.move_to_end(key)
            if len(self._leases) > self._keep:
                self._forget(now)
        return answer

    async def release_replica(self, replica_id: str) -> int:
        """Release every lease of ``replica_id``."""
        count = 0
        for key, lease in self._leases.items():
            after = release(lease, replica_id)
            if after is not lease:
                self._leases[key] = after
                count += 1
        return count

    async def close(self) -> None:
        """Nothing is open."""

    def _forget(self, now: float) -> None:
        for key, lease in list(self._leases.items())[: len(self._leases) - self._keep + 1]:
            if lease.at(now).owner is None:
                del self._leases[key]
