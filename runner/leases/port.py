"""The lease port: one call, the heartbeat, whose answer admits, refuses or ends a turn (DESIGN 3.1)."""

from __future__ import annotations

from typing import Protocol

from runner.rules.lease import BeatAnswer, Heartbeat, Phase

__all__ = ["BeatAnswer", "Heartbeat", "LeasePlane", "Phase"]


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
