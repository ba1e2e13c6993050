"""What holds for a turn whatever the order of its events: one final ending, and a way out of any state."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runner.errors import RunnerError
from runner.rules.turn import (
    AT_ONCE,
    LATE,
    OURS,
    TABLE,
    AbortPreparation,
    AgentGone,
    Answered,
    Begin,
    CancelQuestions,
    CancelUnsent,
    ChainCold,
    CloseTools,
    Effect,
    End,
    Event,
    Fired,
    IllegalMove,
    LimitReached,
    Moved,
    Prepare,
    Prepared,
    PrepareFailed,
    Quiet,
    Reap,
    Reaped,
    SendCancel,
    SendFrame,
    Stop,
    Turn,
    step,
)
from runner.terms import Outcome, StopReason, TurnPhase

ERRORS = st.sampled_from(["harness_exited", "sandbox_lost", "limit_idle"]).map(lambda code: RunnerError(code, "x"))
WORDS = st.sampled_from(["end_turn", "cancelled", "refusal", "max_tokens", None])
ANSWERS = st.builds(Answered, WORDS) | st.builds(
    Answered, st.none(), st.sampled_from([-32800, -32603, -32000]), st.just("x")
)
STOPS = st.builds(Stop, st.sampled_from(StopReason), st.none() | ERRORS)
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.just(Begin()),
    st.builds(Prepared, st.booleans()),
    st.builds(PrepareFailed, ERRORS),
    st.just(ChainCold()),
    STOPS,
    ANSWERS,
    st.builds(AgentGone, ERRORS),
    st.builds(LimitReached, ERRORS),
    st.just(Quiet()),
    st.just(CancelUnsent()),
    st.builds(Fired, st.sampled_from(["cancel_again", "kill_tools", "settle", "unknown"])),
    st.builds(Reaped, st.booleans()),
)


class AnyOrder(RuleBasedStateMachine):
    """Events in any order, legal or not, against one turn."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Moved] = []
        self.turn = Turn(story=self.told)
        self.effects: list[Effect] = []
        self.marked: StopReason | None = None

    def feed(self, event: Event) -> list[Effect]:
        before, told = replace(self.turn), len(self.told)
        try:
            effects = step(self.turn, event)
        except IllegalMove:
            assert (self.turn, len(self.told)) == (before, told), "an illegal move changed something"
            late = before.phase is TurnPhase.ENDED and type(event) in LATE
            assert (not late and (before.phase, type(event)) not in TABLE) or isinstance(event, Fired | Reaped)
            return []
        if before.phase is TurnPhase.ENDED:
            assert effects == [], "an ended turn orders nothing"
            assert (self.turn.phase, self.turn.stop) == (before.phase, before.stop)
        self.effects += effects
        return effects

    @rule(resumes=st.booleans())
    def chain(self, resumes: bool) -> None:
        if not self.told:
            self.turn.resumes = resumes

    @precondition(lambda self: self.turn.phase in (TurnPhase.ADMITTED, TurnPhase.PREPARING))
    @rule(event=st.sampled_from([Begin(), Prepared(), Prepared(resumed=True)]))
    def onward(self, event: Event) -> None:
        self.feed(event)

    @precondition(lambda self: self.turn.phase is TurnPhase.PROMPTING)
    @rule()
    def updates(self) -> None:
        self.turn.output = True

    @rule(event=EVENTS)
    def anything(self, event: Event) -> None:
        self.feed(event)

    @rule(event=STOPS)
    def stop(self, event: Stop) -> None:
        phase = self.turn.phase
        effects = self.feed(event)
        if phase in (TurnPhase.PROMPTING, TurnPhase.CANCELLING) and event.reason in AT_ONCE:
            assert isinstance(effects[-1], End)
        if phase is not TurnPhase.ENDED and self.turn.stop is not None and not event.reason.cooperative:
            assert not self.turn.stop.cooperative, "a label that destroys was lost"

    @invariant()
    def one_ending_and_it_is_last(self) -> None:
        ends = [effect for effect in self.effects if isinstance(effect, End)]
        assert len(ends) == (1 if self.turn.phase is TurnPhase.ENDED else 0)
        if ends:
            assert self.effects[-1] is ends[0]
            closing = ends[0].outcome is not Outcome.PAUSED
            assert [type(effect) for effect in self.effects[-3:-1]] == [CancelQuestions, CloseTools] or not closing

    @invariant()
    def each_step_is_ordered_once(self) -> None:
        for kind in (Prepare, SendFrame, Reap):
            assert sum(isinstance(effect, kind) for effect in self.effects) <= 1, kind

    @invariant()
    def permissions_are_answered_before_the_first_cancel(self) -> None:
        kinds = [type(effect) for effect in self.effects]
        if SendCancel in kinds:
            assert CancelQuestions in kinds[: kinds.index(SendCancel)]
            assert self.turn.frame_sent

    @invariant()
    def a_mark_is_a_mark(self) -> None:
        if self.turn.phase is TurnPhase.PROMPTING:
            assert self.turn.stop is None
        if self.turn.phase is TurnPhase.CANCELLING:
            assert self.turn.stop is not None
        for end in self.effects:
            if isinstance(end, End):
                self.ending_tells_the_truth(end)

    def ending_tells_the_truth(self, end: End) -> None:
        waits_on = end.outcome is Outcome.PAUSED and self.turn.cold and not self.turn.frame_sent
        assert (end.outcome is Outcome.FAILED or waits_on) == (end.error is not None)
        assert end.outcome is not Outcome.LOST
        assert end.stop_reason is None or end.outcome is not Outcome.FAILED
        if end.outcome is Outcome.CANCELLED:
            assert end.label is not None
            assert end.stop_reason == "cancelled"
        if waits_on:
            assert end.label is None or end.label in OURS
        elif end.outcome in (Outcome.COMPLETED, Outcome.PAUSED):
            assert end.label is None
            assert self.turn.stop is None
        if self.turn.stop is not None:
            assert end.label is self.turn.stop
        if end.survivors or end.late_completion:
            assert end.settled is True
        if not self.turn.frame_sent:
            assert end.settled is None

    def teardown(self) -> None:
        """A way out of any state: what the shell owes, it delivers, and the turn ends."""
        owed: dict[TurnPhase, Event] = {
            TurnPhase.ADMITTED: Begin(),
            TurnPhase.PREPARING: PrepareFailed(RunnerError("sandbox_start_failed", "x")),
            TurnPhase.PROMPTING: Answered("end_turn"),
        }
        for _ in range(4):
            if self.turn.phase is TurnPhase.CANCELLING:
                self.feed(Reaped(False) if self.turn.settled else Fired("settle"))
            elif self.turn.phase is not TurnPhase.ENDED:
                self.feed(owed[self.turn.phase])
        assert self.turn.phase is TurnPhase.ENDED
        self.one_ending_and_it_is_last()
        self.a_mark_is_a_mark()


