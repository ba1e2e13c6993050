"""The sessions in memory: loaded once, however many ask at the same time; let go when nothing needs them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from runner.clock import Clock
from runner.config import Settings
from runner.errors import RunnerError
from runner.pool.pool import Pool
from runner.rules.limits import Limits
from runner.rules.pool import Key
from runner.session.effective import restored
from runner.session.reconcile import newest_cursor
from runner.session.session import LastTurn, Session
from runner.store.port import SessionRow, Store
from runner.tasks import Tasks
from runner.turn.live import LiveSeat

KEPT: Final = 2000


class Registry:
    """Maps (project, session) to its one object in this process."""

    def __init__(self, store: Store, clock: Clock, tasks: Tasks, pool: Pool[LiveSeat], settings: Settings) -> None:
        self._store = store
        self._clock = clock
        self._tasks = tasks
        self._pool = pool
        self._settings = settings
        self._sessions: OrderedDict[Key, Session] = OrderedDict()
        self._loading: dict[Key, asyncio.Task[Session | None]] = {}
        self.vault: Mapping[str, str] = {name: value.get_secret_value() for name, value in settings.secrets.items()}
        turn = settings.turn
        self.limits = Limits(
            turn.total_seconds,
            turn.idle_seconds,
            turn.first_update_seconds,
            turn.tool_call_seconds,
            turn.quiet_seconds,
        )

    def all(self) -> list[Session]:
        """Every session in memory."""
        return list(self._sessions.values())

    def known(self, key: Key) -> Session | None:
        """The session if it is in memory."""
        return self._sessions.get(key)

    async def find(self, key: Key) -> Session | None:
        """The session from memory or the store; None when there never was one.

        Raises:
            RunnerError: ``store_unavailable``.
        """
        session = self._sessions.get(key)
        if session is not None:
            self._sessions.move_to_end(key)
            return session
        loading = self._loading.get(key)
        if loading is None:
            loading = self._loading[key] = self._tasks.spawn(f"load {key[1]}", self._load(key))
            loading.add_done_callback(lambda _: self._loading.pop(key, None))
        return await asyncio.shield(loading)

    async def existing(self, key: Key) -> Session:
        """As ``find``, with ``not_found`` and ``session_ended`` as errors."""
        session = await self.find(key)
        if session is None or not session.exists:
            raise RunnerError("not_found", f"There is no session {key[1]}.")
        if session.ended_at is not None:
            raise RunnerError("session_ended", f"Session {key[1]} has ended.")
        return session

    async def open(self, key: Key) -> Session:
        """The session, made in memory when it is new; nothing is stored before its first turn is admitted.

        Raises:
            RunnerError: ``session_ended``.
        """
        session = await self.find(key)
        if session is None:
            session = self._sessions.get(key)
        if session is None:
            now = self._clock.now_ms()
            session = self._add(SessionRow(*key, created_at=now, updated_at=now))
        if session.ended_at is not None:
            raise RunnerError("session_ended", f"Session {key[1]} has ended.")
        return session

    def again(self, session: Session) -> Session:
        """The session behind an await: it may have left memory, or have ended.

        Raises:
            RunnerError: ``session_ended``.
        """
        session = self._sessions.setdefault(session.key, session)
        if session.ended_at is not None:
            raise RunnerError("session_ended", f"Session {session.session_id} has ended.")
        return session

    async def _load(self, key: Key) -> Session | None:
        row = await self._store.session(*key)
        if row is None:
            return None
        last = await self._store.last_turn(*key)
        head_epoch, head_n = await newest_cursor(self._store, row)
        known = self._sessions.get(key)
        if known is not None:
            return known
        session = self._add(replace(row, head_epoch=head_epoch, head_n=head_n))
        session.last_turn = LastTurn.of(last)
        return session

    def _add(self, row: SessionRow) -> Session:
        self._let_go()
        effective = restored(row.config, self.vault, self.limits)
        session = Session(
            row,
            effective,
            store=self._store,
            clock=self._clock,
            tasks=self._tasks,
            ring_bytes=self._settings.server.ring_bytes,
            buffer_bytes=self._settings.server.reader_buffer_bytes,
        )
        session.learn_secrets(effective.secrets.values())
        self._sessions[session.key] = session
        return session

    def _let_go(self) -> None:
        if len(self._sessions) < KEPT:
            return
        for key, session in list(self._sessions.items()):
            if len(self._sessions) < KEPT:
                return
            if session.disposable and self._pool.live(key) is None:
                del self._sessions[key]

    def forget(self, session: Session) -> None:
        """Drop a session that never became durable."""
        if not session.exists and session.disposable and self._sessions.get(session.key) is session:
            del self._sessions[session.key]
