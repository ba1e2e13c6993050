"""What clients see of a session (DESIGN 4.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from runner.clock import rfc3339
from runner.pool.pool import Pool, warm_until
from runner.rules.fork import origin_of
from runner.rules.story import Told, render
from runner.rules.usage import cleaned
from runner.session.session import LastTurn, Session
from runner.session.usage import usage_now
from runner.store.port import CommandRow, InteractionRow, SessionRow, TurnRow
from runner.terms import InteractionStatus, SessionState
from runner.turn.live import LiveSeat

NO_SEAT: Final = {"state": None, "start": None, "reason": None, "warm_until": None}


def live_view(session: Session, pool: Pool[LiveSeat], now: float, now_ms: int) -> dict[str, Any]:
    """The session view of a session in memory."""
    live = pool.live(session.key)
    config = session.effective.config
    return {
        "session_id": session.session_id,
        "state": session.state.value,
        "running_turn": session.current.turn_id if session.current is not None else None,
        "stopping": session.state is SessionState.STOPPING,
        "queue": session.queue.view(),
        "pool": _pool_view(session, pool, live, now, now_ms),
        "harness": config.get("harness", "demo"),
        "sandbox": {"provider": config.get("provider", "local"), "recipe": config.get("recipe", "default")},
        "isolation": live.sandbox.isolation if live is not None else None,
        "limits": dict(live.sandbox.limits) if live is not None else None,
        "proxied_keys": list(live.keys.names) if live is not None else None,
        "last_turn": _last(session.last_turn),
        "open_interactions": [row.interaction_id for row in open_questions(session)],
        "usage": usage_now(session, live, now),
        "created_at": rfc3339(session.created_at),
        "updated_at": rfc3339(session.updated_at),
        **_origin(session.agent_state),
    }


def stored_view(
    row: SessionRow, last_turn: TurnRow | None, asked: Sequence[InteractionRow], pool: Pool[LiveSeat]
) -> dict[str, Any]:
    """The view of a session that only the store knows: nothing of it runs here; ``asked`` are its open questions.

    A turn without an ending runs at another replica, or at one whose death is not noticed yet.
    """
    config = row.config
    idle = SessionState.AWAITING_APPROVAL if asked else SessionState.IDLE
    running = last_turn.turn_id if last_turn is not None and last_turn.outcome is None else None
    state = SessionState.ENDED if row.ended_at is not None else SessionState.RUNNING if running is not None else idle
    return {
        "session_id": row.session_id,
        "state": state.value,
        "running_turn": running,
        "stopping": False,
        "queue": [],
        "pool": pool.asleep_view((row.project, row.session_id)) or dict(NO_SEAT),
        "harness": config.get("harness", "demo"),
        "sandbox": {"provider": config.get("provider", "local"), "recipe": config.get("recipe", "default")},
        "isolation": None,
        "limits": None,
        "proxied_keys": None,
        "last_turn": _last(LastTurn.of(last_turn)),
        "open_interactions": [question.interaction_id for question in asked],
        "usage": cleaned(row.usage),
        "created_at": rfc3339(row.created_at),
        "updated_at": rfc3339(row.updated_at),
        **_origin(row.agent_state),
    }


def _origin(agent_state: Mapping[str, Any]) -> dict[str, Any]:
    """Where a fork's history is from."""
    made = origin_of(agent_state)
    return {"forked_from": {"session_id": made["forked_from"], "after": made["after"]}} if made else {}


def open_questions(session: Session) -> list[InteractionRow]:
    """Questions that wait for a human now."""
    if session.current is not None:
        held = session.current.questions
    else:
        held = list(session.paused.questions.values()) if session.paused is not None else []
    return [row for row in held if row.status == InteractionStatus.PENDING]


def _pool_view(
    session: Session, pool: Pool[LiveSeat], live: LiveSeat | None, now: float, now_ms: int
) -> dict[str, Any]:
    seat = pool.book.seats.get(session.key)
    if seat is None:
        reason = pool.book.verdicts.get(session.key)
        return pool.asleep_view(session.key) or {**NO_SEAT, "reason": reason}
    return {
        "state": seat.state.value,
        "start": seat.start,
        "reason": seat.reason,
        "warm_until": warm_until(seat, now, now_ms),
        "agent_pid": live.sandbox.agent_pid if live is not None else None,
    }


def _last(turn: LastTurn | None) -> dict[str, Any] | None:
    if turn is None:
        return None
    return {
        "turn_id": turn.turn_id,
        "outcome": turn.outcome,
        "stop_reason": turn.stop_reason,
        "ended_at": rfc3339(turn.ended_at),
    }


def story_view(moves: Sequence[Told]) -> dict[str, Any]:
    """Moves for ``GET …/story``, oldest first, with instants."""
    return {"items": [{**render(told), "at": rfc3339(told.at)} for told in moves]}


def command_view(row: CommandRow) -> dict[str, Any]:
    """One command (DESIGN 4): its state, and its outcome once there is one."""
    return {
        "command_id": row.command_id,
        "session_id": row.session_id,
        "kind": row.kind,
        "state": row.state,
        "outcome": row.outcome,
        "turn_id": row.turn_id,
        "arrived_at": rfc3339(row.arrived_at),
        "finished_at": rfc3339(row.finished_at) if row.finished_at is not None else None,
    }
