"""A session in memory: its head, its log, its turn, its prompts, and records on their way to the store."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from runner.clock import Clock
from runner.errors import RunnerError
from runner.redaction import Redactor
from runner.session.effective import Effective
from runner.session.prompts import Presence, Prompt
from runner.store.port import InteractionRow, PromptRow, RecordRow, SessionRow, Store
from runner.tasks import Tasks
from runner.terms import EventType, PromptState, SessionState
from runner.turn.journal import Head, Journal
from runner.turn.live import LiveSeat
from runner.turn.log import SessionLog

if TYPE_CHECKING:
    from runner.session.run import TurnRun

log = logging.getLogger("runner.session")
FLUSH_SECONDS: Final = 0.25
RETRY_SECONDS: Final = 1.0
KEPT_PROMPTS: Final = 32
FULL_BATCH: Final = 500


@dataclass(slots=True)
class Paused:
    """A chain that waits for a human: its last turn, its prompt, the live seat and the open questions."""

    turn_id: str
    prompt: Prompt | None
    live: LiveSeat
    questions: dict[str, InteractionRow]


@dataclass(slots=True)
class LastTurn:
    """What the view says about the newest ended turn."""

    turn_id: str
    outcome: str
    stop_reason: str | None
    ended_at: int


@dataclass(slots=True)
class Outbox:
    """Records that were shown and are not durable yet, in order."""

    rows: list[RecordRow] = field(default_factory=list)
    flushing: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None


class Session:
    """One session of one project. Everything here is touched on the event loop only."""

    def __init__(
        self,
        row: SessionRow,
        effective: Effective,
        *,
        store: Store,
        clock: Clock,
        tasks: Tasks,
        ring_bytes: int,
        buffer_bytes: int,
    ) -> None:
        self.project = row.project
        self.session_id = row.session_id
        self.key = (row.project, row.session_id)
        self.created_at = row.created_at
        self.updated_at = row.updated_at
        self.ended_at = row.ended_at
        self.agent_state = dict(row.agent_state)
        self.usage = dict(row.usage)
        self.head = Head(row.head_epoch, row.head_n)
        self.log_since = (row.head_epoch, row.head_n)
        self.log = SessionLog(ring_bytes, buffer_bytes)
        self.effective = effective
        self.facets: tuple[Effective, dict[str, str]] | None = None
        self.redactor = Redactor()
        self.presence = Presence()
        self.prompts: OrderedDict[str, Prompt] = OrderedDict()
        self.current: TurnRun | None = None
        self.starting: dict[str, TurnRun] = {}
        self.paused: Paused | None = None
        self.last_turn: LastTurn | None = None
        self.busy = False
        self.stops: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self.clock = clock
        self._store = store
        self._tasks = tasks
        self._outbox = Outbox()

    # -- views -------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> SessionState:
        """``state`` of the session view."""
        if self.ended_at is not None:
            return SessionState.ENDED
        if self.current is not None:
            return SessionState.STOPPING if self.current.machine.stopping else SessionState.RUNNING
        return SessionState.AWAITING_APPROVAL if self.paused is not None else SessionState.IDLE

    @property
    def current_turn_id(self) -> str | None:
        """*Current* of DESIGN 2: the running turn, else the paused one."""
        if self.current is not None:
            return self.current.turn_id
        return self.paused.turn_id if self.paused is not None else None

    @property
    def exists(self) -> bool:
        """Whether a turn of it was admitted, or may be any moment."""
        return self.head.epoch > 0 or bool(self.starting) or self.current is not None

    @property
    def disposable(self) -> bool:
        """Whether the session may leave memory: the store has all of it."""
        return (
            self.current is None
            and not self.starting
            and self.paused is None
            and self.presence.count == 0
            and not self._outbox.rows
            and self._outbox.flushing is None
        )

    def row(self, now_ms: int) -> SessionRow:
        """The session as it is stored."""
        return SessionRow(
            self.project,
            self.session_id,
            self.created_at,
            now_ms,
            self.ended_at,
            self.head.epoch,
            self.head.n,
            self.effective.config,
            self.agent_state,
            self.usage,
        )

    def prompt_row(self, prompt: Prompt, result: dict[str, Any] | None) -> PromptRow:
        """A prompt as it is stored, its secrets masked."""
        content = self.redactor.tree(prompt.content)
        return PromptRow(
            self.project,
            self.session_id,
            prompt.prompt_id,
            prompt.digest,
            prompt.state.value,
            prompt.turn_id,
            prompt.created_at,
            content,
            result,
        )

    # -- events ------------------------------------------------------------------------------------------------------

    def journal(self, turn_id: str | None, prompt_id: str | None) -> Journal:
        """A pen for a turn, or for events outside of turns (both None)."""
        return Journal(
            project=self.project,
            session_id=self.session_id,
            turn_id=turn_id,
            prompt_id=prompt_id,
            head=self.head,
            log=self.log,
            clock=self.clock,
            redactor=self.redactor,
            collect=self.collect,
        )

    def begin_busy(self, journal: Journal) -> None:
        """``session_busy``, once per busy period."""
        if not self.busy:
            self.busy = True
            journal.event(EventType.SESSION_BUSY, {})

    def collect(self, row: RecordRow) -> None:
        """Queue a record; it is flushed soon, or with the ending of its turn."""
        self._outbox.rows.append(row)
        if self._outbox.timer is None and self._outbox.flushing is None:
            self._arm(FLUSH_SECONDS)
        elif len(self._outbox.rows) == FULL_BATCH and self._outbox.flushing is None:
            self._flush_soon()

    def take_records(self) -> list[RecordRow]:
        """Everything queued; the caller now has to make it durable, or give it back."""
        rows, self._outbox.rows = self._outbox.rows, []
        return rows

    def give_back(self, rows: list[RecordRow]) -> None:
        """Queue rows again, before newer ones."""
        self._outbox.rows[:0] = rows
        if self._outbox.rows and self._outbox.timer is None and self._outbox.flushing is None:
            self._arm(RETRY_SECONDS)

    def _arm(self, seconds: float) -> None:
        self._outbox.timer = asyncio.get_running_loop().call_later(seconds, self._flush_soon)

    def _flush_soon(self) -> None:
        if self._outbox.timer is not None:
            self._outbox.timer.cancel()
            self._outbox.timer = None
        if self._outbox.rows and self._outbox.flushing is None:
            self._outbox.flushing = self._tasks.spawn(f"flush {self.session_id}", self._flush())

    async def _flush(self) -> None:
        rows = self.take_records()
        failed = False
        try:
            await self._store.append(rows)
        except RunnerError as error:
            log.warning("records of %s are kept back: %s", self.session_id, error)
            failed = True
        finally:
            self._outbox.flushing = None
            if failed:
                self.give_back(rows)
            elif self._outbox.rows:
                self._arm(FLUSH_SECONDS)

    async def settled_outbox(self) -> None:
        """Wait for a flush under way; what it could not write is queued again."""
        while (flushing := self._outbox.flushing) is not None:
            await asyncio.wait({flushing})

    async def flush(self) -> None:
        """Make everything queued durable now.

        Raises:
            RunnerError: ``store_unavailable``; the rows stay queued.
        """
        await self.settled_outbox()
        rows = self.take_records()
        if not rows:
            return
        try:
            await self._store.append(rows)
        except RunnerError:
            self.give_back(rows)
            raise

    async def save_question(self, row: InteractionRow) -> None:
        """Make a question durable before it is shown; a store that cannot be used does not hide it."""
        try:
            await self._store.append([], [row])
        except RunnerError as error:
            log.warning("question %s is not durable yet: %s", row.interaction_id, error)

    # -- prompts -----------------------------------------------------------------------------------------------------

    def remember(self, prompt: Prompt) -> None:
        """Know a prompt; old ended ones leave memory, the store keeps them."""
        self.prompts[prompt.prompt_id] = prompt
        if len(self.prompts) > KEPT_PROMPTS:
            for prompt_id, known in list(self.prompts.items()):
                if known.state is not PromptState.ACTIVE and known is not prompt:
                    del self.prompts[prompt_id]
                    break