class AShell(RuleBasedStateMachine):
    """A shell that does what it is told: events come only because an effect, a user or the agent made them."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Moved] = []
        self.turn = Turn(story=self.told)
        self.timers: set[str] = set()
        self.preparing = self.reaping = self.prompt_open = False
        self.ends = 0

    def feed(self, event: Event) -> None:
        for effect in step(self.turn, event):
            match effect:
                case Prepare():
                    self.preparing = True
                case AbortPreparation():
                    assert self.preparing
                case SendFrame():
                    assert not self.prompt_open
                    self.prompt_open = True
                case SendCancel():
                    assert self.prompt_open, "a cancel for a prompt that is not open"
                case Reap():
                    self.reaping = True
                case End():
                    self.ends += 1
                    assert not self.preparing, "the turn ended over a start under way"
                case _:
                    self.timers |= {effect.timer} if hasattr(effect, "timer") else set()

    @rule()
    def begin(self) -> None:
        assume(self.turn.phase is TurnPhase.ADMITTED)
        self.feed(Begin())

    @rule(ready=st.booleans(), resumed=st.booleans())
    def start_ends(self, ready: bool, resumed: bool) -> None:
        assume(self.preparing)
        self.preparing = False
        if not ready:
            return self.feed(PrepareFailed(RunnerError("sandbox_start_failed", "x")))
        self.prompt_open = resumed
        return self.feed(Prepared(resumed))

    @rule(event=STOPS)
    def stop(self, event: Stop) -> None:
        self.feed(event)

    @rule(answer=ANSWERS)
    def answered(self, answer: Answered) -> None:
        assume(self.prompt_open)
        self.prompt_open = False
        self.feed(answer)

    @rule()
    def agent_gone(self) -> None:
        assume(self.turn.frame_sent)
        self.prompt_open = False
        self.feed(AgentGone(RunnerError("harness_exited", "x")))

    @rule()
    def limit(self) -> None:
        assume(self.turn.phase in (TurnPhase.PREPARING, TurnPhase.PROMPTING))
        self.feed(LimitReached(RunnerError("limit_total", "x")))

    @rule()
    def timer(self) -> None:
        assume(self.timers)
        self.feed(Fired(self.timers.pop()))

    @rule(survivors=st.booleans())
    def reaped(self, survivors: bool) -> None:
        assume(self.reaping)
        self.reaping = False
        self.feed(Reaped(survivors))

    @invariant()
    def never_two_endings(self) -> None:
        assert self.ends == (1 if self.turn.phase is TurnPhase.ENDED else 0)


TestAnyOrder = AnyOrder.TestCase
TestAShell = AShell.TestCase
