"""A session in memory: its head, its log, its turn, its prompts, and records on their way to the store."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import orjson

from runner.clock import Clock
from runner.errors import RunnerError
from runner.ids import Key
from runner.redaction import Redactor
from runner.rules.feed import FED
from runner.rules.spares import place_of
from runner.rules.story import Tell, untold
from runner.session.effective import Effective
from runner.session.outbox import Outbox
from runner.session.prompts import Presence, Prompt
from runner.session.queue import Queue
from runner.store.port import InteractionRow, PromptRow, RecordRow, SessionRow, Store, TurnRow
from runner.tasks import Tasks
from runner.terms import EventType, PromptState, SessionState
from runner.turn.journal import Head, Journal
from runner.turn.live import LiveSeat
from runner.turn.live_file import Pen
from runner.turn.log import SessionLog

if TYPE_CHECKING:
    from runner.session.run import TurnRun

log = logging.getLogger("runner.session")
KEPT_PROMPTS: Final = 32
KEPT_SECRETS: Final = 1000
QUESTIONED: Final = frozenset({EventType.INTERACTION_REQUESTED, EventType.INTERACTION_CLOSED})


@dataclass(slots=True)
class Paused:
    """A chain that waits for a human: its last turn, its prompt, the live seat and the open questions.

    Attributes:
        live: None once the seat is gone: the chain is cold, and the first answer starts an agent.
        questions: pending ones, and answered ones that the agent must ask for again.
        held_bytes: what the agent has said since.
        resume_at: when it may go on by itself again, loop time.
        begun: when its last turn was dispatched, loop time.
        tools: open calls of an agent that is gone, not closed yet.
        read: it is what the store says: its agent, if there is one, may be another replica's.
    """

    turn_id: str
    prompt: Prompt | None
    live: LiveSeat | None
    questions: dict[str, InteractionRow]
    held_bytes: int = 0
    resume_at: float = 0.0
    timer: asyncio.TimerHandle | None = None
    begun: float = 0.0
    tools: dict[str, dict[str, Any]] = field(default_factory=dict)
    read: bool = False


@dataclass(slots=True)
class LastTurn:
    """What the view says about the newest ended turn."""

    turn_id: str
    outcome: str
    stop_reason: str | None
    ended_at: int

    @classmethod
    def of(cls, row: TurnRow | None) -> LastTurn | None:
        """The session's newest turn as it is stored; None while it has no ending."""
        if row is None or row.outcome is None or row.ended_at is None:
            return None
        return cls(row.turn_id, row.outcome, row.stop_reason, row.ended_at)


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
        ring_seconds: float | None = None,
        kept: Pen | None = None,
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
        self.log = SessionLog(ring_bytes, buffer_bytes, ring_seconds)
        self.effective = effective
        self.facets: tuple[Effective, dict[str, str]] | None = None
        self.redactor = Redactor()
        self.presence = Presence()
        self.prompts: OrderedDict[str, Prompt] = OrderedDict()
        self.current: TurnRun | None = None
        self.starting: dict[str, TurnRun] = {}
        self.paused: Paused | None = None
        self.stale: list[InteractionRow] = []
        """Questions that the store holds open although no chain waits for them: the next turn closes them."""
        self.last_turn: LastTurn | None = None
        self.unfinished: TurnRow | None = None
        """The newest turn where it has no ending: its replica may be gone."""
        self.busy = False
        self.over = row.ended_at is not None
        """The end of the session is durable."""
        self.written_to = 0
        """Files that clients are writing into its workspace."""
        self.remains = False
        """It is over, but not everything of it is removed yet."""
        self.clock = clock
        self._store = store
        self._secrets: dict[str, None] = {}
        self.tell: Tell = untold
        """Hears what becomes of the session's questions."""
        self.stir: Callable[[], None] = lambda: None
        """Called for each record that goes into the project's feed, as it is on its way to the store."""
        self.outbox = Outbox(self.session_id, store, tasks)
        self.outbox.on_written = self._written
        self._kept = kept
        self.queue = Queue(self)

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
        """Whether the store has it, or may have it any moment."""
        stored = self.head.epoch > 0 or bool(self.queue.context)
        return stored or bool(self.queue.prompts) or bool(self.starting) or self.current is not None

    @property
    def taken(self) -> bool:
        """Whether a turn has the session, or is on its way to it."""
        return self.current is not None or bool(self.starting)

    @property
    def resuming(self) -> TurnRun | None:
        """The turn on its way that goes on with the paused chain."""
        return next((run for run in self.starting.values() if run.machine.resumes), None)

    def asks(self, interaction_id: str) -> bool:
        """Whether its turn, or its paused chain, holds this question."""
        if self.current is not None:
            return any(row.interaction_id == interaction_id for row in self.current.questions)
        return self.paused is not None and interaction_id in self.paused.questions

    def place(self, provider: str) -> Key:
        """The key of its directories at a provider; see ``rules.spares.place_of``."""
        return place_of(self.agent_state, self.key, provider)

    @property
    def disposable(self) -> bool:
        """Whether the session may leave memory: the store has all of it."""
        return (
            self.current is None
            and not self.starting
            and (self.paused is None or self.paused.live is None)
            and self.presence.count == 0
            and self.queue.at_rest
            and self.outbox.empty
        )

    def row(self, now_ms: int, config: dict[str, Any] | None = None) -> SessionRow:
        """The session as it is stored, with ``config`` where that is not the session's yet."""
        return SessionRow(
            self.project,
            self.session_id,
            self.created_at,
            now_ms,
            self.ended_at if self.over else None,
            self.head.epoch,
            self.head.n,
            self.effective.config if config is None else config,
            self.agent_state,
            self.usage,
        )

    def prompt_row(self, prompt: Prompt, result: dict[str, Any] | None, turn_id: str | None = None) -> PromptRow:
        """A prompt as it is stored, its secrets masked; of ``turn_id`` when that is not its turn yet."""
        content = self.redactor.tree(prompt.content)
        return PromptRow(
            self.project,
            self.session_id,
            prompt.prompt_id,
            prompt.digest,
            prompt.state.value,
            turn_id or prompt.turn_id,
            prompt.created_at,
            content,
            result,
            seq=prompt.seq,
            options=prompt.options,
        )

    def learn_secrets(self, values: Iterable[str | None]) -> None:
        """Mask these from now on, and all that were known before: the workspace may still hold them."""
        fresh = [value for value in values if value and value not in self._secrets]
        if fresh:
            self._secrets.update(dict.fromkeys(fresh))
            for value in list(self._secrets)[:-KEPT_SECRETS]:
                del self._secrets[value]
            self.redactor = Redactor(self._secrets)

    def refresh(self, row: SessionRow, effective: Effective, last: LastTurn | None) -> None:
        """Become what the store says, ``row`` with the newest head: another replica had the session meanwhile.

        Secret values that are known here stay where the configuration did. Readers go on by their cursors.
        """
        if (row.head_epoch, row.head_n) != self.head.cursor:
            self.head.epoch, self.head.n = row.head_epoch, row.head_n
            self.log.restart()
            self.log_since = (row.head_epoch, row.head_n)
            for prompt_id in [name for name, prompt in self.prompts.items() if prompt.result.done()]:
                del self.prompts[prompt_id]
        self.updated_at, self.ended_at, self.over = row.updated_at, row.ended_at, row.ended_at is not None
        self.agent_state, self.usage = dict(row.agent_state), dict(row.usage)
        if effective.config != self.effective.config:
            self.effective = effective
        self.last_turn = last

    # -- events ------------------------------------------------------------------------------------------------------

    def journal(
        self, turn_id: str | None, prompt_id: str | None, collect: Callable[[RecordRow], None] | None = None
    ) -> Journal:
        """A pen for a turn, or for events outside of turns (both None); ``collect``: who makes its records durable."""
        return Journal(
            project=self.project,
            session_id=self.session_id,
            turn_id=turn_id,
            prompt_id=prompt_id,
            head=self.head,
            log=self.log,
            clock=self.clock,
            redactor=self.redactor,
            collect=collect or self._collect,
            keep=self._kept.write if self._kept is not None and collect is None else None,
        )

    def settled(self) -> None:
        """The newest turn's ending is durable: what was shown need not be kept, unless more was told meanwhile."""
        if self._kept is not None and self.outbox.nothing_waits:
            self._kept.settled()

    def _written(self) -> None:
        if not self.taken:
            self.settled()

    def _collect(self, row: RecordRow) -> None:
        self.outbox.record(row)
        if row.type in FED:
            self.stir()
        if row.type in QUESTIONED:
            shown = orjson.loads(row.data)
            asked = row.type == EventType.INTERACTION_REQUESTED
            self.tell(self.key, shown["interaction_id"], "asked" if asked else "closed", None, shown["status"])

    async def settle(self) -> None:
        """See that the store has every record that was shown before this call, here or by an earlier owner.

        Raises:
            RunnerError: ``store_unavailable``.
        """
        await self.outbox.flush()
        if not self.taken:
            await self._store.caught_up(*self.key)

    async def hand_over(self) -> None:
        """As ``settle``, for who asks the store past this replica: what its running turn gave away is there too.

        Raises:
            RunnerError: ``store_unavailable``.
        """
        await self.outbox.flush()
        await self._store.caught_up(*self.key)

    def begin_busy(self, journal: Journal) -> None:
        """``session_busy``, once per busy period."""
        if not self.busy:
            self.busy = True
            journal.event(EventType.SESSION_BUSY, {})

    async def save_question(self, row: InteractionRow) -> None:
        """Make a question durable before it is shown; a store that cannot be used does not hide it."""
        try:
            self.outbox.told(await self._store.append([], [row]))
        except RunnerError as error:
            log.warning("question %s is not durable yet: %s", row.interaction_id, error)
            self.outbox.questions([row])

    async def save_agent(self) -> None:
        """Make what is known of the agent session durable between turns; without a store only the next turn does."""
        try:
            await self.outbox.flush()
            async with self.outbox.writing:
                if self.ended_at is None:
                    await self._store.save_session(self.row(self.clock.now_ms()))
        except RunnerError as error:
            log.warning("the agent session of %s is durable only with its turn: %s", self.session_id, error)

    # -- prompts -----------------------------------------------------------------------------------------------------

    def remember(self, prompt: Prompt) -> None:
        """Know a prompt; old ended ones leave memory, the store keeps them."""
        self.prompts[prompt.prompt_id] = prompt
        if len(self.prompts) > KEPT_PROMPTS:
            for prompt_id, known in list(self.prompts.items()):
                if known.state is not PromptState.ACTIVE and known is not prompt:
                    del self.prompts[prompt_id]
                    break
