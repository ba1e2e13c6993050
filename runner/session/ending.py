"""The result object of a turn (DESIGN 4.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runner.errors import RunnerError
from runner.rules.turn import End
from runner.terms import Outcome

if TYPE_CHECKING:
    from runner.session.context import TurnContext


@dataclass(slots=True)
class Times:
    """Loop times of a turn's milestones."""

    begun: float
    admitted: float | None = None
    ready: float | None = None
    first_update: float | None = None

    def timings(self, now: float) -> dict[str, float | None]:
        """Milliseconds since the dispatch; None for what never happened."""
        return {
            "admitted_ms": self._ms(self.admitted),
            "ready_ms": self._ms(self.ready),
            "first_update_ms": self._ms(self.first_update),
            "total_ms": self._ms(now),
        }

    def _ms(self, at: float | None) -> float | None:
        return None if at is None else round((at - self.begun) * 1000, 3)


def result_of(turn: TurnContext, end: End, now: float) -> dict[str, Any]:
    """The result of an admitted turn."""
    result: dict[str, Any] = {
        "ok": end.outcome in (Outcome.COMPLETED, Outcome.PAUSED),
        "session_id": turn.session.session_id,
        "turn_id": turn.turn_id,
        "prompt_ids": _prompt_ids(turn),
        "outcome": end.outcome.value,
        "stop_reason": end.stop_reason,
    }
    if end.outcome is Outcome.CANCELLED and end.settled is not None:
        result["cancel_settled"] = end.settled
    if end.late_completion:
        result["late_completion"] = True
    if turn.context_lost:
        result["context_lost"] = True
    if end.error is not None:
        result["error"] = turn.session.redactor.tree(end.error.as_event())
    result |= {
        "text": turn.journal.text,
        "usage": turn.meter.usage(now - turn.times.begun),
        "start": turn.start,
        "reason": turn.reason,
        "timings": turn.times.timings(now),
    }
    return result


def _prompt_ids(turn: TurnContext) -> list[str]:
    """What was claimed; of a turn that came to no claim, its owner-to-be."""
    if turn.claimed:
        return [prompt.prompt_id for prompt in turn.claimed]
    return [turn.prompt.prompt_id] if turn.prompt is not None else []


def result_outside_of_turns(
    session_id: str,
    prompt_id: str,
    outcome: Outcome,
    *,
    turn_id: str | None = None,
    absorbed_by: str | None = None,
    error: RunnerError | None = None,
) -> dict[str, Any]:
    """The result of a prompt that owned no turn: absorbed by a newer one, cancelled in the queue, or failed there."""
    timings = {"admitted_ms": None, "ready_ms": None, "first_update_ms": None, "total_ms": None}
    result: dict[str, Any] = {
        "ok": outcome is Outcome.ABSORBED,
        "session_id": session_id,
        "turn_id": turn_id,
        "prompt_ids": [prompt_id],
        "outcome": outcome.value,
        "stop_reason": "cancelled" if outcome is Outcome.CANCELLED else None,
    }
    if absorbed_by is not None:
        result["absorbed_by"] = absorbed_by
    if error is not None:
        result["error"] = error.as_event()
    return result | {"text": "", "usage": {}, "start": None, "reason": None, "timings": timings}


def refused_result(session_id: str, prompt_id: str, error: dict[str, Any]) -> dict[str, Any]:
    """The failed result of a refused dispatch: no turn, nothing persisted (DESIGN 3.1.3, 4.2)."""
    timings = {"admitted_ms": None, "ready_ms": None, "first_update_ms": None, "total_ms": None}
    return result_without_agent(session_id, None, [prompt_id], Outcome.FAILED, error, timings)


def result_without_agent(
    session_id: str,
    turn_id: str | None,
    prompt_ids: list[str],
    outcome: Outcome,
    error: dict[str, Any],
    timings: Mapping[str, float | None],
) -> dict[str, Any]:
    """A result that tells an error, and nothing of what an agent did: there was none, or nobody knows."""
    return {
        "ok": False,
        "session_id": session_id,
        "turn_id": turn_id,
        "prompt_ids": prompt_ids,
        "outcome": outcome.value,
        "stop_reason": None,
        "error": error,
        "text": "",
        "usage": {},
        "start": None,
        "reason": None,
        "timings": timings,
    }
