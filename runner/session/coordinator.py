"""The sessions of one replica: admits prompts, applies commands, answers questions (DESIGN 3.1, 3.6, 3.7, 3.8)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from runner.errors import RunnerError, owned_elsewhere
from runner.ids import valid_id
from runner.leases.port import BeatAnswer, Heartbeat, Note
from runner.rules.pool import Key
from runner.session import lists, views
from runner.session.commands import Commands
from runner.session.deletion import delete_session
from runner.session.dispatching import Dispatching
from runner.session.expiry import Expiry
from runner.session.export import Export
from runner.session.feed import Feeds
from runner.session.files import SessionFiles
from runner.session.fork import fork
from runner.session.history import HistoryReader, cursor_of, record_view
from runner.session.outlets import WATCH, Outlets
from runner.session.ownerless import Ownerless
from runner.session.paused import PausedChains
from runner.session.port import Caller, PromptHandle, Reader, Reply
from runner.session.registry import Registry
from runner.session.run import TurnRun
from runner.session.services import Services
from runner.session.session import Session
from runner.terms import StopReason
from runner.turn.live import LiveSeat
from runner.wire.models import AnswerRequest, CancelRequest, DispatchRequest, ForkRequest, ShellRequest

log = logging.getLogger("runner.session")
ABORT_SECONDS: Final = 0.5
REVIVE: Final = "revive"
"""Kind of the note that sends a runner to look for a session's queued prompts."""
LAPSED: Final = "The lease ran out: another runner may have the session now."
RESTARTING: Final = "The runner is restarting; this turn was stopped."


