"""One turn's data, shared by its supervisor and the three parts that it goes through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from runner.leases.port import Heartbeat, Phase
from runner.rules import turn
from runner.rules.limits import Limits
from runner.rules.resume import FIRST_UPDATE_SECONDS
from runner.rules.usage import Meter
from runner.session.effective import Effective
from runner.session.ending import Times
from runner.session.issued import Issued
from runner.session.prompts import Prompt
from runner.session.services import Services
from runner.session.session import Paused, Session
from runner.store.port import InteractionRow, PromptRow, TurnRow
from runner.terms import EventType
from runner.turn.driver import Driver, Tuning
from runner.turn.journal import Journal
from runner.turn.live import LiveSeat


@dataclass(slots=True)
class TurnContext:
    """What is known of a turn so far.

    Attributes:
        prompt: its owner; before the claim the newest of ``batch``; None for a turn that owns none.
        batch: the prompts that it has read.
        claimed: those whose blocks its frame carries; the older ones were absorbed by its owner.
        predecessor: the ended turn whose lease it takes over without a pause.
        given_back: what it has read waits on.
        hands_over: its own lease and seat go to the turn that follows.
        keep: its sandbox stays warm although nobody reads.
        merge: what ``effective`` is over another last accepted configuration of the session.
        resumes: the paused chain that it goes on with.
        start, reason: how it got its agent, and why it was cold.
        live: the seat it holds.
        spare: the spare that it was admitted with, and whose directories its session took over.
        preface: what a new agent must be told of the session so far, as one text block before those of the next prompt
            frame, once; None when its memory is whole.
        reclaimed: it goes on in the process that holds its chain's ``session/prompt`` open; else that chain is cold,
            and nothing is open in the agent.
        unsure: its settings were given up half-way: what is in force in the agent is not known.
        closed: interactions that got their last status before its driver ran.
        commands: those that stop it: its ending settles them.
        meter: what it costs.
    """

    services: Services
    session: Session
    turn_id: str
    prompt: Prompt | None
    effective: Effective
    merge: Callable[[Effective], Effective]
    resumes: Paused | None
    machine: turn.Turn
    journal: Journal
    times: Times
    started_ms: int
    batch: list[Prompt] = field(default_factory=list)
    claimed: list[Prompt] = field(default_factory=list)
    predecessor: str | None = None
    hands_over: bool = False
    keep: bool = False
    given_back: bool = False
    epoch: int = 0
    start: str = "cold"
    reason: str = "miss"
    context_lost: bool = False
    preface: str | None = None
    spare: str | None = None
    reclaimed: bool = False
    live: LiveSeat | None = None
    unsure: bool = False
    driver: Driver | None = None
    closed: list[InteractionRow] = field(default_factory=list)
    commands: list[Issued] = field(default_factory=list)
    meter: Meter = field(default_factory=Meter)

    def beat(self, phase: Phase, *, parked: bool = False) -> Heartbeat:
        """A heartbeat of this turn."""
        session = self.session
        return Heartbeat(
            session.project,
            session.session_id,
            self.turn_id,
            self.services.replica_id,
            phase,
            self._follows if phase == "running" else None,
            session.head.epoch,
            parked,
            self.services.owners.me.advertise_url,
        )

    @property
    def _follows(self) -> str | None:
        return self.resumes.turn_id if self.resumes is not None else self.predecessor

    def turn_row(
        self, end: turn.End | None = None, result: dict[str, Any] | None = None, ended_at: int | None = None
    ) -> TurnRow:
        """The turn as it is stored."""
        session = self.session
        return TurnRow(
            session.project,
            session.session_id,
            self.turn_id,
            self.epoch,
            self.services.replica_id,
            self.prompt.prompt_id if self.prompt is not None else None,
            self.started_ms,
            self.resumes.turn_id if self.resumes is not None else None,
            end.outcome.value if end is not None else None,
            end.stop_reason if end is not None else None,
            ended_at,
            result,
        )

    def prompt_row(self, result: dict[str, Any] | None = None) -> PromptRow | None:
        """Its prompt as it is stored."""
        if self.prompt is None:
            return None
        return self.session.prompt_row(self.prompt, result, self.turn_id)

    def facets(self) -> dict[str, str]:
        """The fingerprint of its configuration, and of the login that its sandbox takes."""
        session, provisioner = self.session, self.services.provisioner
        if session.facets is None or session.facets[0] is not self.effective:
            session.facets = (self.effective, provisioner.facets(self.effective))
        facets = session.facets[1]
        login = provisioner.login_of(session.project, self.effective)
        return facets if login is None else {**facets, "secrets": f"{facets['secrets']} {login}"}

    def environment(self, phase: str) -> None:
        """Show how far the start is."""
        elapsed = self.services.clock.monotonic() - self.times.begun
        data = {"phase": phase, "start": self.start, "reason": self.reason, "elapsed_ms": round(elapsed * 1000, 3)}
        self.journal.event(EventType.ENVIRONMENT, data)

    def remember_agent(self) -> bool:
        """A prompt goes to the agent: its agent session has the session's context from now on; whether that is news."""
        known = self.live.agent_session if self.live is not None else None
        stored = known.as_json() if known is not None else None
        news = stored != self.session.agent_state.get("agent")
        self.session.agent_state["agent"] = stored
        self.remember_spent()
        return news

    def remember_spent(self) -> None:
        """What the agent session has cost so far: an agent that goes on with it counts on from there."""
        if self.live is not None and self.live.spent:
            self.session.agent_state["spent"] = dict(self.live.spent)
        else:
            self.session.agent_state.pop("spent", None)

    def agent_answered(self, live: LiveSeat) -> None:
        """The agent answered a prompt as it should: its agent session can be gone on with."""
        if live.agent_session is not None:
            live.agent_session = live.agent_session.works(resumed=live.resumed)
            self.session.agent_state["agent"] = live.agent_session.as_json()

    def new_driver(self, live: LiveSeat, machine: turn.Turn, journal: Journal | None = None) -> Driver:
        """A driver of the agent's prompt that writes into this turn, or with another pen."""
        services, tuning = self.services, self.services.settings.turn
        return Driver(
            live=live,
            machine=machine,
            journal=journal or self.journal,
            policy=self.effective.policy,
            limits=_of_loaded(self.effective.limits) if live.loaded else self.effective.limits,
            tuning=Tuning(tuning.settle_seconds, tuning.pause_quiet_ms / 1000),
            meter=self.meter,
            clock=services.clock,
            started_at=self.times.begun,
            mint=lambda: services.ids.mint("int"),
            save_question=self.session.save_question,
            on_closed=lambda row: self.session.outbox.questions([row]),
        )


def _of_loaded(limits: Limits) -> Limits:
    """An agent with the memory of an earlier process has to speak soon (case M7)."""
    seconds = limits.first_update_seconds
    return replace(limits, first_update_seconds=min(seconds or FIRST_UPDATE_SECONDS, FIRST_UPDATE_SECONDS))
