"""Endings that no record tells of: a turn is over, but its ``done`` was refused or lost on its way (DESIGN 3.9)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from runner.clock import Clock
from runner.errors import RunnerError
from runner.ids import record_id
from runner.rules.pool import Key
from runner.session.owners import Owners
from runner.session.session import Session
from runner.store.port import EndedTurn, RecordRow, Store, TurnRow
from runner.terms import EventType
from runner.wire.codec import to_json

log = logging.getLogger("runner.session")
PAGE: Final = 500
PAGES: Final = 20
"""How many turns one round looks at is bounded; the next one goes on behind them."""
GRACE_MS: Final = 30_000
"""A turn that ended just now may have its record on the way still."""
KEPT: Final = 1_000


class MissingEndings:
    """Looks through the turns that ended, once each, and writes the records that are missing.

    Args:
        store: shared with the other replicas.
        clock: for instants.
        owners: keeps everybody from a session that nobody holds, while it is written.
        session: the session where this replica writes it itself; None: nobody does, or another replica.
    """

    def __init__(
        self, store: Store, clock: Clock, owners: Owners, session: Callable[[Key], Awaitable[Session | None]]
    ) -> None:
        self._store = store
        self._clock = clock
        self._owners = owners
        self._session = session
        self._seen: tuple[int, str, str] = (0, "", "")
        self._lacking: dict[tuple[str, str], EndedTurn] = {}

    async def sweep(self) -> None:
        """One round. Turns whose session somebody else has, or cannot be written now, are tried again in the next one.

        Raises:
            RunnerError: ``store_unavailable``, ``plane_unavailable``.
        """
        await self._look()
        for name, ended in list(self._lacking.items()):
            try:
                done = await self._tell(ended)
            except RunnerError as error:
                if error.code == "plane_unavailable":
                    raise
                log.warning("the ending of turn %s is not written: %s", ended.turn_id, error.message)
                done = error.code != "store_unavailable"
            if done:
                del self._lacking[name]

    async def _look(self) -> None:
        for _ in range(PAGES):
            room = KEPT - len(self._lacking)
            found = await self._store.ended_turns(None, self._seen, min(PAGE, room)) if room > 0 else []
            settled = [turn for turn in found if turn.ended_at <= self._clock.now_ms() - GRACE_MS]
            self._lacking.update({(turn.project, turn.turn_id): turn for turn in settled if not turn.told})
            if settled:
                self._seen = settled[-1][:3]
            if len(settled) < PAGE:
                return

    async def _tell(self, ended: EndedTurn) -> bool:
        """Whether there is nothing left to do for a turn."""
        key = (ended.project, ended.session_id)
        await self._store.caught_up(*key)
        turn = await self._store.turn(*key, ended.turn_id)
        if turn is None or turn.outcome is None:
            return True
        session = await self._session(key)
        if session is not None:
            return await self._write_here(session, turn)
        row = await self._store.session(*key)
        if row is None or row.ended_at is not None:
            return True
        await self._owners.let_go(turn)
        async with self._owners.alone(key, max(row.head_epoch, turn.epoch), turn.turn_id) as epoch:
            if epoch is None:
                return False
            self._said(turn, await self._store.add_ending(self._record(turn, epoch)))
        return True

    async def _write_here(self, session: Session, turn: TurnRow) -> bool:
        def make() -> RecordRow:
            written: list[RecordRow] = []
            journal = session.journal(turn.turn_id, turn.prompt_id, written.append)
            if turn.epoch > session.log_since[0]:
                # It ran here: live readers had its ending, and get no second one.
                journal.hold()
            journal.event(EventType.DONE, _done(turn))
            return written[0]._replace(record_id=_name(turn))

        self._said(turn, await session.outbox.add_ending(make))
        return True

    def _record(self, turn: TurnRow, epoch: int) -> RecordRow:
        data, at = to_json(_done(turn)), self._clock.now_ms()
        of = (turn.project, turn.session_id, _name(turn), turn.turn_id, turn.prompt_id)
        return RecordRow(*of, epoch, 1, EventType.DONE, data, at)

    @staticmethod
    def _said(turn: TurnRow, written: bool) -> None:
        if written:
            log.error("turn %s of session %s had no ending in its records: written", turn.turn_id, turn.session_id)


def _name(turn: TurnRow) -> str:
    """Its record's id: the same whoever writes it; a turn's own records count from 1."""
    return record_id(turn.session_id, turn.turn_id, 0)


def _done(turn: TurnRow) -> dict[str, Any]:
    done: dict[str, Any] = {"turn_id": turn.turn_id, "outcome": turn.outcome}
    if turn.stop_reason in ("cancelled", "paused"):
        done["stop_reason"] = turn.stop_reason
    return done
