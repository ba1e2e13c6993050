"""Bodies and answers of the coordination routes: what a plane and its runners say to each other (DESIGN 4)."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from runner.wire.fields import CURSOR_TEXT, Id, Instant
from runner.wire.models import Part
from runner.wire.views import Interaction

LISTENING: Final = "listening"
"""``kind`` of the plane's first frame on the WebSocket: from here on notes come."""


def _address(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError("must start with http:// or https://")
    return text


Address = Annotated[str, Field(max_length=2048), AfterValidator(_address)]
Number = Annotated[int, Field(ge=0, lt=2**53)]
Tokens = Annotated[list[Annotated[str, Field(max_length=4096)]], Field(max_length=256)]


class HeartbeatRequest(Part):
    """A beat. Without ``epoch_floor`` the plane asks its own store.

    ``epoch`` and ``started_at`` are what an earlier beat of the turn was granted. ``left`` is the turn whose lease must
    have lapsed or ended for this beat to take a free session.
    """

    session_id: Id
    turn_id: Id
    replica_id: Id
    phase: Literal["running", "paused", "parked", "ended"]
    advertise_url: Address | None = None
    predecessor: Id | None = None
    epoch_floor: Number | None = None
    epoch: Number = 0
    started_at: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    seat_parked: bool = False
    left: Id | None = None


class CommandBrief(TypedDict):
    """An open command of the session that a beat names."""

    command_id: str
    kind: str
    turn_id: str | None


class BeatReply(TypedDict):
    """The answer to a beat; ``started_at`` and ``now`` are seconds on the plane's clock."""

    admitted: bool
    is_current_turn: bool
    owner: str | None
    epoch: int
    lease_seconds: float
    commands: list[CommandBrief]
    started_at: float
    now: float


class SessionRequest(Part):
    """Who holds this session?"""

    session_id: Id


class Nothing(Part):
    """An empty body."""


class Replica(Part):
    """A runner as the others know it; ``host`` is the boot id of its machine, ``lock`` the path of its lock file."""

    replica_id: Id
    advertise_url: Address | None = None
    host: Annotated[str, Field(max_length=256)] = ""
    lock: Annotated[str, Field(max_length=4096)] | None = None
    started_at: Number = 0


class AnnounceRequest(Part):
    """A runner makes itself known; ``tokens`` are those of its further projects."""

    replica: Replica
    tokens: Tokens = Field(default_factory=list)


class ReplicaRequest(Part):
    """A replica whose leases end; ``tokens`` as in ``AnnounceRequest``."""

    replica_id: Id
    tokens: Tokens = Field(default_factory=list)


class PushRequest(Part):
    """A note for a replica; its ``project`` must be one of the sender's."""

    replica_id: Id
    note: Annotated[dict[str, Any], Field(max_length=32)]


class RecordItem(Part):
    """A record of DESIGN 4.1; the prompt is its turn's."""

    record_id: Id
    session_id: Id
    turn_id: Id
    cursor: Annotated[str, Field(pattern=CURSOR_TEXT)]
    type: Annotated[str, Field(min_length=1, max_length=64)]
    data: dict[str, Any]
    at: Instant


class RecordsRequest(Part):
    """Records of one turn."""

    session_id: Id
    turn_id: Id
    epoch: Number
    records: Annotated[list[RecordItem], Field(max_length=10_000)]


class RecordsReply(TypedDict):
    """How many records are durable and count, and how many were set aside."""

    accepted: int
    quarantined: int


class InteractionItem(Part):
    """An interaction of DESIGN 4.1."""

    interaction_id: Id
    session_id: Id
    turn_id: Id
    status: Literal["pending", "answered", "consumed", "cancelled", "expired"]
    kind: Annotated[str, Field(min_length=1, max_length=64)]
    tool_call: dict[str, Any] | None = None
    options: Annotated[list[dict[str, Any]], Field(default_factory=list, max_length=1000)]
    created_at: Instant
    expires_at: Instant
    answer: dict[str, Any] | None = None


class InteractionsRequest(Part):
    """Questions of one turn as they are now."""

    session_id: Id
    turn_id: Id
    interactions: Annotated[list[InteractionItem], Field(max_length=1000)]


class InteractionsReply(TypedDict):
    """The questions as they are stored."""

    items: list[Interaction]


class OutcomeRequest(Part):
    """What became of a command."""

    state: Literal["applied", "obsolete"]
    outcome: Literal["stopped", "not_running", "superseded", "failed", "lost"] | None = None


class OutcomeReply(TypedDict):
    """Whether this settled the command; False: it was settled otherwise before."""

    settled: bool


class HelloFrame(Part):
    """The first frame of a runner on the WebSocket; ``tokens`` as in ``AnnounceRequest``."""

    replica: Replica
    tokens: Tokens = Field(default_factory=list)


class ReplicaView(TypedDict):
    """A known replica."""

    replica_id: str
    advertise_url: str | None
    host: str
    lock: str | None
    started_at: int


class ReplicaList(TypedDict):
    """Known replicas."""

    items: list[ReplicaView]


class HolderView(TypedDict):
    """Who holds a session; seconds on the plane's clock."""

    replica_id: str
    advertise_url: str | None
    alive: str | None
    running: str | None
    epoch: int
    started_at: float
    now: float


class Released(TypedDict):
    """How many sessions a replica held."""

    released: int


class Pushed(TypedDict):
    """Whether somebody listened."""

    listened: bool
