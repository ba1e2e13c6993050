"""Leases inside one process: the rule of ``rules.lease`` over a bounded map; the twin of the planes outside."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import Final

from runner.clock import Clock
from runner.leases.port import BeatAnswer, HasEnded, Heartbeat, Holder, Note, OnNote, ReplicaInfo
from runner.rules.lease import FREE, SessionLease, comes_back, decide, release

log = logging.getLogger("runner.leases")
SESSIONS_KEPT: Final = 10_000
ANNOUNCED_LEASES: Final = 3


class MemoryLeasePlane:
    """Leases of one process; see ``LeasePlane``.

    Args:
        clock: its monotonic reading is the plane's time.
        lease_seconds: how long a grant lasts.
        has_ended: see ``HasEnded``; None believes an owner that names a predecessor.
        keep: sessions remembered; past that, those that hold nothing are forgotten, longest silent first.
        shared: several replicas of this process use it (a plane's server, tests); False: this replica is alone.
    """

    def __init__(
        self,
        clock: Clock,
        lease_seconds: float,
        *,
        has_ended: HasEnded | None = None,
        keep: int = SESSIONS_KEPT,
        shared: bool = False,
    ) -> None:
        self.shared = shared
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._has_ended = has_ended
        self._keep = keep
        self._leases: OrderedDict[tuple[str, str], SessionLease] = OrderedDict()
        self._replicas: dict[str, tuple[ReplicaInfo, float]] = {}
        self._named: dict[str, tuple[str, float]] = {}
        self._listeners: dict[str, list[OnNote]] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def lease(self, project: str, session_id: str) -> SessionLease:
        """The unexpired leases of a session, for diagnostics and tests."""
        return self._leases.get((project, session_id), FREE).at(self._clock.monotonic())

    async def beat(self, beat: Heartbeat) -> BeatAnswer:
        """Decide one beat; it waits for nothing but ``has_ended``, so beats are decided one after the other."""
        key = (beat.project, beat.session_id)
        predecessor_ended = turn_ended = False
        if self._has_ended is None:
            predecessor_ended = True
        else:
            if beat.predecessor is not None and beat.phase == "running":
                predecessor_ended = await self._has_ended(*key, beat.predecessor)
            if comes_back(self.lease(*key), beat):
                turn_ended = await self._has_ended(*key, beat.turn_id)
        before, now = self._leases.get(key, FREE), self._clock.monotonic()
        after, answer = decide(
            before, beat, now, self._lease_seconds, predecessor_ended=predecessor_ended, turn_ended=turn_ended
        )
        if after is not before:
            self._leases[key] = after
            self._leases.move_to_end(key)
            if len(self._leases) > self._keep:
                self._forget(now)
        return answer

    async def look(self, project: str, session_id: str) -> Holder | None:
        """Who holds a session; answered at once."""
        lease, now = self.lease(project, session_id), self._clock.monotonic()
        if lease.owner is None:
            return None
        known = self._announced(lease.owner, now)
        url = known.advertise_url if known is not None else None
        return Holder(lease.owner, url, lease.alive, lease.running, lease.epoch, lease.started_at, now)

    async def release_replica(self, replica_id: str) -> int:
        """Release every lease of ``replica_id`` and forget it."""
        count = 0
        for key, lease in self._leases.items():
            after = release(lease, replica_id)
            if after is not lease:
                self._leases[key] = after
                count += 1
        self._named = {name: held for name, held in self._named.items() if held[0] != replica_id}
        _ = self._replicas.pop(replica_id, None)
        return count

    async def announce(self, replica: ReplicaInfo) -> None:
        """Make a replica known for three lease times."""
        now = self._clock.monotonic()
        self._replicas = {name: known for name, known in self._replicas.items() if known[1] > now}
        self._replicas[replica.replica_id] = (replica, now + ANNOUNCED_LEASES * self._lease_seconds)

    async def replicas(self) -> list[ReplicaInfo]:
        """Every replica that is announced, in order of its id."""
        now = self._clock.monotonic()
        return [info for name in sorted(self._replicas) if (info := self._announced(name, now)) is not None]

    async def take_lease(self, name: str, replica_id: str, seconds: float) -> bool:
        """Take or renew a named lease."""
        now = self._clock.monotonic()
        owner, until = self._named.get(name, (replica_id, now))
        if owner != replica_id and now < until:
            return False
        self._named[name] = (replica_id, now + seconds)
        return True

    async def push(self, replica_id: str, note: Note) -> bool:
        """Hand a note to the listeners of a replica, each in a turn of the loop of its own."""
        listeners = self._listeners.get(replica_id, [])
        for on_note in listeners:
            asyncio.get_running_loop().call_soon(_deliver, on_note, note)
        return bool(listeners)

    async def listen(self, replica_id: str, on_note: OnNote) -> None:
        """Have the notes for a replica delivered until ``close``."""
        self._listeners.setdefault(replica_id, []).append(on_note)

    async def close(self) -> None:
        """Drop the listeners; the leases stay what they are."""
        self._listeners.clear()

    def _announced(self, replica_id: str, now: float) -> ReplicaInfo | None:
        info, until = self._replicas.get(replica_id, (None, now))
        return info if now < until else None

    def _forget(self, now: float) -> None:
        for key, lease in list(self._leases.items())[: len(self._leases) - self._keep + 1]:
            if lease.at(now).owner is None:
                del self._leases[key]


def _deliver(on_note: OnNote, note: Note) -> None:
    try:
        on_note(note)
    except Exception:
        log.exception("a note could not be handled")
