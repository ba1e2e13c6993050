"""The lease port: one call, the heartbeat, whose answer admits, refuses or ends a turn (DESIGN 3.1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Phase = Literal["running", "paused", "parked", "ended"]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """One beat of a turn.

    Attributes:
        project: tenant.
        session_id, turn_id, replica_id: who beats for what.
        phase: ``running`` takes or renews owner, alive and running; ``paused`` releases running and keeps alive;
            ``parked`` renews the owner for a warm seat; ``ended`` is the end beat.
        predecessor: the turn this one continues or replaces in one step.
        epoch_floor: highest epoch that the store knows for the session; a granted epoch is larger.
        seat_parked: on ``ended``: a warm seat remains, so ``owner`` is kept.
        advertise_url: where other replicas reach this one.
    """

    project: str
    session_id: str
    turn_id: str
    replica_id: str
    phase: Phase = "running"
    predecessor: str | None = None
    epoch_floor: int = 0
    seat_parked: bool = False
    advertise_url: str | None = None


@dataclass(frozen=True, slots=True)
class BeatAnswer:
    """What the plane says.

    Attributes:
        admitted: the beat was granted (first beat: the turn may run).
        is_current_turn: the turn still holds the session; False on a later beat is a cancel, not a refusal.
        owner: the replica that holds the session, None when nobody does.
        epoch: the turn's fencing number, 0 when not granted.
        lease_seconds: how long the grant lasts without another beat.
        commands: pending commands for this session.
    """

    admitted: bool
    is_current_turn: bool
    owner: str | None
    epoch: int
    lease_seconds: float
    commands: tuple[dict[str, Any], ...] = field(default=())


class LeasePlane(Protocol):
    """Where leases live. Atomic: concurrent beats are decided one after the other."""

    async def beat(self, beat: Heartbeat) -> BeatAnswer:
        """Decide one beat per DESIGN 3.1.4.

        Raises:
            RunnerError: ``plane_unavailable``. Cancellation leaves either the old or the new state, never half.
        """
        ...

    async def release_replica(self, replica_id: str) -> int:
        """Release every lease of a replica (shutdown, or proven dead at boot); how many sessions it held."""
        ...

    async def close(self) -> None:
        """Drop connections."""
        ...
