"""What a replica renews for one session."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from runner.leases.port import BeatAnswer, Heartbeat

REFUSED_KEPT: Final = 1000


def ended(beat: Heartbeat) -> Heartbeat:
    """The end beat of the same turn."""
    return replace(beat, phase="ended", predecessor=None, seat_parked=False)


@dataclass(slots=True, eq=False)
class Held:
    """A running or paused turn, or the parked seat of a session's last turn.

    Attributes:
        granted: the last answer that granted it.
        granted_at: when the beat of that answer was sent.
        former: the paused chain or parked seat that this turn took over, until its admission is certain.
        given_up: turns that may have taken over from this chain or seat, but did not become durable.
    """

    beat: Heartbeat
    granted: BeatAnswer
    granted_at: float
    lease_seconds: float
    due: float
    former: Held | None = None
    given_up: list[str] = field(default_factory=list)
    in_flight: bool = False
    failing: bool = False

    def next_beat(self) -> Heartbeat:
        """The renewal, naming a turn that is given up while there is one."""
        return replace(self.beat, predecessor=self.given_up[0]) if self.given_up else self.beat
