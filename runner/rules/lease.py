"""Who holds a session: the decision of one beat (DESIGN 3.1.4), as a pure function of the leases and the time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, Literal

Phase = Literal["running", "paused", "parked", "ended"]

TOMBSTONES_KEPT: Final = 16


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """One beat of a turn.

    Attributes:
        project: tenant.
        session_id, turn_id, replica_id: who beats for what.
        phase: ``running`` takes or renews owner, alive and running; ``paused`` releases running and keeps alive;
            ``parked`` says that the turn is over and renews the owner for its warm seat; ``ended`` is the end beat.
        predecessor: the turn this one continues or replaces in one step; naming it says that its ending is durable.
        epoch_floor: highest epoch that the store knows for the session; a granted epoch is larger.
        seat_parked: on ``ended``: a warm seat remains, so ``owner`` is kept.
        advertise_url: where other replicas reach this one.
        epoch: on a renewal, what the turn was granted: a plane that lost its memory grants the same again.
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
    epoch: int = 0


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
        started_at: when the turn was first granted, seconds on the plane's clock.
        now: the plane's clock when it decided, seconds.
    """

    admitted: bool
    is_current_turn: bool
    owner: str | None
    epoch: int
    lease_seconds: float
    commands: tuple[dict[str, Any], ...] = field(default=())
    started_at: float = 0.0
    now: float = 0.0


@dataclass(frozen=True, slots=True)
class SessionLease:
    """The leases of one session; owner, alive and running expire together at ``expires_at``.

    Attributes:
        owner: replica that holds the session.
        alive: its turn, running or paused.
        running: the turn that executes; equal to ``alive`` or None.
        expires_at: seconds on the plane's clock.
        epoch: the last number granted.
        started_at: when the ``alive`` turn was first granted, seconds on the plane's clock.
        last_turn, last_replica: whose lease may have lapsed, or whose seat is parked; None after a clean release.
        parked: the last turn is over and left a warm seat.
        ended: tombstones, newest last, at most ``TOMBSTONES_KEPT``.
    """

    owner: str | None = None
    alive: str | None = None
    running: str | None = None
    expires_at: float = 0.0
    epoch: int = 0
    started_at: float = 0.0
    last_turn: str | None = None
    last_replica: str | None = None
    parked: bool = False
    ended: tuple[str, ...] = ()

    def at(self, now: float) -> SessionLease:
        """The same leases as they are at ``now``: without the three keys once they expired."""
        if self.owner is None or now < self.expires_at:
            return self
        return replace(self, owner=None, alive=None, running=None)


FREE: Final = SessionLease()


class Move(StrEnum):
    """What a beat does; the refusals change nothing."""

    REFUSE_ENDED = "refuse_ended"
    REFUSE_OWNED = "refuse_owned"
    REFUSE_RUNNING = "refuse_running"
    REFUSE_STRANGER = "refuse_stranger"
    SWAP = "swap"
    TAKE = "take"
    RENEW = "renew"
    HAND_OVER = "hand_over"
    PAUSE = "pause"
    PARK = "park"
    END = "end"


REFUSALS: Final = frozenset({Move.REFUSE_ENDED, Move.REFUSE_OWNED, Move.REFUSE_RUNNING, Move.REFUSE_STRANGER})
_RELEASING: Final[dict[Phase, Move]] = {"paused": Move.PAUSE, "parked": Move.PARK, "ended": Move.END}


def move(lease: SessionLease, beat: Heartbeat, *, predecessor_ended: bool = True) -> Move:
    """The move of a beat on unexpired leases, in the order of DESIGN 3.1.4.

    ``predecessor_ended`` is what the plane knows of the named predecessor; without a store the owner's word counts.
    """
    turn, mine = beat.turn_id, lease.owner == beat.replica_id
    holds = mine and lease.alive == turn
    last = lease.alive is None and (lease.last_turn, lease.last_replica) == (turn, beat.replica_id)
    if turn in lease.ended:
        if holds:
            return Move.PAUSE if beat.phase == "running" else _RELEASING[beat.phase]
        again = last and (beat.phase in ("parked", "ended") or (beat.phase == "paused" and not lease.parked))
        return _RELEASING[beat.phase] if again else Move.REFUSE_ENDED
    if lease.owner is not None and not mine:
        return Move.REFUSE_OWNED
    if beat.phase != "running":
        return _RELEASING[beat.phase] if holds or last else Move.REFUSE_STRANGER
    if beat.predecessor is not None and lease.alive == beat.predecessor != turn and mine and predecessor_ended:
        return Move.SWAP
    if lease.alive is None:
        return Move.TAKE
    if lease.alive == turn:
        return Move.RENEW
    return Move.REFUSE_RUNNING if lease.running is not None else Move.HAND_OVER


def decide(
    lease: SessionLease, beat: Heartbeat, now: float, lease_seconds: float, *, predecessor_ended: bool = True
) -> tuple[SessionLease, BeatAnswer]:
    """New leases and the answer for one beat at ``now`` (DESIGN 3.1.4).

    A refused beat returns ``lease`` itself. A turn that takes its own lapsed lease back keeps its epoch.
    """
    current = lease.at(now)
    chosen = move(current, beat, predecessor_ended=predecessor_ended)
    if chosen in REFUSALS:
        return lease, BeatAnswer(False, False, current.owner, 0, lease_seconds)
    if chosen in (Move.TAKE, Move.SWAP, Move.HAND_OVER):
        after = _taken(current, beat, now, now + lease_seconds)
    elif chosen is Move.RENEW:
        after = replace(current, running=beat.turn_id, expires_at=now + lease_seconds)
    elif chosen is Move.PAUSE:
        after = replace(_kept(current, beat, now + lease_seconds), alive=beat.turn_id, parked=False)
    elif chosen is Move.PARK or beat.seat_parked:
        after = _kept(current, beat, now + lease_seconds)
    else:
        after = _released(current, beat.turn_id)
    return after, BeatAnswer(True, after.alive == beat.turn_id, after.owner, after.epoch, lease_seconds)


def release(lease: SessionLease, replica_id: str) -> SessionLease:
    """The leases after everything of a stopped or dead replica was taken away; ``lease`` itself when it held none."""
    if lease.owner != replica_id:
        return lease
    return _released(lease, lease.alive)


def _taken(lease: SessionLease, beat: Heartbeat, now: float, expires_at: float) -> SessionLease:
    again = lease.last_turn == beat.turn_id
    same = again and lease.last_replica == beat.replica_id and beat.epoch_floor <= lease.epoch
    return SessionLease(
        owner=beat.replica_id,
        alive=beat.turn_id,
        running=beat.turn_id,
        expires_at=expires_at,
        epoch=lease.epoch if same else max(lease.epoch, beat.epoch_floor) + 1,
        started_at=lease.started_at if again else now,
        last_turn=beat.turn_id,
        last_replica=beat.replica_id,
        ended=lease.ended if again else _buried(lease.ended, lease.last_turn),
    )


def _kept(lease: SessionLease, beat: Heartbeat, expires_at: float) -> SessionLease:
    return replace(
        lease,
        owner=beat.replica_id,
        alive=None,
        running=None,
        expires_at=expires_at,
        parked=True,
        ended=_buried(lease.ended, beat.turn_id),
    )


def _released(lease: SessionLease, turn_id: str | None) -> SessionLease:
    return SessionLease(epoch=lease.epoch, ended=_buried(lease.ended, turn_id))


def _buried(ended: tuple[str, ...], turn_id: str | None) -> tuple[str, ...]:
    if turn_id is None or turn_id in ended:
        return ended
    return (*ended, turn_id)[-TOMBSTONES_KEPT:]
