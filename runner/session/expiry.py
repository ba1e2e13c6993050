"""Questions that nobody answered within seven days, and those that no chain waits for any more (DESIGN 3.8)."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from runner.errors import RunnerError
from runner.interactions import desk
from runner.rules.interaction import UNCLAIMED, Cause, open_for, orphaned
from runner.session.paused import PausedChains
from runner.session.registry import Registry
from runner.session.services import Services
from runner.store.port import InteractionRow
from runner.terms import InteractionStatus

log = logging.getLogger("runner.session")
LOOK_SECONDS: Final = 60.0


class Expiry:
    """Closes what is due: each replica what it holds, and the sweep what waits in the store."""

    def __init__(self, services: Services, registry: Registry, chains: PausedChains) -> None:
        self._services = services
        self._registry = registry
        self._chains = chains

    async def run(self) -> None:
        """Look at what this replica holds once a minute, for ever; a failing round does not end it."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                self.held(self._services.clock.now_ms())
            except Exception:
                log.exception("a look for questions that are due failed")

    def held(self, now_ms: int) -> None:
        """Refuse what is due to the agents of this replica, running or paused."""
        for session in self._registry.all():
            live = session.paused is not None and session.paused.live is not None
            if live or session.current is not None:
                self._chains.expire(session, now_ms)

    async def expire_due(self) -> int:
        """Close what is due in sessions that nobody holds, and give back answers that nobody carries any more.

        A job of the sweep.

        Returns:
            How many questions it looked at.

        Raises:
            RunnerError: ``store_unavailable``.
        """
        now_ms = self._services.clock.now_ms()
        due = [
            row
            for row in await self._services.store.open_interactions(InteractionStatus.PENDING)
            if not open_for(InteractionStatus(row.status), row.expires_at, now_ms)
        ]
        for row in due:
            try:
                await self._expire(row, now_ms)
            except RunnerError as error:
                log.warning("interaction %s is due and stays: %s", row.interaction_id, error.message)
        claimed = [
            row
            for row in await self._services.store.open_interactions(InteractionStatus.ANSWERED)
            if orphaned(row.answer, now_ms)
        ]
        for row in claimed:
            await self._give_back(row)
        return len(due) + len(claimed)

    async def _give_back(self, row: InteractionRow) -> None:
        """Its claimer died before a turn carried it (case F2); one that holds the session may still hand it over."""
        key = (row.project, row.session_id)
        session = self._registry.known(key)
        if session is not None and self._registry.holds(key) and self._chains.carried(session, row.interaction_id):
            return
        if await self._services.owners.elsewhere(*key) is not None:
            return
        back = desk.unclaimed(row, UNCLAIMED)
        if await self._services.store.answer_interaction(back, InteractionStatus.ANSWERED):
            session = self._registry.known(key)
            if session is not None:
                self._chains.remember(session, back)

    async def _expire(self, row: InteractionRow, now_ms: int) -> None:
        key = (row.project, row.session_id)
        if await self._services.owners.elsewhere(*key) is not None:
            return
        session = await self._registry.find(key)
        if session is not None and session.ended_at is None and session.asks(row.interaction_id):
            self._chains.expire(session, now_ms)
            return
        closed = desk.close(row, Cause.EXPIRED)
        if closed is not None and (session is None or not session.taken):
            await self._services.store.answer_interaction(closed, InteractionStatus.PENDING)
