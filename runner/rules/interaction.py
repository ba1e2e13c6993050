"""An interaction's states, what an answer may do to it, and what every other ending does (DESIGN 3.8)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any, Final, Literal

from runner.errors import RunnerError
from runner.rules.fingerprint import digest
from runner.terms import InteractionStatus as S

EXPIRY_MS: Final = 7 * 24 * 3600 * 1000
CLAIM_MS: Final = 15_000
"""How long an answer may be on its way before nobody is taken to carry it any more (as a command's claim)."""

MOVES: Final[dict[S, frozenset[S]]] = {
    S.PENDING: frozenset({S.ANSWERED, S.CANCELLED, S.EXPIRED}),
    S.ANSWERED: frozenset({S.CONSUMED, S.PENDING, S.CANCELLED, S.EXPIRED}),
    S.CONSUMED: frozenset(),
    S.CANCELLED: frozenset(),
    S.EXPIRED: frozenset(),
}
CLOSED: Final = frozenset(status for status, moves in MOVES.items() if not moves)


class Cause(StrEnum):
    """Why a question is closed although its agent gets no human's answer."""

    STOPPED = "stopped"
    WITHDRAWN = "withdrawn"
    ENDED = "ended"
    OUTDATED = "outdated"
    EXPIRED = "expired"
    LOST = "lost"


LAST: Final[dict[Cause, dict[S, S]]] = {
    Cause.STOPPED: {S.PENDING: S.CANCELLED, S.ANSWERED: S.CANCELLED},
    Cause.WITHDRAWN: {S.PENDING: S.CANCELLED, S.ANSWERED: S.CANCELLED},
    Cause.ENDED: {S.PENDING: S.CANCELLED, S.ANSWERED: S.EXPIRED},
    Cause.OUTDATED: {S.PENDING: S.EXPIRED, S.ANSWERED: S.EXPIRED},
    Cause.EXPIRED: {S.PENDING: S.EXPIRED},
    Cause.LOST: {S.PENDING: S.EXPIRED, S.ANSWERED: S.EXPIRED},
}
"""The last status of an open question by cause; a status that is missing stays: nobody expires a given answer."""

REASONS: Final[dict[Cause, str]] = {
    Cause.STOPPED: "The turn was stopped.",
    Cause.WITHDRAWN: "The question was withdrawn.",
    Cause.ENDED: "The agent went on without this answer.",
    Cause.OUTDATED: "The agent asked again with other arguments.",
    Cause.EXPIRED: "Nobody answered in time.",
    Cause.LOST: "The agent that asked is gone, and its prompt has ended.",
}
UNCLAIMED: Final = "The runner stopped before the agent had this answer."
UNASKED: Final = "The agent was gone before it asked for this answer."

Claim = Literal["claim", "repeat"]
VERDICT: Final = ("decision", "option_id", "action")


def claim(status: S, recorded: Mapping[str, Any] | None, answer: Mapping[str, Any]) -> Claim:
    """Whether an answer may be claimed now, or repeats the recorded one: same verdict, same idempotency key.

    Raises:
        RunnerError: ``interaction_conflict`` naming the recorded decision, or ``interaction_closed``.
    """
    if status is S.PENDING:
        return "claim"
    if status in (S.ANSWERED, S.CONSUMED) and recorded is not None:
        key = answer.get("idempotency_key")
        if key is not None and key == recorded.get("idempotency_key") and _same(answer, recorded):
            return "repeat"
        raise RunnerError(
            "interaction_conflict",
            f"This question was already answered: {verdict(recorded)}.",
            recorded_decision=verdict(recorded),
        )
    raise RunnerError("interaction_closed", f"This question is closed: {status.value}.")


def verdict(answer: Mapping[str, Any]) -> str:
    """The word that stands for an answer: its decision, the chosen option, or the action of an elicitation."""
    return str(next((answer[name] for name in VERDICT if answer.get(name)), None))


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return verdict(one) == verdict(other) and one.get("content") == other.get("content")


def orphaned(answer: Mapping[str, Any] | None, now_ms: int) -> bool:
    """Whether a claimed answer that no turn here carries may be given back: whoever claimed it has had its time."""
    claimed_at = (answer or {}).get("claimed_at")
    return not isinstance(claimed_at, int) or now_ms - claimed_at >= CLAIM_MS


def last_status(status: S, cause: Cause) -> S | None:
    """What a question becomes, None when it stays: the one rule behind "no card left" (case F11).

    Every ending, Stop, withdrawal, expiry and loss closes its questions by this.
    """
    return LAST[cause].get(status)


def open_for(status: S, expires_at: int, now_ms: int) -> bool:
    """Whether a human can still answer it."""
    return status is S.PENDING and now_ms < expires_at


def binding(tool_call: Mapping[str, Any], minted: Collection[str] = ()) -> str:
    """Digest of the exact (tool, canonical arguments) that an approval covers; key order does not matter.

    Args:
        tool_call: under our names. Without raw input the shown content and places are the arguments.
        minted: members of the raw input that the agent makes anew for each call: no arguments of the tool.
    """
    arguments = tool_call.get("raw_input") or [tool_call.get("content"), tool_call.get("locations")]
    if minted and isinstance(arguments, Mapping):
        arguments = {name: value for name, value in arguments.items() if name not in minted}
    return digest([tool_call.get("kind"), tool_call.get("title"), arguments])


def form_binding(request: Mapping[str, Any]) -> str:
    """The same for an elicitation: digest of everything that the human is shown; an id of it is new each time."""
    return digest([request.get(name) for name in ("mode", "message", "schema", "url")])
