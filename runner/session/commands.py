"""Cancel and kill: apply at once to whatever the session is doing (DESIGN 3.3, 3.7)."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from runner.errors import RunnerError
from runner.rules.turn import End
from runner.session.port import Reply
from runner.session.run import Start, TurnRun
from runner.session.services import Services
from runner.session.session import Session
from runner.terms import CommandOutcome, Outcome, SessionState, StopReason
from runner.wire.models import CancelRequest

KILL_SECONDS: Final = 10.0
PAUSING_SECONDS: Final = 5.0
KEPT_COMMANDS: Final = 64


def command_outcome(end: End) -> CommandOutcome:
    """What a Stop came to, by the ending of its turn; one that came too late is ``not_running`` (case A15)."""
    if end.outcome is Outcome.LOST:
        return CommandOutcome.LOST
    if end.outcome is Outcome.CANCELLED:
        return CommandOutcome.STOPPED
    if end.error is not None and end.error.code == "superseded":
        return CommandOutcome.SUPERSEDED
    return CommandOutcome.NOT_RUNNING


class Commands:
    """Applies commands. They never wait behind a turn."""

    def __init__(self, services: Services, start: Start) -> None:
        self._services = services
        self._start = start

    async def cancel(self, session: Session, request: CancelRequest) -> Reply:
        """Stop what is current; see ``session.port.Sessions.cancel``."""
        key = request.idempotency_key
        known = session.stops.get(key) if key is not None else None
        if known is None:
            await self._check_expected(session, request.expected_execution_id)
            await self._paused(session)
            known = session.stops.get(key) if key is not None else None
        if known is None:
            known = self._apply(session, StopReason.CANCEL)
            if key is not None:
                session.stops[key] = known
                while len(session.stops) > KEPT_COMMANDS:
                    session.stops.popitem(last=False)
        return await self._reply(session, known, request.wait_seconds)

    async def kill(self, session: Session, reason: StopReason) -> Reply:
        """Cancel everything and destroy the seat; waits, bounded, until that is done."""
        await self._paused(session)
        command = self._apply(session, reason)
        reply = await self._reply(session, command, KILL_SECONDS)
        pool = self._services.pool
        live = pool.live(session.key)
        if live is not None and not session.taken:
            pool.dismiss(live, reason.value)
        await pool.teardowns_of(session.key, KILL_SECONDS)
        return reply

    async def _check_expected(self, session: Session, expected: str | None) -> None:
        if expected is None:
            return
        ids = {run.turn_id for run in session.starting.values()}
        current = session.current_turn_id
        if expected == current or (current is None and expected in ids):
            return
        if current is None:
            row = await self._services.store.turn(session.project, session.session_id, expected)
            if row is not None and session.current_turn_id is None:
                return
            current = session.current_turn_id
        raise RunnerError(
            "execution_mismatch",
            "Another execution is current; nothing was stopped.",
            current_execution_id=current,
        )

    @staticmethod
    async def _paused(session: Session) -> None:
        """A turn that is ending as paused can only be stopped once its chain can be resumed."""
        if session.current is not None and session.current.pausing:
            await asyncio.wait({session.current.ended}, timeout=PAUSING_SECONDS)

    def _apply(self, session: Session, reason: StopReason) -> dict[str, Any]:
        """Mark without waiting; the command as it is remembered."""
        if session.current is not None:
            runs = [session.current]
        elif session.paused is not None:
            runs = [self._resumed(session)]
        else:
            runs = list(session.starting.values())
        stopped = [run for run in runs if run.stop(reason)]
        return {"command_id": self._services.ids.mint("cmd"), "run": stopped[0] if stopped else None}

    def _resumed(self, session: Session) -> TurnRun:
        """The turn that resumes a paused chain in order to end it (DESIGN 3.2), or one that resumes it already."""
        run = session.resuming
        if run is None:
            assert session.paused is not None
            run = TurnRun.resuming(self._services, session, session.paused)
            self._start(session, run)
        return run

    async def _reply(self, session: Session, command: dict[str, Any], wait_seconds: float) -> Reply:
        run: TurnRun | None = command["run"]
        outcome: CommandOutcome | None = None
        if run is None:
            outcome = CommandOutcome.NOT_RUNNING
        elif wait_seconds > 0 or run.ended.done():
            outcome = await self._outcome(run, wait_seconds)
        stopping = run is not None and outcome is None
        body = {
            "command_id": command["command_id"],
            "state": (SessionState.STOPPING if stopping else SessionState.IDLE).value,
            "turn_id": run.turn_id if run is not None else None,
            "cancelled_prompts": [],
            "outcome": outcome.value if outcome is not None else None,
        }
        return Reply(202 if stopping else 200, body)

    @staticmethod
    async def _outcome(run: TurnRun, seconds: float) -> CommandOutcome | None:
        try:
            async with asyncio.timeout(seconds):
                if not await asyncio.shield(run.admitted):
                    return CommandOutcome.NOT_RUNNING
                return command_outcome(await asyncio.shield(run.ended))
        except TimeoutError:
            return command_outcome(run.ended.result()) if run.ended.done() else None
        except RunnerError:
            return CommandOutcome.NOT_RUNNING
