"""An interaction's states and what an answer may do to it (DESIGN 3.8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from runner.errors import RunnerError
from runner.terms import InteractionStatus as S

EXPIRY_MS: Final = 7 * 24 * 3600 * 1000

MOVES: Final[dict[S, frozenset[S]]] = {
    S.PENDING: frozenset({S.ANSWERED, S.CANCELLED, S.EXPIRED}),
    S.ANSWERED: frozenset({S.CONSUMED, S.PENDING, S.CANCELLED}),
    S.CONSUMED: frozenset(),
    S.CANCELLED: frozenset(),
    S.EXPIRED: frozenset(),
}
CLOSED: Final = frozenset(status for status, moves in MOVES.items() if not moves)

Claim = Literal["claim", "repeat"]


def claim(status: S, recorded: Mapping[str, Any] | None, answer: Mapping[str, Any]) -> Claim:
    """Whether an answer may be claimed now, or repeats the recorded one: same verdict, same idempotency key.

    Raises:
        RunnerError: ``interaction_conflict`` naming the recorded decision, or ``interaction_closed``.
    """
    if status is S.PENDING:
        return "claim"
    if status in (S.ANSWERED, S.CONSUMED) and recorded is not None:
        key = answer.get("idempotency_key")
        if key is not None and key == recorded.get("idempotency_key") and verdict(answer) == verdict(recorded):
            return "repeat"
        raise RunnerError(
            "interaction_conflict",
            f"This question was already answered: {verdict(recorded)}.",
            recorded_decision=verdict(recorded),
        )
    raise RunnerError("interaction_closed", f"This question is closed: {status.value}.")


def verdict(answer: Mapping[str, Any]) -> str:
    """The word that stands for an answer: its decision, else the chosen option."""
    return str(answer.get("decision") or answer.get("option_id"))
