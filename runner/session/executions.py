"""A session's executions as the rule of commands sees them (DESIGN 2, 3.7)."""

from __future__ import annotations

from runner.rules import command as rules
from runner.session.session import Session
from runner.terms import CommandKind


def _current(session: Session) -> rules.Execution | None:
    if session.current is not None:
        return rules.Execution(session.current.turn_id, session.current.begun)
    if session.paused is not None:
        return rules.Execution(session.paused.turn_id, session.paused.begun)
    return None


def _starting(session: Session) -> list[rules.Execution]:
    runs = [run for run in session.starting.values() if run is not session.current]
    return [rules.Execution(run.turn_id, run.begun) for run in runs]


def there(session: Session) -> list[rules.Execution]:
    """The current execution, and those that are on their way."""
    return [*filter(None, [_current(session)]), *_starting(session)]


def target(
    session: Session, kind: CommandKind, expected: str | None, arrived_at: float, *, ended: bool = False
) -> rules.Target:
    """Whom a command means now; see ``rules.command.target``."""
    return rules.target(kind, expected, _current(session), _starting(session), arrived_at, ended=ended)