class Coordinator:
    """Implements ``session.port.Sessions`` for the sessions this replica owns."""

    def __init__(self, services: Services, registry: Registry, facts: Callable[[], Mapping[str, Any]]) -> None:
        self._services = services
        self._registry = registry
        self._facts = facts
        self._chains = PausedChains(services, self._start)
        self.commands = Commands(services, registry, self._start)
        self.files = SessionFiles(services, registry)
        self.expiry = Expiry(services, registry, self._chains)
        self._runs: dict[str, tuple[TurnRun, asyncio.Task[None]]] = {}
        self._dispatching = Dispatching(services, registry, self._start, self._refusal, self._runs.__contains__)
        self._ownerless = Ownerless(services, registry, self._start, self._refusal)
        server = services.settings.server
        self._feeds = Feeds(
            services.store, services.clock, services.tasks, server.ring_bytes, server.reader_buffer_bytes
        )
        registry.attach = self._attach
        self.draining = False
        self.outlets: Outlets | None = None
        """Shows sessions at other replicas, where a live bus is there."""

    # -- turns -------------------------------------------------------------------------------------------------------

    def has_capacity(self) -> bool:
        """Whether another turn may be dispatched."""
        return not self.draining and self.running < self.max_turns

    @property
    def running(self) -> int:
        """How many turns run, or are being admitted."""
        return len(self._runs)

    @property
    def max_turns(self) -> int:
        """How many may."""
        return self._services.settings.server.max_turns

    def _start(self, session: Session, run: TurnRun) -> None:
        """Give a turn its own supervisor task; it belongs to no request."""
        key = run.prompt.prompt_id if run.prompt is not None else run.turn_id
        session.starting[key] = run
        run.admitted.add_done_callback(lambda _: session.starting.pop(key, None))
        task = self._services.tasks.spawn(f"turn {run.turn_id}", run.run())
        self._runs[run.turn_id] = (run, task)
        task.add_done_callback(lambda _: self._turn_over(session, run))

    def _turn_over(self, session: Session, run: TurnRun) -> None:
        self._runs.pop(run.turn_id, None)
        if not run.admitted.done():
            run.admitted.set_exception(RunnerError("internal", "The runner stopped before the turn was admitted."))
            run.admitted.exception()
        if not session.taken and not self._seat_unleased(session):
            self._chains.watch(session)
        self._registry.forget(session)

    def _seat_unleased(self, session: Session) -> bool:
        """Whether the lease of a parked seat was lost while a turn was on its way to it: the seat goes, too."""
        live, services = self._services.pool.live(session.key), self._services
        if live is None or not services.owners.shared or services.beats.granted(*session.key) is not None:
            return False
        self._give_seat_up(session, live)
        return True

    async def dispatch(
        self, caller: Caller, session_id: str, request: DispatchRequest, *, keep_on_disconnect: bool = False
    ) -> PromptHandle:
        """See ``session.port.Sessions.dispatch``."""
        return await self._dispatching.dispatch(caller, self._key(caller, session_id), request, keep_on_disconnect)

    def _attach(self, session: Session) -> None:
        """What the session's queue asks for, and where it tells what goes into its project's feed."""
        session.stir = partial(self._feeds.stir, session.project)
        session.queue.goes_on = lambda: not self.draining
        session.queue.start = partial(self._dispatching.start, session)
        session.queue.stop_chain = partial(self.commands.stop_chain, session)

    async def revive(self) -> None:
        """See that prompts are started that are queued in the store and that nobody runs: an earlier replica had them.

        A plane has no seats: it tells a runner.
        """
        for key in {(row.project, row.session_id) for row in await self._services.store.waiting_prompts()}:
            known = self._registry.known(key)
            if known is not None and not known.queue.at_rest and self._has_seats:
                known.queue.wake()
            elif await self._services.owners.elsewhere(*key) is None and not self.draining:
                await (self._start_queued(key) if self._has_seats else self._tell_a_runner(key))

    @property
    def _has_seats(self) -> bool:
        return bool(self._services.provisioner.providers)

    async def _start_queued(self, key: Key) -> None:
        session = await self._registry.find(key)
        if session is not None and session.ended_at is None and not self.draining:
            session.queue.wake()

    async def _tell_a_runner(self, key: Key) -> None:
        owners, note = self._services.owners, {"kind": REVIVE, "project": key[0], "session_id": key[1]}
        for runner in await owners.others():
            if await owners.push(runner.replica_id, note):
                return

    async def abort_prompt(self, caller: Caller, session_id: str, prompt_id: str) -> bool:
        """See ``session.port.Sessions.abort_prompt``."""
        session = await self._registry.existing(self._key(caller, session_id))
        prompt = session.queue.prompts.get(prompt_id)
        if not session.queue.abort(prompt_id):
            return False
        # What was answered to its client must hold behind a crash too: a cancelled prompt is never sent.
        await session.outbox.written(ABORT_SECONDS)
        return prompt is None or not await prompt.was_known(ABORT_SECONDS)

    async def prompts(self, caller: Caller, session_id: str) -> dict[str, Any]:
        """See ``session.port.Sessions.prompts``."""
        session = await self._registry.existing(self._key(caller, session_id))
        return {"items": session.queue.view(), "next_cursor": None, "active": session.queue.active}

    async def resume(self, caller: Caller, session_id: str) -> str | None:
        """See ``session.port.Sessions.resume``."""
        return await self._ownerless.resume(caller, self._key(caller, session_id))

    async def shell(self, caller: Caller, session_id: str, request: ShellRequest) -> dict[str, Any]:
        """See ``session.port.Sessions.shell``."""
        return await self._ownerless.shell(caller, self._key(caller, session_id), request)

    def _refusal(self) -> RunnerError | None:
        return None if self.has_capacity() else self.at_capacity()

    def at_capacity(self) -> RunnerError:
        """The refusal of a replica that has no room for another turn."""
        text = "The runner is shutting down." if self.draining else "The runner has as many turns as it may."
        return RunnerError("runner_at_capacity", f"{text} Try again.", retry_after=1)

    # -- commands ----------------------------------------------------------------------------------------------------

    async def cancel(
        self, caller: Caller, session_id: str, request: CancelRequest, *, arrived_at: float | None = None
    ) -> Reply:
        """See ``session.port.Sessions.cancel``."""
        at = self._services.clock.monotonic() if arrived_at is None else arrived_at
        return await self.commands.cancel(self._key(caller, session_id), request, at)

    async def kill(self, caller: Caller, session_id: str) -> Reply:
        """See ``session.port.Sessions.kill``."""
        return await self.commands.kill(self._key(caller, session_id))

    async def command(self, caller: Caller, command_id: str) -> dict[str, Any]:
        """See ``session.port.Sessions.command``."""
        return await self.commands.view(caller.project, command_id)

    async def delete(self, caller: Caller, session_id: str) -> Reply:
        """See ``session.port.Sessions.delete``."""
        key = self._key(caller, session_id)
        session = self._registry.known(key)
        if session is None or not session.remains:
            session = await self._registry.existing(key)
        work = delete_session(self._services, self.commands, session)
        reply = await asyncio.shield(self._services.tasks.spawn(f"delete {session_id}", work))
        session.stir()
        return reply

    async def answer(self, caller: Caller, session_id: str, interaction_id: str, request: AnswerRequest) -> Reply:
        """See ``session.port.Sessions.answer``."""
        session = await self._registry.existing(self._key(caller, session_id))
        return await self._chains.answer(session, interaction_id, request)

    # -- reads -------------------------------------------------------------------------------------------------------

    async def view(self, caller: Caller, session_id: str) -> dict[str, Any]:
        """See ``session.port.Sessions.view``."""
        session = await self._registry.existing(self._key(caller, session_id))
        clock = self._services.clock
        return views.live_view(session, self._services.pool, clock.monotonic(), clock.now_ms())

    async def sessions(self, caller: Caller, limit: int, cursor: str | None) -> dict[str, Any]:
        """See ``session.port.Sessions.sessions``."""
        return await lists.sessions(self._services, self._registry, caller.project, limit, cursor)

    async def records(self, caller: Caller, session_id: str, after: str | None, limit: int) -> dict[str, Any]:
        """See ``session.port.Sessions.records``."""
        session = await self._registry.existing(self._key(caller, session_id))
        cursor = cursor_of(after)
        await session.settle()
        rows = await self._services.store.records(session.project, session.session_id, cursor, limit + 1)
        items = [record_view(row) for row in rows[:limit]]
        return {"items": items, "next_cursor": items[-1]["cursor"] if len(rows) > limit else None}

    async def export(self, caller: Caller, session_id: str) -> Reader:
        """See ``session.port.Sessions.export``."""
        session = await self._registry.existing(self._key(caller, session_id))
        clock = self._services.clock
        view = views.live_view(session, self._services.pool, clock.monotonic(), clock.now_ms())
        export = Export(self._services, session, view)
        await export.begin()
        return export

    async def fork(self, caller: Caller, session_id: str, request: ForkRequest) -> Reply:
        """See ``session.port.Sessions.fork``."""
        return await fork(self._services, await self._registry.existing(self._key(caller, session_id)), request)

    async def follow(self, caller: Caller, session_id: str, after: str | None, follow: bool) -> Reader:
        """See ``session.port.Sessions.follow``."""
        session, cursor = await self._registry.existing(self._key(caller, session_id)), cursor_of(after)
        if self._services.owners.shared and cursor is not None and cursor[0] > session.head.epoch:
            # A turn on its way here may have been dispatched before another replica's turns: it has not read them yet.
            row = await self._services.store.session(*session.key)
            if row is not None and row.head_epoch >= cursor[0]:
                raise owned_elsewhere("Another replica has just had this session. Try again.")
        return HistoryReader(self._services.store, session, cursor, follow)

    async def feed(self, caller: Caller, after: str | None, follow: bool) -> Reader:
        """See ``session.port.Sessions.feed``."""
        return await self._feeds.reader(caller.project, after, follow)

    async def interactions(self, caller: Caller, session_id: str | None, status: str | None) -> dict[str, Any]:
        """See ``session.port.Sessions.interactions``."""
        if session_id is not None:
            await self._registry.existing(self._key(caller, session_id))
        return await lists.interactions(self._services, self._registry, caller.project, session_id, status)

    async def story(self, caller: Caller, session_id: str) -> dict[str, Any]:
        """See ``session.port.Sessions.story``."""
        session = await self._registry.existing(self._key(caller, session_id))
        return views.story_view(self._services.stories.of(session.key))

    async def quarantine(self, caller: Caller, limit: int, cursor: str | None) -> dict[str, Any]:
        """See ``session.port.Sessions.quarantine``."""
        return await lists.quarantine(self._services.store, caller.project, limit, cursor)

    def pool(self, caller: Caller) -> dict[str, Any]:
        """See ``session.port.Sessions.pool``."""
        book, spares = self._services.pool.book, self._services.spares
        return {
            "items": self._services.pool.describe(caller.project),
            "next_cursor": None,
            "max_seats": book.max_seats,
            "taken": book.taken,
            "tearing_down": len(book.tearing),
            "spares": spares.describe() if spares is not None else [],
        }

    def health(self) -> dict[str, Any]:
        """See ``session.port.Sessions.health``."""
        return {"status": "ok", "draining": self.draining, **self._facts()}

    async def ready(self) -> dict[str, Any]:
        """See ``session.port.Sessions.ready``."""
        services = self._services
        store, leases = await asyncio.gather(services.store.ready(), services.owners.reachable())
        ready = store and not self.draining and (leases or services.settings.leases.on_unreachable == "open")
        capacity = {"turns": self.running, "max_turns": self.max_turns}
        live_file = self._registry.live_file
        return {
            "ready": ready,
            "store": store,
            "leases": leases,
            "capacity": capacity,
            "draining": self.draining,
            "providers": services.provisioner.conditions(),
            "live_file": live_file is None or live_file.failing is None,
        }

    def _key(self, caller: Caller, session_id: str) -> Key:
        if not valid_id(session_id):
            raise RunnerError("invalid_request", "session_id: must match [A-Za-z0-9_-]{1,128}.", field="session_id")
        return caller.project, session_id

    # -- what the replica tells --------------------------------------------------------------------------------------

    def paused(self, session: Session) -> None:
        """A turn of the session ended as paused: watch its agent for what comes meanwhile."""
        self._chains.watch(session)

    def seat_removed(self, live: LiveSeat, verdict: str) -> None:
        """The pool took a parked seat away."""
        session = self._registry.known(live.seat.key)
        if session is None:
            return
        if session.paused is not None and session.paused.live is live:
            self._chains.seat_lost(session, live, verdict)
        elif session.outbox.owes_endings and self._services.owners.shared:
            log.debug("the end beat of session %s waits behind its ending", session.session_id)
        elif session.last_turn is not None and session.current is None:
            beat = Heartbeat(*session.key, session.last_turn.turn_id, self._services.replica_id, "ended")
            self._services.tasks.spawn(f"release {session.session_id}", self._services.beats.end(beat))
        session.log.shrink()

    def lease_lost(self, turn_id: str, answer: BeatAnswer) -> None:
        """A later beat was answered "not current": a cancel for its turn, the end of a parked seat (DESIGN 3.1.7)."""
        entry = self._runs.get(turn_id)
        if entry is not None:
            text = f"The session was taken over by {answer.owner}." if answer.owner else LAPSED
            entry[0].stop(StopReason.LEASE_LOST, RunnerError("superseded", text))
            return
        for session in self._registry.all():
            live = self._services.pool.live(session.key)
            if live is not None and not session.taken and live.seat.turn_id == turn_id:
                self._give_seat_up(session, live)

    def _give_seat_up(self, session: Session, live: LiveSeat) -> None:
        if session.paused is not None and session.paused.live is live:
            # Cold, until the store says what its new owner made of it; nothing of it is written here any more.
            session.paused.live, session.paused.read = None, True
        session.queue.lost()
        self._services.pool.dismiss(live, StopReason.LEASE_LOST.value)

    def note(self, note: Note) -> None:
        """What another replica pushed; a kind that is not known here comes from a newer one."""
        if note.get("kind") == REVIVE and self._has_seats:
            key = (str(note["project"]), str(note["session_id"]))
            self._services.tasks.spawn(f"queued prompts of {key[1]}", self._start_queued(key))
        elif note.get("kind") == WATCH:
            if self.outlets is not None:
                self.outlets.note(note)
        else:
            self.commands.note(note)

    def stale(self, session: Session) -> None:
        """The store set records of the session aside: its turn here counts for nothing any more (DESIGN 3.9)."""
        if session.current is not None:
            error = RunnerError("superseded", "Another replica has taken the session over.")
            session.current.stop(StopReason.LEASE_LOST, error)

    async def drain(self, seconds: float) -> None:
        """Stop admitting, let turns finish for ``seconds``, then settle the rest (case M4)."""
        self.draining = self._chains.frozen = True
        if self._services.spares is not None:
            self._services.spares.rest()
        await self._wait_for_runs(seconds)
        for run, _ in list(self._runs.values()):
            run.stop(StopReason.DRAIN, RunnerError("execution_lost", RESTARTING))
        await self._wait_for_runs(self._services.settings.turn.settle_seconds + 5)
        for session in self._registry.all():
            try:
                await session.outbox.flush()
            except RunnerError as error:
                log.error("records of %s were not flushed: %s", session.session_id, error)

    async def _wait_for_runs(self, seconds: float) -> None:
        deadline = self._services.clock.monotonic() + seconds
        while self._runs and (left := deadline - self._services.clock.monotonic()) > 0:
            await asyncio.wait({task for _, task in self._runs.values()}, timeout=left)
            await asyncio.sleep(0)
