"""Turns that no prompt owns: an explicit resume, and a command of the user (PROMPT-ABORT.md, resume and shell)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from runner.errors import RunnerError, turn_in_use
from runner.rules.pool import Key
from runner.rules.prompts import Activity
from runner.session.chain import text_block
from runner.session.handles import present
from runner.session.port import Caller
from runner.session.registry import Registry
from runner.session.run import Start, TurnRun
from runner.session.services import Services
from runner.session.session import Session
from runner.session.shell import ShellRun
from runner.terms import StopReason, TurnPhase
from runner.wire.models import ShellRequest

GO_ON: Final = "Your last turn ended before the task was done. Go on from there; do not repeat what was finished."
"""The one block that a resumed turn sends besides pending context (DESIGN 4)."""


class ResumedRun(TurnRun):
    """A turn that answers no prompt: it lets the agent go on where its last answer broke off."""

    def __init__(self, services: Services, session: Session) -> None:
        super().__init__(services, session, turn_id=services.ids.mint("turn"), prompt=None, effective=session.effective)
        self._turn.keep = True

    def _content(self) -> list[dict[str, Any]] | None:
        self._turn.session.queue.claim()
        return text_block(GO_ON)


class Ownerless:
    """Starts them in the sessions of this replica.

    Args:
        services: of the replica.
        registry: its sessions.
        start: gives a turn its supervisor.
        refusal: why no further turn may start now; None when one may.
    """

    def __init__(
        self, services: Services, registry: Registry, start: Start, refusal: Callable[[], RunnerError | None]
    ) -> None:
        self._services = services
        self._registry = registry
        self._start = start
        self._refusal = refusal

    # -- resume ------------------------------------------------------------------------------------------------------

    async def resume(self, caller: Caller, key: Key) -> str | None:
        """See ``session.port.Sessions.resume``."""
        session = await self._registry.existing(key)
        while (passing := _passing(session)) is not None:
            await _over(passing)
            session = self._registry.again(session)
        queue = session.queue
        if session.taken or queue.rules.tokens or queue.rules.activity is not Activity.IDLE:
            return _joined(session)
        if not session.agent_state.get("unanswered"):
            return None
        self._check(caller, session)
        queue.perform(queue.rules.begin_ownerless())
        run = queue.run = ResumedRun(self._services, session)
        self._start(session, run)
        if not await asyncio.shield(run.admitted):
            raise turn_in_use()
        return run.turn_id

    # -- shell -------------------------------------------------------------------------------------------------------

    async def shell(self, caller: Caller, key: Key, request: ShellRequest) -> dict[str, Any]:
        """See ``session.port.Sessions.shell``; its waiting caller counts as a reader (DESIGN 3.4)."""
        session = await self._registry.open(key)
        try:
            run = self._begin(caller, session, request)
        except RunnerError:
            self._registry.forget(session)
            raise
        with present(session):
            if not await asyncio.shield(run.admitted):
                raise turn_in_use()
            await asyncio.shield(run.ended)
        return run.reply()

    def _begin(self, caller: Caller, session: Session, request: ShellRequest) -> ShellRun:
        if session.taken and self._services.pool.live(session.key) is None:
            text = "The session's sandbox is being started. Try again."
            raise RunnerError("session_starting", text, retry_after=1)
        self._check(caller, session)
        queue = session.queue
        effects = queue.rules.begin_shell() if not session.taken else None
        if effects is None:
            raise turn_in_use()
        queue.perform(effects)
        run = queue.run = ShellRun(self._services, session, request.command, request.timeout_seconds)
        queue.stop_shell = lambda: _stop(run)
        self._start(session, run)
        run.admitted.add_done_callback(lambda admitted: _unless_admitted(session, admitted))
        return run

    def _check(self, caller: Caller, session: Session) -> None:
        refusal = self._refusal()
        if refusal is not None:
            raise refusal
        if self._services.pool.live(session.key) is None:
            self._services.provisioner.check(session.effective, caller)


def _stop(run: ShellRun) -> None:
    run.stop(StopReason.CANCEL)


def _unless_admitted(session: Session, admitted: asyncio.Future[bool]) -> None:
    """A shell that was not admitted was never here; what has queued up behind it is tried for itself."""
    if admitted.cancelled() or admitted.exception() is not None or not admitted.result():
        session.queue.perform(session.queue.rules.shell_ended())


def _passing(session: Session) -> TurnRun | None:
    """What is over soon, and leaves open what a resume comes to: a shell, or a turn that is being torn down."""
    run = session.current or session.queue.run
    if run is None or run.ended.done() or (run.admitted.done() and session.current is not run):
        return None
    passing = run.machine.stopping or run.machine.phase is TurnPhase.ENDED
    return run if passing or session.queue.rules.activity is Activity.SHELL else None


async def _over(run: TurnRun) -> None:
    """Wait until the turn has ended or was not admitted."""
    with suppress(Exception):
        if await asyncio.shield(run.admitted):
            await asyncio.shield(run.ended)


def _joined(session: Session) -> str | None:
    run = session.queue.run
    return session.current_turn_id or (run.turn_id if run is not None else None)
