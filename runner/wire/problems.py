"""Problem documents: how an error is answered over HTTP (DESIGN 4)."""

from __future__ import annotations

from typing import Any, Final

from runner.errors import CODES, RunnerError
from runner.wire.codec import to_json

CONTENT_TYPE: Final = "application/problem+json"
TITLES: Final[dict[str, str]] = {
    "session_turn_in_use": "Another turn is running",
    "execution_mismatch": "Another execution is current",
    "interaction_conflict": "The question was answered differently",
    "prompt_conflict": "The prompt id is taken by other content",
    "session_starting": "The session is starting",
    "owned_elsewhere": "Another replica owns the session",
    "session_ended": "The session has ended",
    "interaction_closed": "The question is closed",
    "too_large": "The request is too large",
    "harness_unknown": "No harness of this name",
    "harness_missing": "The harness is not installed",
    "recipe_unknown": "No recipe of this name",
    "runner_at_capacity": "No capacity left",
    "queue_full": "The queue is full",
    "plane_unavailable": "The coordination plane is unavailable",
    "store_unavailable": "The store is unavailable",
}


def title(code: str) -> str:
    """A short sentence for a code; the same for every occurrence."""
    return TITLES.get(code) or code.replace("_", " ").capitalize()


def problem(error: RunnerError) -> dict[str, Any]:
    """``{code, title, detail, retryable}`` and the extras of the error that have a value."""
    extras = {name: value for name, value in error.extra.items() if value is not None}
    own = {"code": error.code, "title": title(error.code), "detail": error.message, "retryable": error.retryable}
    return {**extras, **own}


def problem_bytes(error: RunnerError) -> bytes:
    """The document as it is sent."""
    return to_json(problem(error))


def retry_after(error: RunnerError) -> str | None:
    """Whole seconds for a ``Retry-After`` header: the error's own, else 1 for 429 and 503 (DESIGN 3.1.9)."""
    seconds = error.extra.get("retry_after")
    if seconds is None:
        return "1" if error.status in (429, 503) else None
    return str(max(1, -int(-float(seconds) // 1)))


def error_of(document: dict[str, Any]) -> RunnerError:
    """The error that a problem document, or the ``error`` of a result, stands for; an unknown code is ``internal``."""
    code = str(document.get("code"))
    message = str(document.get("detail") or document.get("message") or code)
    own = ("code", "title", "detail", "message", "retryable")
    extra = {name: value for name, value in document.items() if name not in own}
    return RunnerError(code if code in CODES else "internal", message, **extra)
