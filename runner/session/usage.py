"""Where seconds of sandboxes are counted: a turn's while it has one, the session's while one is kept warm.

They are durable with the next write of the session: a turn's ending, or the end of a parked seat. A killed runner loses
what its turns and parked seats had used since.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from runner.errors import RunnerError
from runner.rules.usage import cleaned, with_parked, with_seconds
from runner.session import counting
from runner.session.context import TurnContext
from runner.session.services import Services
from runner.session.session import Session
from runner.turn.live import LiveSeat

log = logging.getLogger("runner.session")


@contextmanager
def start(turn: TurnContext) -> Iterator[Callable[[LiveSeat], None]]:
    """A sandbox is being started for the turn; call what this yields once it lives. A start that fails counts too."""
    clock, begun = turn.services.clock, turn.services.clock.monotonic()
    alive = False

    def started(live: LiveSeat) -> None:
        nonlocal alive
        alive, live.counted_at = True, begun
        live.on_leave = lambda: _count(turn, live)

    try:
        yield started
    finally:
        if not alive:
            turn.meter.sandbox_seconds += clock.monotonic() - begun


def takes(turn: TurnContext, live: LiveSeat) -> None:
    """The turn takes a seat that was kept warm until now."""
    _count_warm(turn.services, turn.session, live)
    live.on_leave = lambda: _count(turn, live)


def adopts(turn: TurnContext, live: LiveSeat) -> None:
    """The turn takes a spare: what that lived before is nobody's."""
    live.counted_at = turn.services.clock.monotonic()
    live.on_leave = lambda: _count(turn, live)


def _count(turn: TurnContext, live: LiveSeat) -> None:
    turn.meter.sandbox_seconds += live.uncounted(turn.services.clock.monotonic())


def _count_warm(services: Services, session: Session, live: LiveSeat) -> None:
    seconds = live.uncounted(services.clock.monotonic())
    session.usage = with_parked(session.usage, seconds)
    counting.warm_seconds(services.metrics, session.project, seconds)


def turn_ends(turn: TurnContext) -> None:
    """What the turn's agent has cost and its sandbox has lived up to now belongs to the turn."""
    if turn.live is not None:
        _count(turn, turn.live)
        turn.remember_spent()


def parks(services: Services, session: Session, live: LiveSeat) -> None:
    """From now on the seat is kept warm for the session's next turn."""

    def left() -> None:
        _count_warm(services, session, live)
        services.tasks.spawn(f"usage of {session.session_id}", _save(services, session))

    live.on_leave = left


async def _save(services: Services, session: Session) -> None:
    try:
        await session.outbox.flush()
        async with session.outbox.writing:
            if session.ended_at is None and not session.taken:
                await services.store.save_session(session.row(session.updated_at))
    except RunnerError as error:
        log.warning("the usage of %s is durable only with its next turn: %s", session.session_id, error)


def usage_now(session: Session, live: LiveSeat | None, now: float) -> dict[str, Any]:
    """The session's usage with the seconds of a sandbox that lives now."""
    if live is None:
        return cleaned(session.usage)
    seconds = max(0.0, now - live.counted_at)
    if session.current is None:
        return with_parked(session.usage, seconds)
    return with_seconds(session.usage, sandbox_seconds=session.current.sandbox_seconds + seconds)
