"""A session's prompts as they wait, run and end: performs what ``rules.prompts`` decides (DESIGN 3.6)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from runner.errors import RunnerError, owned_elsewhere
from runner.rules import prompts as rules
from runner.session.ending import result_outside_of_turns
from runner.session.prompts import Prompt
from runner.store.port import PromptRow
from runner.terms import EventType, Outcome, PromptState, StopReason, TurnPhase
from runner.wire.codec import to_json

if TYPE_CHECKING:
    from runner.session.run import TurnRun
    from runner.session.session import Session

RETRY_SECONDS: Final = 1.0
AGAIN_BYTES: Final = 1024 * 1024
"""How much context that was delivered is told again to an agent that has lost it."""
OUTCOMES: Final = {
    rules.Token.ABSORBED: Outcome.ABSORBED,
    rules.Token.CANCELLED: Outcome.CANCELLED,
    rules.Token.ABORTED: Outcome.CANCELLED,
    rules.Token.FAILED: Outcome.FAILED,
}


class Queue:
    """The prompts of one session. Its methods do not await: each is one atomic step.

    Attributes:
        rules: who waits and who owns the turn.
        prompts: those that have a token, by id.
        context: what is told to the agent with the next prompt, delivered or not, oldest first.
        run: the turn that is on its way or runs for the queue.
        goes_on: whether an ending turn may hand over to what waits.
        start: starts a turn for the batch; given the turn that it follows without a pause, if any.
        stop_chain: starts the turn that ends a paused chain for this reason.
        stop_shell: kills the running shell.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.rules = rules.Prompts()
        self.prompts: dict[str, Prompt] = {}
        self.context: list[PromptRow] = []
        self.run: TurnRun | None = None
        self.goes_on: Callable[[], bool] = lambda: True
        self.start: Callable[[str | None], None] = lambda predecessor: None
        self.stop_chain: Callable[[StopReason], None] = lambda reason: None
        self.stop_shell: Callable[[], None] = lambda: None
        self._seq = 0

    # -- what is asked -----------------------------------------------------------------------------------------------

    @property
    def batch(self) -> list[Prompt]:
        """The prompts that the turn on its way has read, in the order of their admission."""
        return [self.prompts[name] for name in self.rules.batch.prompt_ids if name in self.prompts]

    @property
    def waits(self) -> bool:
        """Whether a prompt is queued: it starts when the running turn ends."""
        return bool(self.rules.queue)

    def waits_behind(self, batch: Iterable[Prompt]) -> bool:
        """Whether a prompt waits that the ending turn has not read."""
        read = {prompt.prompt_id for prompt in batch}
        return any(name not in read for name in self.rules.queue)

    @property
    def free(self) -> bool:
        """Whether a prompt would start now; a paused chain may have to give way."""
        return self.rules.activity is rules.Activity.IDLE and not self.rules.queue

    @property
    def in_shell(self) -> bool:
        """Whether a command of the user has the session: nobody takes that away from it."""
        return self.rules.activity is rules.Activity.SHELL

    @property
    def at_rest(self) -> bool:
        """Whether nothing of it is only here: a paused chain's prompt is in the store."""
        left = self.rules.tokens.keys() - {self.rules.chain}
        return not left and self.rules.activity is rules.Activity.IDLE

    def view(self) -> list[dict[str, Any]]:
        """Prompts that wait, in the order in which they will run; then those that are being prepared."""
        names = [*self.rules.queue, *(name for name in self.rules.tokens if name not in self.rules.queue)]
        shown = []
        for name in names:
            state = self.rules.tokens[name]
            if state is not rules.Token.ACTIVE:
                position = self.rules.queue.index(name) + 1 if name in self.rules.queue else None
                shown.append({"prompt_id": name, "state": state.value, "position": position})
        return shown

    @property
    def active(self) -> str | None:
        """The prompt that the running turn or the paused chain answers."""
        return next((name for name, state in self.rules.tokens.items() if state is rules.Token.ACTIVE), None)

    def check_room(self, most: int) -> None:
        """Refuse what would wait behind ``most`` others.

        Raises:
            RunnerError: ``queue_full``.
        """
        starting = self.rules.batch.prompt_ids
        waiting = [name for name, state in self.rules.tokens.items() if state in rules.WAITING and name not in starting]
        if len(waiting) > most:
            raise RunnerError("queue_full", f"{most} prompts wait in this session already.", retry_after=1)

    def number(self) -> int:
        """The next place in the order of admission; milliseconds, so that it goes on behind a restart."""
        self._seq = max(self._seq + 1, self._session.clock.now_ms() * 1000)
        return self._seq

    # -- what comes in -----------------------------------------------------------------------------------------------

    def register(self, prompt: Prompt) -> None:
        """From now on the prompt can be aborted."""
        self.rules.register(prompt.prompt_id)
        self.prompts[prompt.prompt_id] = prompt

    def forget(self, prompt: Prompt) -> None:
        """The prompt is known by its id already, or cannot be served: it was never here."""
        if self.prompts.get(prompt.prompt_id) is prompt:
            self.perform(self.rules.refuse(prompt.prompt_id))
            self.prompts.pop(prompt.prompt_id, None)

    def admit_now(self, prompt: Prompt) -> None:
        """Admit a prompt whose row is written with its turn."""
        prompt.seq = self.number()
        self.rules.persist(prompt.prompt_id)
        self.perform(self.rules.admit(prompt.prompt_id, withdraw=True))

    def admit(self, prompt: Prompt, *, steer: bool) -> None:
        """Admit a prompt whose row is written; one that was cancelled meanwhile is not."""
        effects = self.rules.admit(prompt.prompt_id, steer=steer)
        if prompt.prompt_id in self.rules.queue:
            position = self.rules.queue.index(prompt.prompt_id) + 1
            pen = self._session.journal(None, prompt.prompt_id)
            pen.event(EventType.TURN_QUEUED, {"prompt_id": prompt.prompt_id, "position": position})
        self.perform(effects, StopReason.STEER)

    def born_cancelled(self, prompt: Prompt) -> None:
        """Tell the ending of a prompt that was cancelled before its row was written."""
        if prompt.state is PromptState.CANCELLED and not prompt.told:
            self._tell(prompt, rules.Ended(prompt.prompt_id, rules.Token.CANCELLED), prompt.result.result())

    def fail(self, prompt: Prompt, error: RunnerError) -> None:
        """The prompt cannot be served."""
        self.perform(self.rules.fail(prompt.prompt_id), error=error)

    def restore(self, prompts: Iterable[Prompt]) -> None:
        """Prompts that an earlier process had queued."""
        for prompt in prompts:
            if prompt.prompt_id not in self.rules.tokens:
                self._seq = max(self._seq, prompt.seq)
                self.rules.mode = prompt.options.get("queue_mode", self.rules.mode)
                self.prompts[prompt.prompt_id] = prompt
                self.rules.restore(prompt.prompt_id)

    def wake(self) -> None:
        """Start what is queued, if nothing has the session."""
        self.perform(self.rules.wake())

    # -- what stops --------------------------------------------------------------------------------------------------

    def abort(self, prompt_id: str) -> bool:
        """Abort one prompt; whether this call cancelled it. The interrupt follows."""
        aborted, effects = self.rules.abort(prompt_id, responded=self._responded)
        self.perform(effects, StopReason.ABORT_PROMPT)
        return aborted

    def cancel_waiting(self, *, keep_queue: bool, running: bool = True, arrived_ms: float | None = None) -> list[str]:
        """Cancel what waits, for a session-wide Stop; their ids. What runs is stopped by the Stop's own command.

        ``running``: it means what has the session; ``arrived_ms``: what came later is not meant (wall clock).
        """
        waiting = self.prompts.values() if arrived_ms is not None else ()
        newer = {prompt.prompt_id for prompt in waiting if arrived_ms is not None and prompt.created_at > arrived_ms}
        effects = self.rules.stop(keep_queue=keep_queue, responded=self._responded, running=running, newer=newer)
        cancelled = [effect.prompt_id for effect in effects if isinstance(effect, rules.Ended)]
        kept = [effect for effect in effects if not isinstance(effect, rules.StopTurn)]
        self.perform(kept)
        return cancelled

    @property
    def _responded(self) -> bool:
        current = self._session.current
        return current is not None and current.machine.phase is TurnPhase.ENDED

    # -- the turn ----------------------------------------------------------------------------------------------------

    def claim(self) -> list[Prompt]:
        """The send: what the frame carries, the owner last; empty when everything was cancelled."""
        claim = self.rules.claim()
        claimed = [self.prompts[name] for name in claim.prompt_ids]
        for prompt in claimed:
            prompt.state = PromptState.ACTIVE
        self.perform(claim.effects)
        return claimed

    def deliver(self, turn_id: str, *, again: bool) -> list[dict[str, Any]]:
        """Blocks of the context that goes with the frame: what was not delivered yet, or ``again`` all that is kept.

        Of what was delivered the newest ``AGAIN_BYTES`` are kept.
        """
        room, kept = AGAIN_BYTES, list[PromptRow]()
        for row in reversed(self.context):
            room -= 0 if row.state == PromptState.STORED else len(to_json(row.content))
            if row.state == PromptState.STORED or room >= 0:
                kept.append(row)
        due = [row for row in reversed(kept) if again or row.state == PromptState.STORED]
        told = {row.prompt_id: replace(row, state=PromptState.DONE.value, turn_id=turn_id) for row in due}
        for row in told.values():
            self._session.outbox.prompt(row)
        self.context = [told.get(row.prompt_id, row) for row in reversed(kept)]
        return [block for row in due for block in row.content]

    def lost(self) -> None:
        """Another replica has the session: what waited here waits there."""
        for prompt in self.prompts.values():
            self._give_up(prompt)
        self.rules, self.run = rules.Prompts(mode=self.rules.mode), None
        self.prompts.clear()
        self._session.busy = False
        self._session.log.wake()

    def left(self, prompt: Prompt) -> None:
        """A prompt that waited here was served, or cancelled, elsewhere."""
        del self.prompts[prompt.prompt_id]
        self.rules.drop(prompt.prompt_id)
        self._give_up(prompt)

    def chain_left(self) -> None:
        """The paused chain that is known here went on elsewhere."""
        prompt = self.prompts.pop(self.rules.chain, None) if self.rules.chain is not None else None
        if prompt is not None:
            self._give_up(prompt)
        self.rules.drop_chain()

    def _give_up(self, prompt: Prompt) -> None:
        error = owned_elsewhere("Another replica has taken the session; ask again.")
        if not prompt.told and not prompt.result.done():
            session_id, prompt_id = self._session.session_id, prompt.prompt_id
            prompt.result.set_result(result_outside_of_turns(session_id, prompt_id, Outcome.FAILED, error=error))

    def turn_over(self, move: rules.Move, predecessor: str | None, error: RunnerError | None = None) -> None:
        """The turn has ended and its ending is durable: what waits starts, else the session is idle."""
        self.run = None
        self.perform(self.rules.turn_ended(move), error=error, predecessor=predecessor)

    def turn_paused(self, prompt: Prompt | None) -> None:
        """The turn ended as paused."""
        self.run = None
        if prompt is not None:
            self.prompts[prompt.prompt_id] = prompt
        self.rules.pause(prompt.prompt_id if prompt is not None else None)

    def adopt_chain(self, prompt: Prompt | None) -> None:
        """A paused chain that an earlier process left in the store."""
        prompt_id = prompt.prompt_id if prompt is not None else None
        if self.rules.paused and self.rules.chain != prompt_id:
            self.chain_left()
        if prompt is not None:
            self.prompts[prompt.prompt_id] = prompt
        if not self.rules.paused:
            self.rules.adopt_chain(prompt_id)

    def resume_chain(self) -> None:
        """A turn that goes on with the chain was admitted; another one that is on its way to the session is too late.

        What that one would have sent waits on where it is stored, and else was never here.
        """
        late = [prompt for prompt in self.batch if not prompt.stored]
        self.run = None
        self.rules.resume_chain()
        for prompt in late:
            self.forget(prompt)

    def chain_ended(self, move: rules.Move) -> None:
        """The paused chain ended, and has told so."""
        if self.rules.paused:
            self.perform(self.rules.chain_ended(move))

    def not_started(self) -> None:
        """The turn on its way was refused or could not be admitted: what nobody has stored yet was never here.

        What is stored waits on, and is tried again after a while.
        """
        run, self.run = self.run, None
        unsaved = [prompt for prompt in self.batch if not prompt.stored]
        self.perform(self.rules.not_started())
        for prompt in unsaved:
            self.forget(prompt)
        owner = run.prompt if run is not None else None
        if owner is not None and owner.state is PromptState.CANCELLED and not owner.told:
            # It was cancelled on the way, and the turn that would have told that did not come about.
            self._outside(owner, rules.Ended(owner.prompt_id, rules.Token.CANCELLED), None)
            if not owner.stored:
                self._session.prompts.pop(owner.prompt_id, None)
        if self.waits:
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self.wake)

    # -- effects -----------------------------------------------------------------------------------------------------

    def perform(
        self,
        effects: Iterable[rules.Effect],
        reason: StopReason = StopReason.CANCEL,
        *,
        error: RunnerError | None = None,
        predecessor: str | None = None,
    ) -> None:
        """Carry decisions out. ``reason`` labels a stop, ``error`` is why prompts failed."""
        for effect in effects:
            match effect:
                case rules.Ended():
                    self._ended(effect, error)
                case rules.StartTurn():
                    self.start(predecessor)
                case rules.StopTurn():
                    self._stop(reason)
                case rules.StopShell():
                    self.stop_shell()
                case rules.Idle():
                    self._idle()
                case rules.Busy():
                    pass

    def _stop(self, reason: StopReason) -> None:
        run = self._session.current or self.run
        if run is not None:
            run.stop(reason)
        elif self.rules.paused:
            self.stop_chain(reason)

    @property
    def _sends_something(self) -> bool:
        return any(self.rules.tokens.get(name) is rules.Token.QUEUED for name in self.rules.batch.prompt_ids)

    def _idle(self) -> None:
        session = self._session
        if session.busy:
            session.busy = False
            session.journal(None, None).event(EventType.SESSION_IDLE, {})

    def _ended(self, ended: rules.Ended, error: RunnerError | None) -> None:
        """A prompt's one ending, unless its turn has told it already."""
        prompt = self.prompts.pop(ended.prompt_id)
        if prompt.told:
            return
        session = self._session
        prompt.state = PromptState(ended.state.value)
        if self.run is not None and prompt is self.run.prompt and not self._sends_something:
            # Its turn has nothing left to send: that tells the ending, and has the result.
            session.remember(prompt)
            return
        self._outside(prompt, ended, error)

    def _outside(self, prompt: Prompt, ended: rules.Ended, error: RunnerError | None) -> None:
        """The ending of a prompt that owns no turn."""
        session = self._session
        outcome = OUTCOMES.get(ended.state, Outcome.COMPLETED)
        turn_id = session.current.turn_id if ended.absorbed_by is not None and session.current is not None else None
        if outcome is Outcome.FAILED and error is None:
            error = RunnerError("internal", "The prompt could not be run.")
        result = result_outside_of_turns(
            session.session_id,
            prompt.prompt_id,
            outcome,
            turn_id=turn_id,
            absorbed_by=ended.absorbed_by,
            error=error if outcome is Outcome.FAILED else None,
        )
        if prompt.stored:
            self._tell(prompt, ended, result)
        if not prompt.result.done():
            prompt.result.set_result(result)
        session.log.wake()

    def _tell(self, prompt: Prompt, ended: rules.Ended, result: dict[str, Any]) -> None:
        session = self._session
        prompt.told = True
        data: dict[str, Any] = {"prompt_id": prompt.prompt_id, "state": ended.state.value}
        if ended.absorbed_by is not None:
            data["absorbed_by"] = ended.absorbed_by
        session.journal(None, prompt.prompt_id).event(EventType.PROMPT_ENDED, data)
        session.outbox.prompt(session.prompt_row(prompt, result))
        asyncio.get_running_loop().call_soon(session.outbox.flush_soon)
        session.remember(prompt)
