"""The sessions in memory: loaded once, however many ask at the same time; let go when nothing needs them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from runner.clock import Clock
from runner.config import Settings
from runner.errors import RunnerError
from runner.pool.pool import Pool
from runner.rules.limits import Limits
from runner.rules.pool import Key
from runner.rules.prompts import Activity
from runner.rules.story import Tell, untold
from runner.session import chain
from runner.session.effective import Effective, restored
from runner.session.prompts import Prompt
from runner.session.reconcile import newest, told
from runner.session.session import LastTurn, Session
from runner.store.port import PromptRow, SessionRow, Store, TurnRow
from runner.tasks import Tasks
from runner.terms import EventType, PromptState, StopReason
from runner.turn.live import LiveSeat
from runner.turn.live_file import LiveFile

KEPT: Final = 2000


class Read(NamedTuple):
    """A session as the store has it: its row with the newest head, its newest turn, what that left, and what waits.

    ``busy``: nobody has told yet that it is idle; it may not be.
    """

    row: SessionRow
    last: TurnRow | None
    left: chain.Left
    context: list[PromptRow]
    waiting: list[PromptRow]
    busy: bool


class Registry:
    """Maps (project, session) to its one object in this process.

    ``shared``: other replicas serve the same store: what is remembered counts only while this one holds the session.
    ``live_file``: where what is shown survives a kill of the process.
    ``on_stale``: told of a session whose records the store set aside, for another replica writes it now.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        tasks: Tasks,
        pool: Pool[LiveSeat],
        settings: Settings,
        *,
        shared: bool,
        on_stale: Callable[[Session], None],
        live_file: LiveFile | None = None,
    ) -> None:
        self._on_stale = on_stale
        self.tell: Tell = untold
        """Hears what becomes of questions."""
        self.attach: Callable[[Session], None] = lambda session: None
        """Told of each session that comes into memory."""
        self.live_file = live_file
        if live_file is not None:
            live_file.at_rest = self._at_rest
        self._shared = shared
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
        earlier = self._loading.get(key)
        if earlier is not None and self._shared:
            # It may have read what was before this was asked.
            await asyncio.wait({earlier})
        loading, session = self._loading.get(key), self._sessions.get(key)
        if loading is None and session is not None and (not self._shared or self.holds(key)):
            self._sessions.move_to_end(key)
            return session
        if loading is None:
            loading = self._loading[key] = self._tasks.spawn(f"load {key[1]}", self._load(key))
            loading.add_done_callback(lambda _: self._loading.pop(key, None))
        return await asyncio.shield(loading)

    def holds(self, key: Key) -> bool:
        """Whether this replica has a turn, a paused chain or a warm seat of the session: then nobody else writes it."""
        session = self._sessions.get(key)
        if session is None:
            return False
        paused = session.paused is not None and session.paused.live is not None
        return session.taken or paused or _at_work(session) or self._pool.live(key) is not None

    async def written_here(self, key: Key) -> Session | None:
        """The session, where nobody but this replica writes it now; None also when it has ended.

        Raises:
            RunnerError: ``store_unavailable``.
        """
        if self._shared:
            session = self.known(key) if self.holds(key) else None
        else:
            session = await self.find(key)
        return session if session is not None and session.ended_at is None else None

    def _at_rest(self, key: Key) -> bool:
        """Whether nothing of a session is only here: no turn runs, and nothing waits to be written."""
        session = self._sessions.get(key)
        return session is None or (not session.taken and session.outbox.empty)

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
        known = self._sessions.get(key)
        if known is not None and not known.outbox.empty:
            await known.outbox.flush()
        saved = _saved(known) if known is not None else []
        read = await self._read(key)
        known = self._sessions.get(key)
        if read is None or (known is not None and not self._renewable(known)):
            return known
        session = known if known is not None else self._add(read.row)
        self._take(session, read, saved)
        return session

    async def reload(self, session: Session) -> None:
        """Read a session again that this replica was just granted: another one may have had it since it was read.

        Raises:
            RunnerError: ``store_unavailable``, ``session_ended``.
        """
        saved = _saved(session)
        read = await self._read(session.key)
        if read is not None:
            self._take(session, read, saved)
        if session.ended_at is not None:
            raise RunnerError("session_ended", f"Session {session.session_id} has ended.")

    def _renewable(self, session: Session) -> bool:
        return self._shared and not self.holds(session.key) and session.outbox.empty

    async def _read(self, key: Key) -> Read | None:
        """All that the store says of a session; nobody here sees a part of it. None when there is no such session."""
        row = await self._store.session(*key)
        if row is None:
            return None
        (head_epoch, head_n), idle = await newest(self._store, row)
        # Behind the head: a turn that is admitted meanwhile is newer than that, and its admission reads all again.
        last = await self._store.last_turn(*key)
        left = await chain.read(self._store, key, last)
        context = await self._store.context_prompts(key)
        waiting = await self._store.waiting_prompts(key)
        ended = last is not None and last.outcome is not None
        busy = ended and not idle and (await told(self._store, key)).busy
        return Read(replace(row, head_epoch=head_epoch, head_n=head_n), last, left, context, waiting, busy)

    def _take(self, session: Session, read: Read, saved: Sequence[Prompt]) -> None:
        """Become what was read, in one step. The same cold chain stays the same object; one with a seat stays.

        ``saved``: what waited here before it was read.
        """
        waiting = {row.prompt_id for row in read.waiting}
        for prompt in saved:
            if prompt.prompt_id in session.queue.rules.queue and prompt.prompt_id not in waiting:
                session.queue.left(prompt)
        last = LastTurn.of(read.last)
        session.refresh(read.row, restored(read.row.config, self.vault, self.limits), last)
        session.last_turn = last
        session.unfinished = read.last if read.last is not None and read.last.outcome is None else None
        known = session.paused
        if known is not None and known.live is not None:
            if read.last is None or read.last.turn_id == known.turn_id:
                return
            # The chain went on elsewhere, without this agent: it is never ended a second time.
            live, known.live = known.live, None
            self._pool.dismiss(live, StopReason.LEASE_LOST.value)
        found, session.stale = chain.taken(session, read.left)
        if found is not None and known is not None and known.turn_id == found.turn_id:
            known.questions, known.tools = found.questions, found.tools
        else:
            session.paused = found
        session.busy = session.paused is not None or read.busy
        if session.paused is not None:
            session.queue.adopt_chain(session.paused.prompt)
        elif session.queue.rules.paused:
            session.queue.chain_left()
        elif session.busy and not read.waiting and not self._shared:
            session.busy = False
            session.journal(None, None).event(EventType.SESSION_IDLE, {})
        session.queue.context = read.context
        session.queue.restore(self._prompt_of(row) for row in read.waiting)

    def _prompt_of(self, row: PromptRow) -> Prompt:
        def merge(last: Effective) -> Effective:
            return restored(row.options.get("config", last.config), self.vault, self.limits)

        prompt = Prompt(
            prompt_id=row.prompt_id,
            digest=row.digest,
            content=row.content,
            created_at=row.created_at,
            position=-1,
            result=asyncio.get_running_loop().create_future(),
            keep=bool(row.options.get("keep")),
            state=PromptState.QUEUED,
            seq=row.seq,
            options=row.options,
            merge=merge,
            stored=True,
        )
        prompt.ready.set()
        return prompt

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
            ring_seconds=self._settings.server.ring_seconds,
            kept=self.live_file.pen(row.project, row.session_id) if self.live_file is not None else None,
        )
        session.learn_secrets(effective.secrets.values())
        session.tell = self.tell
        session.outbox.on_stale = lambda: self._on_stale(session)
        self._sessions[session.key] = session
        self.attach(session)
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


def _saved(session: Session) -> list[Prompt]:
    """Prompts that wait here and in the store."""
    queue = session.queue
    return [queue.prompts[name] for name in queue.rules.queue if queue.prompts[name].stored]


def _at_work(session: Session) -> bool:
    """Whether this replica does something for its prompts; what it has only read of the store holds nothing."""
    queue = session.queue
    here = [name for name, prompt in queue.prompts.items() if name != queue.rules.chain and not prompt.restored]
    return bool(here) or queue.rules.activity is not Activity.IDLE
