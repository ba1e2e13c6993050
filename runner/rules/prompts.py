"""The prompts of one session: who waits, who owns the running turn, what an abort may still do (DESIGN 3.6).

One writer calls these methods between two awaits, so each is one atomic step. ``prompt_moves.TABLE`` holds every
move of a token; the machine around it decides when a turn starts, what its batch is, and when the session is idle.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

from runner.rules.prompt_moves import (
    LIVE,
    TABLE,
    WAITING,
    Busy,
    Effect,
    Ended,
    Idle,
    IllegalMove,
    Move,
    StartTurn,
    StopShell,
    StopTurn,
    Token,
)

__all__ = [
    "LIVE",
    "NO_BATCH",
    "TABLE",
    "WAITING",
    "Activity",
    "Batch",
    "Busy",
    "Claim",
    "Effect",
    "Ended",
    "Idle",
    "IllegalMove",
    "Mode",
    "Move",
    "Prompts",
    "StartTurn",
    "StopShell",
    "StopTurn",
    "Token",
]

Mode = Literal["coalesce", "fifo"]


@dataclass(frozen=True, slots=True)
class Batch:
    """What a turn was started for: queued prompts in the order of their admission."""

    prompt_ids: tuple[str, ...]


NO_BATCH: Final = Batch(())


@dataclass(frozen=True, slots=True)
class Claim:
    """The frame of a turn: its blocks are these prompts', its answer is the owner's.

    Attributes:
        prompt_ids: in the order of admission; empty: there is nothing to send.
        owner: the newest of them.
        effects: the endings of those that the owner absorbed.
    """

    prompt_ids: tuple[str, ...]
    owner: str | None
    effects: tuple[Effect, ...] = ()


class Activity(StrEnum):
    """What has the session."""

    IDLE = "idle"
    STARTING = "starting"
    TURN = "turn"
    SHELL = "shell"


@dataclass(slots=True)
class Prompts:
    """The tokens and the queue of one session.

    Attributes:
        tokens: live ones by prompt id; a prompt without a token never had one, or is over.
        queue: admitted prompts in the order of their admission, steering ones at their place.
        activity: what has the session now; ``STARTING``: a turn is on its way to its claim.
        batch: what the turn on its way has read.
        owner: the prompt that the running turn answers, None when it has none.
        paused, chain: a turn is paused, with this prompt: active, but nothing runs for it.
        giving_way: the paused chain is withdrawn for what is queued.
        stopping: the running turn or shell, or the paused chain, is being cancelled already.
        busy: whether a busy period has begun and is not over.
        mode: how many queued prompts one turn takes.
    """

    tokens: dict[str, Token] = field(default_factory=dict)
    queue: list[str] = field(default_factory=list)
    activity: Activity = Activity.IDLE
    batch: Batch = NO_BATCH
    owner: str | None = None
    paused: bool = False
    chain: str | None = None
    giving_way: bool = False
    stopping: bool = False
    busy: bool = False
    mode: Mode = "coalesce"

    # What comes in.

    def register(self, prompt_id: str) -> None:
        """A prompt is being prepared; from now on it can be aborted."""
        if prompt_id in self.tokens:
            raise IllegalMove(f"{prompt_id} is {self.tokens[prompt_id]}")
        self.tokens[prompt_id] = Token.PREPARING

    def persist(self, prompt_id: str) -> bool:
        """Its row is about to be written; False: it was cancelled, so the row is born cancelled."""
        if prompt_id not in self.tokens:
            return False
        self._move(prompt_id, Move.PERSIST)
        return True

    def admit(self, prompt_id: str, *, steer: bool = False, withdraw: bool = False) -> list[Effect]:
        """Queue a prompt; late admission of a cancelled one does nothing.

        Args:
            prompt_id: the prompt.
            steer: cancel what runs, and let this prompt go first (coalesce: with all that is queued).
            withdraw: a paused chain gives way to it; else the prompt waits for the chain's end.
        """
        if prompt_id not in self.tokens:
            return []
        self._move(prompt_id, Move.ADMIT)
        if steer and self.mode == "fifo":
            self.queue.insert(0, prompt_id)
        else:
            self.queue.append(prompt_id)
        self.giving_way = self.giving_way or (self.paused and (steer or withdraw))
        effects = self._begin()
        if steer and self.activity is Activity.TURN and not self.stopping:
            self.stopping = True
            effects.append(StopTurn(self.owner))
        return effects

    def restore(self, prompt_id: str) -> None:
        """A prompt that was admitted by an earlier process; ``wake`` starts it. The busy period goes on."""
        self.busy = True
        self.tokens[prompt_id] = Token.QUEUED
        self.queue.append(prompt_id)

    def wake(self) -> list[Effect]:
        """Start what is queued, if nothing has the session."""
        return self._begin()

    def fail(self, prompt_id: str) -> list[Effect]:
        """A prompt that has not been claimed cannot be served."""
        if self.tokens.get(prompt_id) not in WAITING:
            return []
        return [self._end(prompt_id, Move.FAIL), *self._rest()]

    def refuse(self, prompt_id: str) -> list[Effect]:
        """The session was not to be had for this prompt, which nobody has stored: it was never here."""
        if self.tokens.get(prompt_id) in WAITING:
            del self.tokens[prompt_id]
            if prompt_id in self.queue:
                self.queue.remove(prompt_id)
        return self._over()

    # What ends.

    def abort(self, prompt_id: str, *, responded: bool = False) -> tuple[bool, list[Effect]]:
        """Abort one prompt: whether this call cancelled it, and what follows from that.

        ``responded``: the agent's answer to the running turn was processed already, so that turn is over.
        """
        state, withdrawn = self.tokens.get(prompt_id), self.giving_way and prompt_id == self.chain
        if state is None or (state is Token.ACTIVE and (self.stopping or responded or withdrawn)):
            return False, []
        if state is Token.ACTIVE:
            self.stopping = True
            return True, [StopTurn(prompt_id)]
        return True, [self._end(prompt_id, Move.CANCEL), *self._useless(), *self._rest()]

    def stop(
        self,
        *,
        keep_queue: bool = False,
        responded: bool = False,
        running: bool = True,
        newer: Collection[str] = (),
    ) -> list[Effect]:
        """Stop the session: cancel what runs, and what waits unless ``keep_queue``; nothing of it starts later.

        A turn on its way takes what it has read with it, also when the rest of the queue is kept. What came later than
        the Stop goes on: the prompts ``newer``, and what has the session unless it is ``running`` that is meant.
        """
        starting = self.batch.prompt_ids if self.activity is Activity.STARTING else ()
        spared = {*newer, *(starting if not running else ())} - {*(starting if running else ())}
        waiting = [
            name
            for name, state in self.tokens.items()
            if state in WAITING and name not in spared and (not keep_queue or name in starting)
        ]
        effects: list[Effect] = [self._end(name, Move.CANCEL) for name in waiting]
        if not running or self.stopping or (self.activity is Activity.TURN and responded):
            return [*effects, *self._rest()]
        if self.activity is Activity.SHELL:
            self.stopping = True
            effects.append(StopShell())
        elif self.activity is not Activity.IDLE or self.paused:
            self.stopping = True
            effects.append(StopTurn(self.owner if self.owner is not None else self.chain))
        return [*effects, *self._rest()]

    # The turn.

    def begin_ownerless(self) -> list[Effect]:
        """A turn without an owner starts (an explicit resume)."""
        self._idle_only()
        self.activity, self.batch = Activity.STARTING, NO_BATCH
        return self._busy()

    def read(self) -> Batch:
        """What the turn that is starting would send now; what is admitted later waits for the next one."""
        self.batch = Batch(tuple(self.queue[:1] if self.mode == "fifo" else self.queue))
        return self.batch

    def not_started(self) -> list[Effect]:
        """The turn that was starting did not come about; what is queued stays so until ``wake``."""
        if self.activity is Activity.STARTING:
            self.activity, self.batch, self.stopping = Activity.IDLE, NO_BATCH, False
            self.giving_way = False
        return self._over()

    def claim(self) -> Claim:
        """The send: the newest of the batch that still waits owns the turn, the older ones are absorbed by it.

        What was cancelled since the batch was read is in no frame; what was admitted since waits for the next one.
        """
        if self.activity is not Activity.STARTING:
            raise IllegalMove(f"a claim while {self.activity}")
        ids = tuple(name for name in self.batch.prompt_ids if self.tokens.get(name) is Token.QUEUED)
        self.activity = Activity.TURN
        if not ids:
            return Claim((), None)
        self.owner = ids[-1]
        self.queue = [name for name in self.queue if name not in ids]
        effects = tuple(self._end(name, Move.ABSORB, self.owner) for name in ids[:-1])
        self._move(self.owner, Move.CLAIM)
        return Claim(ids, self.owner, effects)

    def turn_ended(self, move: Move) -> list[Effect]:
        """The turn is over and its agent settled: its owner has ended, and what is queued starts.

        ``move`` is ``FINISH``, ``ABORT``, ``CANCEL`` or ``FAIL``; a turn that fails before its claim takes its batch
        with it.
        """
        effects: list[Effect] = []
        if self.owner is not None:
            effects.append(self._end(self.owner, move))
        elif self.activity is Activity.STARTING and move is Move.FAIL:
            ids = [name for name in self.batch.prompt_ids if self.tokens.get(name) is Token.QUEUED]
            effects += [self._end(name, move) for name in ids]
        self.activity, self.batch, self.owner, self.stopping = Activity.IDLE, NO_BATCH, None, False
        return [*effects, *self._rest()]

    # The paused chain.

    def pause(self, prompt_id: str | None) -> None:
        """The turn ended as paused: its prompt stays active, the session stays busy, nothing queued starts."""
        if prompt_id is not None:
            self.tokens[prompt_id] = Token.ACTIVE
        self.activity, self.batch, self.owner = Activity.IDLE, NO_BATCH, None
        self.paused, self.chain, self.stopping, self.busy = True, prompt_id, False, True

    def adopt_chain(self, prompt_id: str | None) -> None:
        """A paused chain that an earlier process left in the store; a turn on its way was admitted to withdraw it."""
        if prompt_id is not None:
            self.tokens[prompt_id] = Token.ACTIVE
        self.paused, self.chain, self.busy = True, prompt_id, True
        self.giving_way = self.activity is Activity.STARTING

    def drop_chain(self) -> None:
        """The chain went on elsewhere, where its ending is told; what waits here waits on."""
        if self.chain is not None:
            self.tokens.pop(self.chain, None)
        self.paused, self.chain, self.giving_way = False, None, False
        self.busy = bool(self.tokens) or self.activity is not Activity.IDLE

    def drop(self, prompt_id: str) -> None:
        """A queued prompt that was served elsewhere, where its ending is told."""
        del self.tokens[prompt_id]
        self.queue.remove(prompt_id)
        self.busy = bool(self.tokens) or self.paused or self.activity is not Activity.IDLE

    def resume_chain(self) -> None:
        """A turn goes on with the chain: its prompt owns it, nothing is claimed."""
        self.activity, self.batch, self.owner = Activity.TURN, NO_BATCH, self.chain
        self.paused, self.chain, self.giving_way = False, None, False

    def chain_ended(self, move: Move) -> list[Effect]:
        """The chain ended outside of a turn of its own: withdrawn, lost or expired."""
        effects: list[Effect] = [self._end(self.chain, move)] if self.chain is not None else []
        self.paused, self.chain, self.giving_way = False, None, False
        if self.activity is Activity.IDLE:
            self.stopping = False
        return [*effects, *self._rest()]

    # The shell.

    def begin_shell(self) -> list[Effect] | None:
        """A shell begins; None: something has the session or waits for it."""
        if self.activity is not Activity.IDLE or self.queue or self.paused:
            return None
        self.activity = Activity.SHELL
        return self._busy()

    def shell_ended(self) -> list[Effect]:
        """The shell's whole process group is gone."""
        self.activity, self.stopping = Activity.IDLE, False
        return self._rest()

    # Inside.

    def _move(self, prompt_id: str, move: Move) -> None:
        state = self.tokens[prompt_id]
        after = TABLE.get((state, move))
        if after is None:
            raise IllegalMove(f"{prompt_id}: {move} of a {state} prompt")
        if after in LIVE:
            self.tokens[prompt_id] = after
        else:
            del self.tokens[prompt_id]

    def _end(self, prompt_id: str, move: Move, absorbed_by: str | None = None) -> Ended:
        state = TABLE[self.tokens[prompt_id], move]
        self._move(prompt_id, move)
        if prompt_id in self.queue:
            self.queue.remove(prompt_id)
        return Ended(prompt_id, state, absorbed_by)

    def _idle_only(self) -> None:
        if self.activity is not Activity.IDLE:
            raise IllegalMove(f"a turn while {self.activity}")

    def _useless(self) -> list[Effect]:
        """The turn on its way has nothing left to send: it need not start at all."""
        empty = not any(self.tokens.get(name) is Token.QUEUED for name in self.batch.prompt_ids)
        if self.activity is Activity.STARTING and self.batch.prompt_ids and empty and not self.stopping:
            self.stopping = True
            return [StopTurn(None)]
        return []

    def _begin(self) -> list[Effect]:
        """Start a turn for what is queued when nothing has the session."""
        if self.activity is not Activity.IDLE or not self.queue or (self.paused and not self.giving_way):
            return []
        self.activity = Activity.STARTING
        self.read()
        return [*self._busy(), StartTurn()]

    def _busy(self) -> list[Effect]:
        if self.busy:
            return []
        self.busy = True
        return [Busy()]

    def _rest(self) -> list[Effect]:
        """The final check and the move to idle in one step: a queued prompt starts, a prepared one is waited for."""
        return self._begin() or self._over()

    def _over(self) -> list[Effect]:
        if not self.busy or self.activity is not Activity.IDLE or self.tokens or self.paused:
            return []
        self.busy = False
        return [Idle()]
