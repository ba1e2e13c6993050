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
            On ``paused`` and ``parked``: a turn that took over and then never became durable; it is given up.
        epoch_floor: highest epoch that the store knows for the session; a granted epoch is larger.
        seat_parked: on ``ended``: a warm seat remains, so ``owner`` is kept.
        advertise_url: where other replicas reach this one.
        epoch, started_at: on a renewal, what the turn was granted: a plane that lost its memory grants the same again.
        left: the turn whose lease must have lapsed or ended for this beat to take a free session; None: no matter.
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
    started_at: float = 0.0
    left: str | None = None


@dataclass(frozen=True, slots=True)
class BeatAnswer:
    """What the plane says.

    Attributes:
        admitted: the beat was granted (first beat: the turn may run).
        is_current_turn: the turn still holds the session; False on a later beat is a cancel, not a refusal.
        owner: the replica that holds the session, None when nobody does (refused: nobody that the plane remembers).
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
    REFUSE_STALE = "refuse_stale"
    REFUSE_STRANGER = "refuse_stranger"
    REFUSE_FORGOTTEN = "refuse_forgotten"
    SWAP = "swap"
    TAKE = "take"
    RENEW = "renew"
    HAND_OVER = "hand_over"
    PAUSE = "pause"
    PARK = "park"
    RESTORE = "restore"
    END = "end"


REFUSALS: Final = frozenset(
    {
        Move.REFUSE_ENDED,
        Move.REFUSE_OWNED,
        Move.REFUSE_RUNNING,
        Move.REFUSE_STALE,
        Move.REFUSE_STRANGER,
        Move.REFUSE_FORGOTTEN,
    }
)
_RELEASING: Final[dict[Phase, Move]] = {"paused": Move.PAUSE, "parked": Move.PARK, "ended": Move.END}


def comes_back(lease: SessionLease, beat: Heartbeat) -> bool:
    """Whether a turn takes its lease back from unexpired leases that nobody holds: it lapsed, or the plane forgot it.

    Then the store is asked whether the turn has ended meanwhile (``turn_ended``): its word is the tombstone.
    """
    if beat.phase != "running" or lease.alive is not None or lease.owner not in (None, beat.replica_id):
        return False
    return beat.epoch > 0 or _stands(lease, beat.replica_id, beat.turn_id)


def move(lease: SessionLease, beat: Heartbeat, *, predecessor_ended: bool = True, turn_ended: bool = False) -> Move:
    """The move of a beat on unexpired leases, in the order of DESIGN 3.1.4.

    ``predecessor_ended`` is what the plane knows of the named predecessor; without a store the owner's word counts.
    ``turn_ended`` is the store's word on a turn that comes back.
    """
    turn, mine = beat.turn_id, lease.owner == beat.replica_id
    stands = _stands(lease, beat.replica_id, turn)
    given_up = (
        beat.phase in ("paused", "parked")
        and beat.predecessor is not None
        and _stands(lease, beat.replica_id, beat.predecessor)
    )
    if turn in lease.ended and not given_up:
        return _ended_move(lease, beat)
    if lease.owner is not None and not mine:
        return Move.REFUSE_OWNED
    if given_up:
        return Move.RESTORE
    if not stands and _stale(lease, beat):
        return Move.REFUSE_STALE
    if beat.phase != "running":
        forgotten = beat.epoch > 0 and lease.alive is None
        return _RELEASING[beat.phase] if stands or forgotten else Move.REFUSE_STRANGER
    if turn_ended and comes_back(lease, beat):
        return Move.REFUSE_ENDED
    if beat.predecessor is not None and lease.alive == beat.predecessor != turn and mine and predecessor_ended:
        return Move.SWAP
    if lease.alive is None:
        return Move.REFUSE_FORGOTTEN if _forgotten(lease, beat) else Move.TAKE
    if lease.alive == turn:
        return Move.RENEW
    return Move.REFUSE_RUNNING if lease.running is not None else Move.HAND_OVER


def decide(
    lease: SessionLease,
    beat: Heartbeat,
    now: float,
    lease_seconds: float,
    *,
    predecessor_ended: bool = True,
    turn_ended: bool = False,
) -> tuple[SessionLease, BeatAnswer]:
    """New leases and the answer for one beat at ``now`` (DESIGN 3.1.4).

    A refused beat returns ``lease`` itself. A turn that takes its own lapsed lease back keeps its epoch, also from a
    plane that knows nothing of it any more.
    """
    current = lease.at(now)
    chosen = move(current, beat, predecessor_ended=predecessor_ended, turn_ended=turn_ended)
    if chosen in REFUSALS:
        return lease, BeatAnswer(False, False, current.owner, 0, lease_seconds, now=now)
    expires_at = now + lease_seconds
    if chosen in (Move.TAKE, Move.SWAP, Move.HAND_OVER):
        after = _taken(current, beat, now, expires_at)
    elif chosen is Move.RENEW:
        after = replace(current, running=beat.turn_id, expires_at=expires_at)
    elif chosen is Move.PAUSE or (chosen is Move.RESTORE and beat.phase == "paused"):
        after = replace(_kept(current, beat, now, expires_at), alive=beat.turn_id, parked=False)
    elif chosen is not Move.END or beat.seat_parked:
        after = _kept(current, beat, now, expires_at)
    else:
        after = _released(current, beat.turn_id, beat.epoch)
    started_at = after.started_at if after.owner is not None else current.started_at
    current_turn = after.alive == beat.turn_id
    return after, BeatAnswer(
        True, current_turn, after.owner, after.epoch, lease_seconds, started_at=started_at, now=now
    )


def release(lease: SessionLease, replica_id: str) -> SessionLease:
    """The leases after everything of a stopped or dead replica was taken away; ``lease`` itself when it held none."""
    if lease.owner != replica_id:
        return lease
    return _released(lease, lease.alive)


def _stands(lease: SessionLease, replica_id: str, turn_id: str) -> bool:
    """Whether the leases are this replica's turn's: held, or lapsed or parked and nobody came after it."""
    if lease.alive is not None:
        return (lease.owner, lease.alive) == (replica_id, turn_id)
    return (lease.last_replica, lease.last_turn) == (replica_id, turn_id)


def _ended_move(lease: SessionLease, beat: Heartbeat) -> Move:
    """A tombstoned turn may keep its pause or its parked seat, and end them; it never runs again."""
    if not _stands(lease, beat.replica_id, beat.turn_id):
        return Move.REFUSE_ENDED
    if lease.alive is not None:
        return Move.PAUSE if beat.phase == "running" else _RELEASING[beat.phase]
    again = beat.phase in ("parked", "ended") or (beat.phase == "paused" and not lease.parked)
    return _RELEASING[beat.phase] if again else Move.REFUSE_ENDED


def _forgotten(lease: SessionLease, beat: Heartbeat) -> bool:
    """Whether a free session may still be held by the turn that has to be over: the plane saw neither lapse nor end."""
    return beat.left is not None and lease.owner is None and beat.left not in (lease.last_turn, *lease.ended)


def _stale(lease: SessionLease, beat: Heartbeat) -> bool:
    """Whether a renewal was overtaken: its epoch was given to another turn, here or in the store."""
    return 0 < beat.epoch <= lease.epoch or 0 < beat.epoch < beat.epoch_floor


def _taken(lease: SessionLease, beat: Heartbeat, now: float, expires_at: float) -> SessionLease:
    again = lease.last_turn == beat.turn_id
    same = again and lease.last_replica == beat.replica_id and beat.epoch_floor <= lease.epoch
    known = lease.epoch if same else max(lease.epoch, beat.epoch_floor) + 1
    return SessionLease(
        owner=beat.replica_id,
        alive=beat.turn_id,
        running=beat.turn_id,
        expires_at=expires_at,
        epoch=beat.epoch if beat.epoch > lease.epoch else known,
        started_at=lease.started_at if again else _started(beat, now),
        last_turn=beat.turn_id,
        last_replica=beat.replica_id,
        ended=lease.ended if again else _buried(lease.ended, lease.last_turn),
    )


def _kept(lease: SessionLease, beat: Heartbeat, now: float, expires_at: float) -> SessionLease:
    again = lease.last_turn == beat.turn_id
    return SessionLease(
        owner=beat.replica_id,
        expires_at=expires_at,
        epoch=max(lease.epoch, beat.epoch),
        started_at=lease.started_at if again else _started(beat, now),
        last_turn=beat.turn_id,
        last_replica=beat.replica_id,
        parked=True,
        ended=_buried(_buried(lease.ended, beat.predecessor), beat.turn_id),
    )


def _started(beat: Heartbeat, now: float) -> float:
    return min(beat.started_at, now) if beat.epoch > 0 and beat.started_at > 0 else now


def _released(lease: SessionLease, turn_id: str | None, epoch: int = 0) -> SessionLease:
    return SessionLease(epoch=max(lease.epoch, epoch), ended=_buried(lease.ended, turn_id))


def _buried(ended: tuple[str, ...], turn_id: str | None) -> tuple[str, ...]:
    if turn_id is None or turn_id in ended:
        return ended
    return (*ended, turn_id)[-TOMBSTONES_KEPT:]
