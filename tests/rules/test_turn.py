"""The turn's machine, move by move: the table of ``rules.turn`` as a reader of DESIGN 3.2 and 3.3 would draw it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest

from runner.errors import RunnerError
from runner.rules.turn import (
    LATE,
    TABLE,
    AbortPreparation,
    After,
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
    KillTurn,
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
from runner.rules.turn import known as what_is_known
from runner.terms import Outcome, StopReason, TurnPhase

ADMITTED, PREPARING, PROMPTING, CANCELLING, ENDED = TurnPhase
DEAD = RunnerError("harness_exited", "exit code 1")
SLOW = RunnerError("limit_total", "too long")
TAKEN = RunnerError("superseded", "taken over")
CANCEL, KILL, DRAIN = StopReason.CANCEL, StopReason.KILL, StopReason.DRAIN

CLOSING: list[Effect] = [CancelQuestions(), CloseTools("cancelled")]
FAILING: list[Effect] = [CancelQuestions(), CloseTools("failed")]
CANCELLING_STARTS: list[Effect] = [
    CancelQuestions(),
    CloseTools("cancelled"),
    SendCancel(),
    After("cancel_again", 1.0),
    After("kill_tools", 2.0),
    After("settle", None),
]


def cancelled(settled: bool | None, label: StopReason = CANCEL, **more: Any) -> End:
    return End(Outcome.CANCELLED, "cancelled", settled=settled, label=label, **more)


def failed(error: RunnerError, settled: bool | None = None, label: StopReason | None = None) -> End:
    return End(Outcome.FAILED, settled=settled, error=error, label=label)


def turn(phase: TurnPhase, **state: Any) -> Turn:
    return Turn(phase=phase, **state)


def waits_on(error: RunnerError, label: StopReason | None = None) -> End:
    return End(Outcome.PAUSED, "paused", error=error, label=label)


STOPPED = {"stop": CANCEL}
COLD = {"cold": True}
OVERDUE = RunnerError("execution_lost", "x")
SETTLED = {"stop": CANCEL, "settled": True}

# phase, what is known before, event, effects in order, phase after
MOVES: list[tuple[TurnPhase, dict[str, Any], Event, list[Effect], TurnPhase]] = [
    (ADMITTED, {}, Begin(), [Prepare()], PREPARING),
    (ADMITTED, {}, Stop(CANCEL), [], ADMITTED),
    (ADMITTED, STOPPED, Begin(), [*CLOSING, cancelled(None)], ENDED),
    (ADMITTED, {**STOPPED, "resumes": True}, Begin(), [Prepare()], PREPARING),
    (PREPARING, {}, Prepared(), [SendFrame()], PROMPTING),
    (PREPARING, {}, Prepared(resumed=True), [], PROMPTING),
    (PREPARING, STOPPED, Prepared(), [*CLOSING, cancelled(None)], ENDED),
    (PREPARING, STOPPED, Prepared(resumed=True), CANCELLING_STARTS, CANCELLING),
    (PREPARING, {"stop": KILL}, Prepared(resumed=True), [*CLOSING, cancelled(False, KILL)], ENDED),
    (PREPARING, {}, Stop(CANCEL), [AbortPreparation()], PREPARING),
    (PREPARING, {}, PrepareFailed(DEAD), [*FAILING, failed(DEAD)], ENDED),
    (PREPARING, STOPPED, PrepareFailed(DEAD), [*CLOSING, cancelled(None)], ENDED),
    (PREPARING, {}, ChainCold(), [], PREPARING),
    (PREPARING, {"resumes": True}, ChainCold(), [], PREPARING),
    (PREPARING, COLD, PrepareFailed(DEAD), [waits_on(DEAD)], ENDED),
    (PREPARING, {**COLD, "stop": DRAIN, "stop_error": OVERDUE}, PrepareFailed(DEAD), [waits_on(OVERDUE, DRAIN)], ENDED),
    (PREPARING, {**COLD, **STOPPED}, PrepareFailed(DEAD), [*CLOSING, cancelled(None)], ENDED),
    (PREPARING, {**COLD, "stop": KILL}, PrepareFailed(DEAD), [*CLOSING, cancelled(None, KILL)], ENDED),
    (PREPARING, COLD, Prepared(), [SendFrame()], PROMPTING),
    (PREPARING, {}, LimitReached(SLOW), [AbortPreparation()], PREPARING),
    (PREPARING, STOPPED, LimitReached(SLOW), [], PREPARING),
    (PROMPTING, {}, Stop(CANCEL), CANCELLING_STARTS, CANCELLING),
    (PROMPTING, {}, Stop(DRAIN), CANCELLING_STARTS, CANCELLING),
    (PROMPTING, {}, Stop(KILL), [*CLOSING, cancelled(False, KILL)], ENDED),
    (PROMPTING, {"output": True}, Answered("end_turn"), [*CLOSING, End(Outcome.COMPLETED, "end_turn", True)], ENDED),
    (PROMPTING, {}, AgentGone(DEAD), [*FAILING, failed(DEAD, False)], ENDED),
    (PROMPTING, {}, LimitReached(SLOW), [*FAILING, failed(SLOW, False, StopReason.LIMIT)], ENDED),
    (PROMPTING, {}, Quiet(), [End(Outcome.PAUSED, "paused")], ENDED),
    (CANCELLING, STOPPED, Stop(CANCEL), [], CANCELLING),
    (CANCELLING, STOPPED, Stop(DRAIN), [], CANCELLING),
    (CANCELLING, STOPPED, Stop(KILL), [*CLOSING, cancelled(False, KILL)], ENDED),
    (CANCELLING, SETTLED, Stop(KILL), [*CLOSING, cancelled(True, KILL)], ENDED),
    (CANCELLING, STOPPED, Answered("cancelled"), [Reap()], CANCELLING),
    (CANCELLING, SETTLED, Answered("end_turn"), [], CANCELLING),
    (CANCELLING, STOPPED, AgentGone(DEAD), [*CLOSING, cancelled(False)], ENDED),
    (CANCELLING, SETTLED, AgentGone(DEAD), [*CLOSING, cancelled(True)], ENDED),
    (CANCELLING, STOPPED, CancelUnsent(), [*CLOSING, cancelled(False)], ENDED),
    (CANCELLING, SETTLED, CancelUnsent(), [], CANCELLING),
    (CANCELLING, STOPPED, Fired("cancel_again"), [SendCancel(), After("cancel_again", 1.0)], CANCELLING),
    (CANCELLING, STOPPED, Fired("kill_tools"), [KillTurn()], CANCELLING),
    (CANCELLING, STOPPED, Fired("settle"), [*CLOSING, cancelled(False)], ENDED),
    (CANCELLING, SETTLED, Fired("cancel_again"), [], CANCELLING),
    (CANCELLING, SETTLED, Fired("kill_tools"), [], CANCELLING),
    (CANCELLING, SETTLED, Fired("settle"), [], CANCELLING),
    (CANCELLING, SETTLED, Reaped(False), [*CLOSING, cancelled(True)], ENDED),
    (CANCELLING, SETTLED, Reaped(True), [*CLOSING, cancelled(True, survivors=True)], ENDED),
    (ENDED, {}, Stop(CANCEL), [], ENDED),
    (ENDED, STOPPED, Answered("end_turn"), [], ENDED),
    (ENDED, {}, AgentGone(DEAD), [], ENDED),
    (ENDED, {}, LimitReached(SLOW), [], ENDED),
    (ENDED, STOPPED, Fired("settle"), [], ENDED),
    (ENDED, STOPPED, CancelUnsent(), [], ENDED),
    (ENDED, SETTLED, Reaped(True), [], ENDED),
]


def told(row: tuple[TurnPhase, dict[str, Any], Event, list[Effect], TurnPhase]) -> str:
    phase, known, event, _, _ = row
    details = [str(getattr(event, name)) for name in type(event).__slots__ if name not in ("error", "error_message")]
    word = f"{type(event).__name__}({','.join(text for text in details if text not in ('None', 'False'))})"
    return f"{phase.value}{'+' if known else ''}{'+'.join(f'{name}={value!s}' for name, value in known.items())}-{word}"


@pytest.mark.parametrize("row", MOVES, ids=told)
def test_move(row: tuple[TurnPhase, dict[str, Any], Event, list[Effect], TurnPhase]):
    phase, known, event, effects, after = row
    told: list[Moved] = []
    machine = turn(phase, **known, story=told)
    found = what_is_known(machine)
    assert step(machine, event) == effects
    assert machine.phase is after
    assert told == [(event, found, what_is_known(machine), effects)]


def test_a_new_turn_knows_nothing_yet():
    fresh = Turn()
    assert (fresh.phase, fresh.stop, fresh.stop_error) == (ADMITTED, None, None)
    flags = ("resumes", "frame_sent", "settled", "late_completion", "output", "denied", "cold", "stopping")
    assert [name for name in flags if getattr(fresh, name)] == []


@pytest.mark.parametrize("resumed", [False, True])
def test_a_prompt_counts_as_sent_from_its_claim_on(resumed: bool):
    machine = turn(PREPARING)
    step(machine, Prepared(resumed))
    assert machine.frame_sent


def test_a_chain_that_is_cold_holds_nothing_open_case_f2():
    machine = turn(PREPARING, resumes=True)
    step(machine, ChainCold())
    assert (machine.resumes, machine.cold) == (False, True)
    machine = turn(PREPARING)
    step(machine, ChainCold())
    assert (machine.resumes, machine.cold) == (False, False), "a turn of its own has no chain"


def test_every_move_of_the_table_is_shown_above():
    assert {(row[0], type(row[2])) for row in MOVES if row[0] is not ENDED} == set(TABLE)
    assert {type(row[2]) for row in MOVES if row[0] is ENDED} == LATE


ALL_EVENTS: list[Event] = [
    Begin(),
    Prepared(),
    PrepareFailed(DEAD),
    ChainCold(),
    Stop(CANCEL),
    Answered("end_turn"),
    AgentGone(DEAD),
    LimitReached(SLOW),
    Quiet(),
    CancelUnsent(),
    Fired("settle"),
    Reaped(False),
]
LEGAL = {*TABLE, *((ENDED, event) for event in LATE)}
FORBIDDEN = [(phase, event) for phase, event in product(TurnPhase, ALL_EVENTS) if (phase, type(event)) not in LEGAL]


def test_every_kind_of_event_is_tried():
    assert {type(event) for event in ALL_EVENTS} == set(get_args(Event))


@pytest.mark.parametrize(("phase", "event"), FORBIDDEN, ids=lambda value: getattr(value, "value", type(value).__name__))
def test_an_illegal_move_raises_and_changes_nothing(phase: TurnPhase, event: Event):
    machine = turn(phase, output=True)
    told: list[Moved] = []
    machine.story = told
    before = replace(machine)
    with pytest.raises(IllegalMove):
        step(machine, event)
    assert (machine, told) == (before, [])


@pytest.mark.parametrize("event", [Fired("lunch"), Reaped(False)], ids=["unknown timer", "reaped before settled"])
def test_a_move_that_only_its_details_forbid_changes_nothing_either(event: Event):
    machine = turn(CANCELLING, stop=CANCEL)
    told: list[Moved] = []
    machine.story = told
    before = replace(machine)
    with pytest.raises(IllegalMove):
        step(machine, event)
    assert (machine, told) == (before, [])


def test_stop_answers_the_permissions_before_it_sends_the_cancel():
    effects = step(turn(PROMPTING), Stop(CANCEL))
    kinds = [type(effect) for effect in effects]
    assert kinds.index(CancelQuestions) < kinds.index(CloseTools) < kinds.index(SendCancel) < kinds.index(After)


def test_stop_before_the_turn_began_never_prepares_anything():
    machine = Turn()
    assert step(machine, Stop(CANCEL)) == []
    stopping = [machine.stopping]
    assert step(machine, Begin()) == [*CLOSING, cancelled(None)]
    stopping.append(machine.stopping)
    assert stopping == [True, False]
    assert not machine.frame_sent


def test_stop_while_preparing_gives_the_start_up_and_sends_no_frame():
    machine = turn(PREPARING)
    assert step(machine, Stop(CANCEL)) == [AbortPreparation()]
    assert step(machine, PrepareFailed(DEAD)) == [*CLOSING, cancelled(None)]
    assert not machine.frame_sent


def test_stop_that_loses_against_a_finished_start_sends_no_frame_either():
    machine = turn(PREPARING)
    step(machine, Stop(CANCEL))
    assert SendFrame() not in step(machine, Prepared())
    assert machine.phase is ENDED


def test_stop_of_a_resumed_chain_settles_the_prompt_that_its_agent_has_open():
    machine = Turn(resumes=True)
    step(machine, Stop(CANCEL))
    assert step(machine, Begin()) == [Prepare()]
    assert step(machine, Prepared(resumed=True)) == CANCELLING_STARTS
    step(machine, Answered("cancelled"))
    assert step(machine, Reaped(False))[-1] == cancelled(True)


def test_stop_behind_the_ending_is_obsolete_case_a15():
    machine = turn(PROMPTING, output=True)
    ended = step(machine, Answered("end_turn"))[-1]
    assert isinstance(ended, End)
    assert ended.outcome is Outcome.COMPLETED
    assert step(machine, Stop(CANCEL)) == []
    assert machine.stop is None
    assert not machine.stopping


def test_a_second_terminal_is_dropped_case_a4():
    """Case A4: whether the turn still reaps or has ended, the duplicate orders nothing and changes no fact."""
    machine = turn(PROMPTING, output=True)
    step(machine, Stop(CANCEL))
    step(machine, Answered("cancelled"))
    assert step(machine, Answered("end_turn")) == []
    assert step(machine, Reaped(False))[-1] == cancelled(True, late_completion=False)
    assert step(machine, Answered("end_turn")) == []


def test_the_cancel_is_repeated_each_second_until_the_harness_settles():
    machine = turn(CANCELLING, stop=CANCEL)
    for _ in range(9):
        assert step(machine, Fired("cancel_again")) == [SendCancel(), After("cancel_again", 1.0)]
    step(machine, Answered("cancelled"))
    assert step(machine, Fired("cancel_again")) == []


def test_what_the_harness_said_stays_true_while_its_tools_are_reaped():
    """``cancel_settled`` says what the harness did: a timer, a kill or an exit during the reap does not unsay it."""
    for event in (Stop(KILL), AgentGone(DEAD)):
        machine = turn(CANCELLING, stop=CANCEL)
        step(machine, Answered("cancelled"))
        step(machine, Fired("settle"))
        end = step(machine, event)[-1]
        assert isinstance(end, End)
        assert end.settled is True


@pytest.mark.parametrize("reason", [KILL, StopReason.DELETE])
@pytest.mark.parametrize("phase", [PROMPTING, CANCELLING])
def test_kill_asks_nobody(phase: TurnPhase, reason: StopReason):
    machine = turn(phase, stop=CANCEL if phase is CANCELLING else None)
    effects = step(machine, Stop(reason))
    assert effects == [*CLOSING, cancelled(False, reason)]
    assert SendCancel() not in effects


@pytest.mark.parametrize(
    ("first", "second", "label"),
    [
        (CANCEL, StopReason.STEER, CANCEL),
        (CANCEL, DRAIN, DRAIN),
        (CANCEL, StopReason.LEASE_LOST, StopReason.LEASE_LOST),
        (DRAIN, CANCEL, DRAIN),
        (DRAIN, StopReason.LEASE_LOST, DRAIN),
        (KILL, CANCEL, KILL),
        (KILL, DRAIN, KILL),
        (DRAIN, KILL, KILL),
    ],
)
def test_the_strongest_label_stays(first: StopReason, second: StopReason, label: StopReason):
    """A weaker Stop behind a stronger one neither keeps a doomed sandbox nor waits for a killed agent."""
    machine = turn(PREPARING)
    step(machine, Stop(first))
    step(machine, Stop(second))
    assert machine.stop is label


def test_a_lost_lease_ends_the_turn_as_superseded_whatever_comes_later():
    machine = turn(PROMPTING)
    step(machine, Stop(StopReason.LEASE_LOST, TAKEN))
    step(machine, Stop(DRAIN))
    end = step(machine, Stop(KILL))[-1]
    assert isinstance(end, End)
    assert (end.outcome, end.error, end.stop_reason) == (Outcome.FAILED, TAKEN, None)


def test_a_limit_closes_what_is_open_and_ends_the_turn_case_i1():
    """Case I1: one clear terminal error; the open tool calls fail, nobody keeps the session."""
    effects = step(turn(PROMPTING, output=True), LimitReached(SLOW))
    assert effects == [*FAILING, failed(SLOW, False, StopReason.LIMIT)]


def test_a_limit_while_preparing_gives_the_start_up_and_fails():
    machine = turn(PREPARING)
    assert step(machine, LimitReached(SLOW)) == [AbortPreparation()]
    assert step(machine, PrepareFailed(DEAD)) == [*FAILING, failed(SLOW, None, StopReason.LIMIT)]


def test_a_limit_cannot_outrun_a_stop():
    machine = turn(PREPARING, stop=CANCEL)
    assert step(machine, LimitReached(SLOW)) == []
    assert machine.stop is CANCEL


def test_a_pause_answers_no_question_and_closes_no_tool_call_case_a18():
    """Case A18: the questions stay open on the agent's side; deferring its tool calls is the shell's."""
    machine = turn(PROMPTING, output=True)
    assert step(machine, Quiet()) == [End(Outcome.PAUSED, "paused")]
    assert machine.phase is ENDED


@pytest.mark.parametrize(
    ("event", "status"),
    [(Answered("end_turn"), "cancelled"), (AgentGone(DEAD), "failed"), (LimitReached(SLOW), "failed")],
    ids=["answered", "agent gone", "limit"],
)
def test_every_other_ending_gives_open_tool_calls_theirs_case_a18(event: Event, status: str):
    effects = step(turn(PROMPTING, output=True), event)
    assert effects[:2] == [CancelQuestions(), CloseTools(status)]
    assert isinstance(effects[-1], End)
