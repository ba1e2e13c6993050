"""The lease port: heartbeats that admit, refuse or end a turn, who holds a session, who else there is (DESIGN 3.1)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from runner.rules.lease import BeatAnswer, Heartbeat, Phase

__all__ = ["BeatAnswer", "HasEnded", "Heartbeat", "Holder", "LeasePlane", "Note", "OnNote", "Phase", "ReplicaInfo"]

Note = Mapping[str, Any]
"""What one replica pushes to another, JSON; ``kind`` says what it is. A note may be lost: it only saves time."""
OnNote = Callable[[Note], None]
HasEnded = Callable[[str, str, str], Awaitable[bool]]
"""``(project, session_id, turn_id)``: whether the store has the turn's ending, its tombstone. Asked for a named
predecessor, and before a turn takes back a lease that lapsed or that the plane forgot."""


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """A runner process as the others know it.

    Attributes:
        advertise_url: where they reach it; None: nobody can.
        host: boot id of its machine: on the same boot, ``lock`` proves its death.
        lock: absolute path of the lock file that it holds as long as it lives.
        started_at: milliseconds since 1970.
    """

    replica_id: str
    advertise_url: str | None = None
    host: str = ""
    lock: str | None = None
    started_at: int = 0


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a session now.

    Attributes:
        advertise_url: of the owner, None when it has none or its announcement ran out.
        alive, running: the turn that holds the session, and the one that executes; both None for a parked seat.
        started_at: when ``alive`` was first granted, seconds on the plane's clock.
        now: the plane's clock when it looked, seconds.
    """

    replica_id: str
    advertise_url: str | None
    alive: str | None
    running: str | None
    epoch: int
    started_at: float
    now: float


class LeasePlane(Protocol):
    """Where leases live. Atomic: concurrent beats are decided one after the other.

    Every call raises ``RunnerError("plane_unavailable")`` when the plane gives no answer. A cancelled call leaves
    either the old or the new state, never half, and no connection that is one reply out of step.
    """

    shared: bool
    """Whether other replicas may use this plane; False for the one inside a process."""

    async def beat(self, beat: Heartbeat) -> BeatAnswer:
        """Decide one beat per DESIGN 3.1.4."""
        ...

    async def look(self, project: str, session_id: str) -> Holder | None:
        """Who holds a session, without changing anything; None when nobody does."""
        ...

    async def release_replica(self, replica_id: str) -> int:
        """Release every lease of a replica (shutdown, or proven dead) and forget it; how many sessions it held."""
        ...

    async def announce(self, replica: ReplicaInfo) -> None:
        """Make a replica known for three lease times; repeated with the beats."""
        ...

    async def replicas(self) -> list[ReplicaInfo]:
        """Every replica that is announced, in order of its id."""
        ...

    async def take_lease(self, name: str, replica_id: str, seconds: float) -> bool:
        """Take or renew a named lease (the sweep's) for ``seconds``; False while another replica has it."""
        ...

    async def push(self, replica_id: str, note: Note) -> bool:
        """Send a note to a replica; whether somebody listened."""
        ...

    async def listen(self, replica_id: str, on_note: OnNote) -> None:
        """Have the notes for a replica delivered until ``close``; survives a lost connection by itself."""
        ...

    async def close(self) -> None:
        """Drop connections."""
        ...
