"""The error codes of the product, each with its HTTP status, retryability and culprit (DESIGN 4.2)."""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

Culprit = Literal["client", "agent", "provider", "plane", "store", "runner"]

TURN_IN_USE_SENTENCE: Final = "Another turn is already running in this session. Your message was not sent."


class CodeFacts(NamedTuple):
    """What a code means everywhere: ``status`` is None for codes that only appear inside a stream."""

    status: int | None
    retryable: bool
    culprit: Culprit


CODES: Final[dict[str, CodeFacts]] = {
    "invalid_request": CodeFacts(400, False, "client"),
    "unauthorized": CodeFacts(401, False, "client"),
    "forbidden": CodeFacts(403, False, "client"),
    "not_found": CodeFacts(404, False, "client"),
    "session_turn_in_use": CodeFacts(409, False, "client"),
    "execution_mismatch": CodeFacts(409, False, "client"),
    "interaction_conflict": CodeFacts(409, False, "client"),
    "prompt_conflict": CodeFacts(409, False, "client"),
    "session_starting": CodeFacts(409, True, "runner"),
    "owned_elsewhere": CodeFacts(409, True, "plane"),
    "session_ended": CodeFacts(410, False, "client"),
    "interaction_closed": CodeFacts(410, False, "client"),
    "too_large": CodeFacts(413, False, "client"),
    "harness_unknown": CodeFacts(422, False, "client"),
    "harness_missing": CodeFacts(422, False, "client"),
    "recipe_unknown": CodeFacts(422, False, "client"),
    "runner_at_capacity": CodeFacts(429, True, "runner"),
    "queue_full": CodeFacts(429, True, "client"),
    "plane_unavailable": CodeFacts(503, True, "plane"),
    "store_unavailable": CodeFacts(503, True, "store"),
    "provider_at_capacity": CodeFacts(None, True, "provider"),
    "harness_start_failed": CodeFacts(None, False, "agent"),
    "harness_exited": CodeFacts(None, False, "agent"),
    "harness_protocol_error": CodeFacts(None, False, "agent"),
    "harness_auth_required": CodeFacts(None, False, "agent"),
    "harness_unresponsive": CodeFacts(None, False, "agent"),
    "empty_turn": CodeFacts(None, False, "agent"),
    "sandbox_start_failed": CodeFacts(None, False, "provider"),
    "sandbox_lost": CodeFacts(None, False, "provider"),
    "credentials_missing": CodeFacts(None, True, "client"),
    "delivery_unknown": CodeFacts(None, False, "agent"),
    "limit_total": CodeFacts(None, False, "runner"),
    "limit_idle": CodeFacts(None, False, "agent"),
    "limit_first_update": CodeFacts(None, False, "agent"),
    "limit_tool_call": CodeFacts(None, False, "agent"),
    "limit_quiet": CodeFacts(None, False, "agent"),
    "execution_lost": CodeFacts(None, False, "runner"),
    "superseded": CodeFacts(None, False, "plane"),
    "internal": CodeFacts(None, False, "runner"),
}


class RunnerError(Exception):
    """A refusal or failure with a code of DESIGN 4.2.

    Args:
        code: a key of ``CODES``; anything else raises ``KeyError`` at once.
        message: one sentence for the person who reads it; never holds a secret value.
        extra: optional members of the problem document (``retry_after`` seconds, ``current_execution_id``,
            ``recorded_decision``, ``owner``, ``field``).
    """

    def __init__(self, code: str, message: str, **extra: Any) -> None:
        super().__init__(message)
        self.facts = CODES[code]
        self.code = code
        self.message = message
        self.extra = extra

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later without a change."""
        return self.facts.retryable

    @property
    def status(self) -> int:
        """HTTP status when the error is known before the first line; 500 for in-stream codes."""
        return self.facts.status or 500

    def as_event(self) -> dict[str, Any]:
        """The ``{code, message, retryable}`` object of an ``error`` event or a result; stores have no NUL."""
        return {"code": self.code, "message": self.message.replace("\0", "\ufffd"), "retryable": self.retryable}


def turn_in_use() -> RunnerError:
    """The one refusal of a busy session (DESIGN 3.1.3)."""
    return RunnerError("session_turn_in_use", TURN_IN_USE_SENTENCE)


def owned_elsewhere(message: str, owner: str | None = None) -> RunnerError:
    """The retryable refusal of a session that another replica has, naming it where it is known (DESIGN 3.1.10)."""
    return RunnerError("owned_elsewhere", message, owner=owner, retry_after=1)
