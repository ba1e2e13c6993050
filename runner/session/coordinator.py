"""The sessions of one replica: admits prompts, applies commands, answers questions (DESIGN 3.1, 3.6, 3.7, 3.8)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from runner.errors import RunnerError, turn_in_use
from runner.ids import valid_id
from runner.leases.port import BeatAnswer, Heartbeat, Note
from runner.rules import admission
from runner.rules.pool import Key
from runner.session import lists, views
from runner.session.admit import Overtaken
from runner.session.commands import Commands
from runner.session.deletion import delete_session
from runner.session.effective import Effective, merged
from runner.session.ending import refused_result
from runner.session.expiry import Expiry
from runner.session.handles import DoneHandle, Handle
from runner.session.history import HistoryReader, cursor_of, prompt_events, record_view
from runner.session.paused import PausedChains
from runner.session.port import Caller, PromptHandle, Reader, Reply
from runner.session.prompts import Prompt, content_digest
from runner.session.registry import Registry
from runner.session.run import TurnRun
from runner.session.services import Services
from runner.session.session import Session
from runner.terms import PromptState, StopReason
from runner.turn.live import LiveSeat
from runner.wire.models import AnswerRequest, CancelRequest, DispatchRequest

log = logging.getLogger("runner.session")
SAME_TRIES: Final = 4
SAME_SECONDS: Final = 0.02
RESTARTING: Final = "The runner is restarting; this turn was stopped."


class Coordinator:
    """Implements ``session.port.Sessions`` for the sessions this replica owns."""

    def __init__(self, services: Services, registry: Registry, facts: Callable[[], Mapping[str, Any]]) -> None:
        self._services = services
        self._registry = registry
        self._facts = facts
        self._chains = PausedChains(services, self._start)
        self.commands = Commands(services, registry, self._start)
        self.expiry = Expiry(services, registry, self._chains)
        self._runs: dict[str, tuple[TurnRun, asyncio.Task[None]]] = {}
        self.draining = False

    # -- turns -------------------------------------------------------------------------------------------------------

    def has_capacity(self) -> bool:
        """Whether another turn may be dispatched."""
        return not self.draining and len(self._runs) < self._services.settings.server.max_turns

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
        key = self._key(caller, session_id)
        while True:
            try:
                return await self._dispatch(caller, key, request, keep_on_disconnect)
            except Overtaken:
                continue

    async def _dispatch(self, caller: Caller, key: Key, request: DispatchRequest, keep: bool) -> PromptHandle:
        blocks = request.blocks()
        digest = content_digest(blocks)
        session = await self._registry.open(key)
        if request.prompt_id is not None:
            known = await self._known(session, request.prompt_id, digest)
            if known is not None:
                return known
            session = self._registry.again(session)
        if request.turn_id is not None:
            await self._unused(session, request.turn_id)
        try:
            if not self.has_capacity():
                raise self.at_capacity()
            session = self._registry.again(session)
            run = self._new_run(caller, session, request, blocks, digest, keep)
        except RunnerError:
            self._registry.forget(session)
            raise
        self._start(session, run)
        handle = await self._handle(session, run)
        if handle.refused is not None and request.prompt_id is not None and self._services.owners.shared:
            await self._is_unknown(session, request.prompt_id)
        return handle

    async def _is_unknown(self, session: Session, prompt_id: str) -> None:
        """Refused because another replica was given the same prompt at the same moment: then it is attached to.

        Raises:
            Overtaken: the prompt is there by now.
        """
        for _ in range(SAME_TRIES):
            if await self._services.store.prompt(session.project, session.session_id, prompt_id) is not None:
                raise Overtaken
            await asyncio.sleep(SAME_SECONDS)

    def _new_run(
        self,
        caller: Caller,
        session: Session,
        request: DispatchRequest,
        blocks: list[dict[str, Any]],
        digest: str,
        keep: bool,
    ) -> TurnRun:
        services = self._services

        def merge(last: Effective) -> Effective:
            return merged(last, request, self._registry.vault, self._registry.limits)

        effective = merge(session.effective)
        if effective is not session.effective or services.pool.live(session.key) is None:
            services.provisioner.check(effective, caller)
        prompt = Prompt(
            prompt_id=request.prompt_id or services.ids.mint("prompt"),
            digest=digest,
            content=blocks,
            created_at=services.clock.now_ms(),
            position=session.log.end,
            result=asyncio.get_running_loop().create_future(),
            keep=keep or request.keep_on_disconnect,
        )
        turn_id = request.turn_id or services.ids.mint("turn")
        if turn_id in self._runs:
            raise turn_in_use()
        return TurnRun(services, session, turn_id=turn_id, prompt=prompt, effective=effective, merge=merge)

    async def _handle(self, session: Session, run: TurnRun) -> PromptHandle:
        assert run.prompt is not None
        if await asyncio.shield(run.admitted):
            return Handle(self._services.store, session, run.prompt)
        error = turn_in_use()
        result = refused_result(session.session_id, run.prompt.prompt_id, error.as_event())
        return DoneHandle(run.prompt.prompt_id, None, PromptState.FAILED, result, [], error)

    async def _known(self, session: Session, prompt_id: str, digest: str) -> PromptHandle | None:
        """A known prompt is attached to without a beat (DESIGN 3.1.1). None only when nothing has come up since."""
        here, row = self._known_here(session, prompt_id, digest), None
        if here is None:
            row = await self._services.store.prompt(session.project, session.session_id, prompt_id)
            here = self._known_here(session, prompt_id, digest)
        if here is not None:
            return (
                await self._handle(session, here)
                if isinstance(here, TurnRun)
                else Handle(self._services.store, session, here)
            )
        ended_here = prompt_id in session.prompts
        if row is None and not ended_here:
            return None
        await session.outbox.flush()
        if ended_here:
            # What was read before may be older than its ending, or even than its admission.
            row = await self._services.store.prompt(session.project, session.session_id, prompt_id)
        if row is None:
            raise RunnerError("session_ended", f"Session {session.session_id} has ended.")
        admission.known_prompt(row.digest, digest)
        if row.result is None and row.state == PromptState.ACTIVE and self._services.owners.shared:
            await self._services.owners.settle(session.key, row.turn_id)
            raise Overtaken
        parts = await prompt_events(self._services.store, session, prompt_id)
        result = row.result or refused_result(session.session_id, prompt_id, _lost().as_event())
        return DoneHandle(prompt_id, row.turn_id, row.state, result, parts)

    def _known_here(self, session: Session, prompt_id: str, digest: str) -> TurnRun | Prompt | None:
        """The prompt as it is admitted or runs in this process; of any other only the store knows."""
        starting = session.starting.get(prompt_id)
        prompt = starting.prompt if starting is not None else session.prompts.get(prompt_id)
        if prompt is None:
            return None
        admission.known_prompt(prompt.digest, digest)
        if starting is not None:
            return starting
        if self._services.owners.shared and not self._registry.holds(session.key):
            return None
        return prompt if prompt.state is PromptState.ACTIVE or not prompt.result.done() else None

    async def _unused(self, session: Session, turn_id: str) -> None:
        """A turn that was may never come back; telling a client that the session is busy would be untrue."""
        if await self._services.store.turn(session.project, session.session_id, turn_id) is not None:
            self._registry.forget(session)
            raise RunnerError("invalid_request", "turn_id: this id was used before.", field="turn_id")

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
        return await asyncio.shield(
            self._services.tasks.spawn(f"delete {session_id}", delete_session(self._services, self.commands, session))
        )

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
        await session.outbox.flush()
        rows = await self._services.store.records(session.project, session.session_id, cursor, limit + 1)
        items = [record_view(row) for row in rows[:limit]]
        return {"items": items, "next_cursor": items[-1]["cursor"] if len(rows) > limit else None}

    async def follow(self, caller: Caller, session_id: str, after: str | None, follow: bool) -> Reader:
        """See ``session.port.Sessions.follow``."""
        session = await self._registry.existing(self._key(caller, session_id))
        return HistoryReader(self._services.store, session, cursor_of(after), follow)

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
        book = self._services.pool.book
        return {
            "items": self._services.pool.describe(caller.project),
            "next_cursor": None,
            "max_seats": book.max_seats,
            "taken": book.taken,
            "tearing_down": len(book.tearing),
            "spares": [],
        }

    def health(self) -> dict[str, Any]:
        """See ``session.port.Sessions.health``."""
        return {"status": "ok", "draining": self.draining, **self._facts()}

    async def ready(self) -> dict[str, Any]:
        """See ``session.port.Sessions.ready``."""
        services = self._services
        store, leases = await asyncio.gather(services.store.ready(), services.owners.reachable())
        ready = store and not self.draining and (leases or services.settings.leases.on_unreachable == "open")
        capacity = {"turns": len(self._runs), "max_turns": self._services.settings.server.max_turns}
        return {"ready": ready, "store": store, "leases": leases, "capacity": capacity, "draining": self.draining}

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
            owner = f" by {answer.owner}" if answer.owner else ""
            entry[0].stop(StopReason.LEASE_LOST, RunnerError("superseded", f"The session was taken over{owner}."))
            return
        for session in self._registry.all():
            live = self._services.pool.live(session.key)
            if live is not None and not session.taken and live.seat.turn_id == turn_id:
                self._give_seat_up(session, live)

    def _give_seat_up(self, session: Session, live: LiveSeat) -> None:
        if session.paused is not None and session.paused.live is live:
            # Cold, until the store says what its new owner made of it; nothing of it is written here any more.
            session.paused.live = None
        self._services.pool.dismiss(live, StopReason.LEASE_LOST.value)

    def note(self, note: Note) -> None:
        """What another replica pushed; a kind that is not known here comes from a newer one."""
        self.commands.note(note)

    def stale(self, session: Session) -> None:
        """The store set records of the session aside: its turn here counts for nothing any more (DESIGN 3.9)."""
        if session.current is not None:
            error = RunnerError("superseded", "Another replica has taken the session over.")
            session.current.stop(StopReason.LEASE_LOST, error)

    async def drain(self, seconds: float) -> None:
        """Stop admitting, let turns finish for ``seconds``, then settle the rest (case M4)."""
        self.draining = self._chains.frozen = True
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


def _lost() -> RunnerError:
    return RunnerError("execution_lost", "The runner stopped before this prompt had a result.")
