"""The words of the product as enumerations (DESIGN 2). Values are what clients read on the wire."""

from __future__ import annotations

from enum import StrEnum


class TurnPhase(StrEnum):
    """Phases of a turn (DESIGN 3.2)."""

    ADMITTED = "admitted"
    PREPARING = "preparing"
    PROMPTING = "prompting"
    CANCELLING = "cancelling"
    ENDED = "ended"


class Outcome(StrEnum):
    """The exactly one ending of an admitted turn; ``absorbed`` is a prompt's, never a turn's."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    PAUSED = "paused"
    FAILED = "failed"
    LOST = "lost"
    ABSORBED = "absorbed"


class PromptState(StrEnum):
    """Terminal states of a prompt (DESIGN 4.1 ``prompt_ended``), ``queued``, ``active``, and ``stored`` context."""

    QUEUED = "queued"
    ACTIVE = "active"
    STORED = "stored"
    DONE = "done"
    ABORTED = "aborted"
    CANCELLED = "cancelled"
    FAILED = "failed"
    ABSORBED = "absorbed"


class SessionState(StrEnum):
    """``state`` of the session view."""

    IDLE = "idle"
    RUNNING = "running"
    AWAITING_APPROVAL = "awaiting_approval"
    STOPPING = "stopping"
    ENDED = "ended"


class SeatState(StrEnum):
    """States of a seat in the pool (DESIGN 3.5)."""

    BUSY = "busy"
    IDLE = "idle"
    AWAITING_APPROVAL = "awaiting_approval"
    ASLEEP = "asleep"
    SPARE = "spare"
    DESTROYED = "destroyed"


class Start(StrEnum):
    """How a turn got its agent (DESIGN 3.5)."""

    HIT = "hit"
    SPARE = "spare"
    WOKEN = "woken"
    RESUMED = "resumed"
    COLD = "cold"


class StopReason(StrEnum):
    """Why a turn is being stopped; the label of an abort (DESIGN 3.4)."""

    CANCEL = "cancel"
    ABORT_PROMPT = "abort_prompt"
    STEER = "steer"
    NEW_PROMPT = "new_prompt"
    KILL = "kill"
    DELETE = "delete"
    LIMIT = "limit"
    DRAIN = "drain"
    LEASE_LOST = "lease_lost"

    @property
    def cooperative(self) -> bool:
        """Whether the sandbox may stay warm afterwards."""
        return self in _COOPERATIVE


_COOPERATIVE = frozenset({StopReason.CANCEL, StopReason.ABORT_PROMPT, StopReason.STEER, StopReason.NEW_PROMPT})


class CommandKind(StrEnum):
    """What a command asks for (DESIGN 2, 3.7)."""

    CANCEL = "cancel"
    STEER = "steer"
    KILL = "kill"
    ABORT_PROMPT = "abort_prompt"


class CommandState(StrEnum):
    """States of a command (DESIGN 3.7)."""

    PENDING = "pending"
    CLAIMED = "claimed"
    APPLIED = "applied"
    OBSOLETE = "obsolete"


class CommandOutcome(StrEnum):
    """What a command came to (DESIGN 3.7)."""

    STOPPED = "stopped"
    NOT_RUNNING = "not_running"
    SUPERSEDED = "superseded"
    FAILED = "failed"
    LOST = "lost"


class InteractionStatus(StrEnum):
    """States of an interaction (DESIGN 3.8)."""

    PENDING = "pending"
    ANSWERED = "answered"
    CONSUMED = "consumed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class EventType(StrEnum):
    """Types of events (DESIGN 4.1)."""

    TURN_QUEUED = "turn_queued"
    TURN_ADMITTED = "turn_admitted"
    ENVIRONMENT = "environment"
    USER_MESSAGE = "user_message"
    MESSAGE_DELTA = "message_delta"
    THOUGHT_DELTA = "thought_delta"
    MESSAGE = "message"
    THOUGHT = "thought"
    TOOL_CALL = "tool_call"
    TOOL_CALL_UPDATE = "tool_call_update"
    PLAN = "plan"
    USAGE = "usage"
    SESSION_INFO = "session_info"
    NOTICE = "notice"
    INTERACTION_REQUESTED = "interaction_requested"
    INTERACTION_CLOSED = "interaction_closed"
    SESSION_BUSY = "session_busy"
    SESSION_IDLE = "session_idle"
    PROMPT_ENDED = "prompt_ended"
    ERROR = "error"
    RESYNC = "resync"
    DONE = "done"


TERMINAL_TOOL_STATUSES = frozenset({"completed", "failed", "cancelled"})
"""Statuses behind which a tool call's record is written."""
