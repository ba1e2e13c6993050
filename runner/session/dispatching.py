"""From a dispatch to a prompt's handle: known, run now, queued, or refused (DESIGN 3.1, 3.6)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from runner.errors import RunnerError, owned_elsewhere, turn_in_use
from runner.rules import admission
from runner.rules.pool import Key
from runner.session.admit import Overtaken
from runner.session.effective import Effective, merged
from runner.session.ending import refused_result
from runner.session.handles import DoneHandle, Handle
from runner.session.history import prompt_events
from runner.session.port import Caller, PromptHandle
from runner.session.prompts import Prompt, content_digest
from runner.session.queue import Queue
from runner.session.registry import Registry
from runner.session.run import Start, TurnRun
from runner.session.services import Services
from runner.session.session import Session
from runner.store.port import PromptRow
from runner.store.rows import CONTEXT_MAX
from runner.terms import PromptState
from runner.wire.models import DispatchRequest

SAME_TRIES: Final = 4
SAME_SECONDS: Final = 0.02


class Dispatching:
    """Admits prompts to the sessions of this replica.

    Args:
        services: of the replica.
        registry: its sessions.
        start: gives a turn its supervisor.
        refusal: why no further turn may start now; None when one may.
        runs: whether a turn of this id runs already.
    """

    def __init__(
        self,
        services: Services,
        registry: Registry,
        start: Start,
        refusal: Callable[[], RunnerError | None],
        runs: Callable[[str], bool],
    ) -> None:
        self._services = services
        self._registry = registry
        self._start = start
        self._refusal = refusal
        self._runs = runs

    async def dispatch(self, caller: Caller, key: Key, request: DispatchRequest, keep: bool) -> PromptHandle:
        """See ``session.port.Sessions.dispatch``."""
        if request.context_only:
            return await self._store_context(key, request)
        while True:
            try:
                return await self._dispatch(caller, key, request, keep)
            except Overtaken:
                continue

    async def _dispatch(self, caller: Caller, key: Key, request: DispatchRequest, keep: bool) -> PromptHandle:
        session = await self._registry.open(key)
        # Asked before the prompt itself makes this replica hold it; of a session held elsewhere only the store knows.
        held = not self._services.owners.shared or self._registry.holds(key)
        prompt = self._prompt(session, request, keep)
        known = await self._registered(session, prompt)
        if known is not None:
            return known
        try:
            return await self._prepared(caller, session, request, prompt, held)
        finally:
            prompt.ready.set()

    async def _prepared(
        self, caller: Caller, session: Session, request: DispatchRequest, prompt: Prompt, held: bool
    ) -> PromptHandle:
        try:
            handle = await self._known(session, prompt, held) if request.prompt_id is not None else None
            session = self._registry.again(session)
            if handle is None and request.turn_id is not None:
                await self._unused(session, request.turn_id)
            if handle is None and prompt.state is not PromptState.CANCELLED:
                return await self._admitted(caller, self._registry.again(session), request, prompt)
        except BaseException:
            if not prompt.seq:
                session.queue.forget(prompt)
            self._registry.forget(session)
            raise
        prompt.known = handle is not None
        session.queue.forget(prompt)
        if handle is None and request.on_busy == "reject" and not session.queue.free:
            return self._refused(session, prompt)
        return handle or await self._cancelled(prompt)

    def _prompt(self, session: Session, request: DispatchRequest, keep: bool) -> Prompt:
        blocks = request.blocks()

        def merge(last: Effective) -> Effective:
            return merged(last, request, self._registry.vault, self._registry.limits)

        return Prompt(
            prompt_id=request.prompt_id or self._services.ids.mint("prompt"),
            digest=content_digest(blocks),
            content=blocks,
            created_at=self._services.clock.now_ms(),
            position=session.log.end,
            result=asyncio.get_running_loop().create_future(),
            keep=keep or request.keep_on_disconnect,
            turn_id=request.turn_id,
            merge=merge,
        )

    async def _registered(self, session: Session, prompt: Prompt) -> PromptHandle | None:
        """The handle of the same prompt, when that is on its way; else the prompt can be aborted from now on."""
        here = session.queue.prompts.get(prompt.prompt_id)
        if here is None:
            session.queue.register(prompt)
            return None
        admission.known_prompt(here.digest, prompt.digest)
        await here.ready.wait()
        run = session.starting.get(prompt.prompt_id)
        if run is not None and not here.stored:
            # Whoever sent it first has left; whether it is admitted is still open.
            return await self._handle(session, run, here)
        if session.queue.prompts.get(prompt.prompt_id) is not here:
            raise Overtaken
        if here.restored:
            # Nobody here may be about to run it; where that was done elsewhere, the try finds out.
            session.queue.wake()
        return Handle(self._services.store, session, here)

    async def _admitted(
        self, caller: Caller, session: Session, request: DispatchRequest, prompt: Prompt
    ) -> PromptHandle:
        """Run it now, or queue it behind what runs."""
        refusal = self._refusal()
        if refusal is not None:
            raise refusal
        if request.turn_id is not None and self._runs(request.turn_id):
            raise turn_in_use()
        effective = prompt.merge(session.effective)
        if effective is not session.effective or self._services.pool.live(session.key) is None:
            self._services.provisioner.check(effective, caller)
        queue = session.queue
        if queue.prompts.get(prompt.prompt_id) is not prompt:
            raise Overtaken
        if request.given("queue_mode"):
            queue.rules.mode = request.queue_mode
        if queue.free and (request.on_busy != "queue" or not queue.rules.paused):
            queue.admit_now(prompt)
            run = session.starting.get(prompt.prompt_id)
            if run is None:
                # The session went to another replica since it was read, and with it what was registered here.
                raise Overtaken
            handle = await self._handle(session, run, prompt, again=request.on_busy != "reject")
            if handle.refused is not None and request.prompt_id is not None and self._services.owners.shared:
                await self._is_unknown(session, request.prompt_id)
            return handle
        if request.on_busy == "reject" or (request.on_busy == "steer" and queue.in_shell):
            queue.wake()
            return self._refused(session, prompt)
        queue.check_room(self._services.settings.prompts.max_queued)
        prompt.seq, prompt.state = _place(queue, request), PromptState.QUEUED
        saving = self._queued(session, request, prompt, effective)
        return await asyncio.shield(self._services.tasks.spawn(f"queue {prompt.prompt_id}", saving))

    async def _queued(
        self, session: Session, request: DispatchRequest, prompt: Prompt, effective: Effective
    ) -> PromptHandle:
        """Saved before it is acknowledged, whether or not its client stays (DESIGN 3.6).

        Raises:
            RunnerError: ``store_unavailable``; ``owned_elsewhere``: another replica took the session meanwhile;
                ``session_ended``: another one deleted it.
        """
        queue = session.queue
        prompt.position, prompt.since = session.log.end, session.head.cursor
        prompt.options = {
            "on_busy": request.on_busy,
            "queue_mode": queue.rules.mode,
            "keep": prompt.keep,
            "config": effective.config,
        }
        async with session.outbox.writing:
            if prompt.state is not PromptState.CANCELLED and queue.prompts.get(prompt.prompt_id) is not prompt:
                raise owned_elsewhere("Another replica has just taken this session.")
            prompt.stored = True
            if prompt.state is not PromptState.CANCELLED:
                queue.rules.persist(prompt.prompt_id)
            try:
                await self._with_session(session)
                await self._save(session.prompt_row(prompt, _result(prompt)))
            except RunnerError as error:
                queue.fail(prompt, error)
                raise
        queue.born_cancelled(prompt)
        queue.admit(prompt, steer=request.on_busy == "steer")
        return Handle(self._services.store, session, prompt)

    def start(self, session: Session, predecessor: str | None) -> None:
        """Start the turn that takes the session's batch; right behind ``predecessor``, when that handed over to it."""
        if not self._services.provisioner.providers:
            session.queue.lost()
            return
        batch = session.queue.batch
        # Behind a turn that handed over, the room is that turn's: its lease and seat wait for nobody else.
        if not batch or (predecessor is None and self._refusal() is not None):
            session.queue.not_started()
            return
        owner = batch[-1]

        def merge(last: Effective) -> Effective:
            for prompt in batch:
                last = prompt.merge(last)
            return last

        run = TurnRun(
            self._services,
            session,
            turn_id=owner.turn_id or self._services.ids.mint("turn"),
            prompt=owner,
            effective=merge(session.effective),
            merge=merge,
            batch=batch,
            predecessor=predecessor,
        )
        session.queue.run = run
        self._start(session, run)

    async def _handle(self, session: Session, run: TurnRun, prompt: Prompt, *, again: bool = False) -> PromptHandle:
        if await asyncio.shield(run.admitted):
            return Handle(self._services.store, session, prompt)
        if again:
            raise owned_elsewhere("Another replica has just taken this session. Try again.")
        return self._refused(session, prompt)

    def _refused(self, session: Session, prompt: Prompt) -> PromptHandle:
        session.queue.forget(prompt)
        error = turn_in_use()
        result = refused_result(session.session_id, prompt.prompt_id, error.as_event())
        return DoneHandle(prompt.prompt_id, None, PromptState.FAILED, result, [], error)

    async def _cancelled(self, prompt: Prompt) -> PromptHandle:
        """It was aborted while it was prepared: nothing of it is stored."""
        return DoneHandle(prompt.prompt_id, None, PromptState.CANCELLED, await prompt.result, [])

    # -- known ids ---------------------------------------------------------------------------------------------------

    async def _is_unknown(self, session: Session, prompt_id: str) -> None:
        """Refused because another replica was given the same prompt at the same moment: then it is attached to.

        Raises:
            Overtaken: the prompt is there by now.
        """
        for _ in range(SAME_TRIES):
            if await self._services.store.prompt(session.project, session.session_id, prompt_id) is not None:
                raise Overtaken
            await asyncio.sleep(SAME_SECONDS)

    async def _known(self, session: Session, prompt: Prompt, held: bool) -> PromptHandle | None:
        """A known prompt is attached to without a beat (DESIGN 3.1.1). None only when nothing has come up since."""
        prompt_id, store = prompt.prompt_id, self._services.store
        here = session.prompts.get(prompt_id) if held else None
        row = None if here is not None else await store.prompt(session.project, session.session_id, prompt_id)
        here = session.prompts.get(prompt_id) if held else None
        if here is not None:
            admission.known_prompt(here.digest, prompt.digest)
            if here.state is PromptState.ACTIVE or not here.result.done():
                return Handle(store, session, here)
        if row is None and here is None:
            return None
        await session.outbox.flush()
        if here is not None:
            # What was read before may be older than its ending, or even than its admission.
            row = await store.prompt(session.project, session.session_id, prompt_id)
        if row is None:
            raise RunnerError("session_ended", f"Session {session.session_id} has ended.")
        admission.known_prompt(row.digest, prompt.digest)
        return await self._stored(session, row)

    async def _stored(self, session: Session, row: PromptRow) -> PromptHandle:
        owners = self._services.owners
        if row.result is None and row.state in (PromptState.ACTIVE, PromptState.QUEUED) and owners.shared:
            await owners.settle(session.key, row.turn_id)
            raise Overtaken
        parts = await prompt_events(self._services.store, session, row.prompt_id)
        result = row.result or refused_result(session.session_id, row.prompt_id, _lost().as_event())
        return DoneHandle(row.prompt_id, row.turn_id, row.state, result, parts)

    async def _unused(self, session: Session, turn_id: str) -> None:
        """A turn that was may never come back; telling a client that the session is busy would be untrue."""
        if await self._services.store.turn(session.project, session.session_id, turn_id) is not None:
            raise RunnerError("invalid_request", "turn_id: this id was used before.", field="turn_id")

    # -- context -----------------------------------------------------------------------------------------------------

    async def _store_context(self, key: Key, request: DispatchRequest) -> PromptHandle:
        """Told to the agent with the next prompt; it owns no turn, and nothing stops it (DESIGN 4.1)."""
        session = await self._registry.open(key)
        blocks, store = request.blocks(), self._services.store
        prompt_id, digest = request.prompt_id or self._services.ids.mint("prompt"), content_digest(blocks)
        known = await store.prompt(*key, prompt_id)
        session = self._registry.again(session)
        if known is not None:
            admission.known_prompt(known.digest, digest)
            return DoneHandle(prompt_id, known.turn_id, known.state, known.result or {}, [])
        row = PromptRow(
            *key,
            prompt_id,
            digest,
            PromptState.STORED.value,
            None,
            self._services.clock.now_ms(),
            session.redactor.tree(blocks),
            kind="context",
            seq=session.queue.number(),
        )
        async with session.outbox.writing:
            self._registry.again(session)
            here = next((known for known in session.queue.context if known.prompt_id == prompt_id), None)
            if here is not None:
                admission.known_prompt(here.digest, digest)
                return DoneHandle(prompt_id, here.turn_id, here.state, {}, [])
            if sum(known.state == PromptState.STORED for known in session.queue.context) >= CONTEXT_MAX:
                raise RunnerError(
                    "queue_full", f"{CONTEXT_MAX} items of context wait in this session already.", retry_after=1
                )
            await self._with_session(session)
            await self._save(row)
            session.queue.context.append(row)
        return DoneHandle(prompt_id, None, row.state, {}, [])

    async def _save(self, row: PromptRow) -> None:
        done = await self._services.store.append([], [], [row])
        if done.dropped:
            raise RunnerError("session_ended", f"Session {row.session_id} has ended.")

    async def _with_session(self, session: Session) -> None:
        """What waits before the first turn must be found behind a restart; for whoever holds ``writing``."""
        if session.head.epoch == 0:
            await self._services.store.save_session(session.row(self._services.clock.now_ms()))


def _place(queue: Queue, request: DispatchRequest) -> int:
    """Its place in the order in which prompts run, also behind a restart."""
    goes_first = request.on_busy == "steer" and queue.rules.mode == "fifo" and queue.waits
    return queue.prompts[queue.rules.queue[0]].seq - 1 if goes_first else queue.number()


def _result(prompt: Prompt) -> dict[str, Any] | None:
    return prompt.result.result() if prompt.result.done() else None


def _lost() -> RunnerError:
    return RunnerError("execution_lost", "The runner stopped before this prompt had a result.")
