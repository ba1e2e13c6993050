"""Which turn a command means, what it came to, and what a sweep does about one that is open."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.rules.command import (
    DELIVERIES,
    MOVES,
    OPEN,
    REASONS,
    SWEEP_SECONDS,
    Apply,
    Deliver,
    Execution,
    Found,
    Leave,
    Mismatch,
    NotRunning,
    Settle,
    care,
    settled,
    target,
)
from runner.terms import CommandKind, CommandOutcome, CommandState, Outcome, StopReason

CANCEL, KILL = CommandKind.CANCEL, CommandKind.KILL
OLD, NEW, NEXT = Execution("old", 1), Execution("new", 9), Execution("next", 2)


def test_every_kind_has_a_label_of_its_own() -> None:
    assert set(REASONS) == set(CommandKind)
    assert len(set(REASONS.values())) == len(CommandKind)
    cooperative = {kind for kind, reason in REASONS.items() if reason.cooperative}
    assert cooperative == set(CommandKind) - {KILL}
    assert REASONS[KILL] is StopReason.KILL


def test_open_states_are_those_with_moves() -> None:
    assert set(MOVES) == set(CommandState)
    assert {state for state, moves in MOVES.items() if moves} == OPEN
    assert CommandState.CLAIMED in MOVES[CommandState.CLAIMED], "a lapsed claim can be claimed again"


@pytest.mark.parametrize(
    ("expected", "current", "starting", "ended", "found"),
    [
        ("old", OLD, (), False, Apply(("old",))),
        ("new", NEW, (), False, Apply(("new",))),
        ("next", None, (NEXT,), False, Apply(("next",))),
        ("next", OLD, (NEXT,), False, Apply(("next",))),
        ("old", None, (), True, NotRunning()),
        ("old", None, (), False, Mismatch(None)),
        ("old", NEW, (), True, Mismatch("new")),
        ("other", OLD, (NEXT,), False, Mismatch("old")),
        (None, None, (), False, NotRunning()),
        (None, OLD, (), False, Apply(("old",))),
        (None, OLD, (NEXT,), False, Apply(("old",))),
        (None, NEW, (), False, Mismatch("new")),
        (None, None, (NEXT,), False, Apply(("next",))),
        (None, None, (NEXT, NEW), False, Apply(("next",))),
        (None, None, (NEW,), False, Mismatch("new")),
    ],
)
def test_a_stop_means_what_was_there_when_it_arrived_case_b9(
    expected: str | None,
    current: Execution | None,
    starting: tuple[Execution, ...],
    ended: bool,
    found: object,
) -> None:
    assert target(CANCEL, expected, current, starting, 5, ended=ended) == found


def test_a_kill_means_everything_that_is_there() -> None:
    assert target(KILL, None, OLD, (NEXT,), 5) == Apply(("old", "next"))
    assert target(KILL, None, OLD, (NEW,), 5) == Apply(("old",))
    assert target(KILL, None, None, (), 5) == NotRunning()


_EXECUTIONS = st.builds(Execution, st.sampled_from("abc"), st.integers(0, 9))


@given(
    kind=st.sampled_from(CommandKind),
    expected=st.none() | st.sampled_from("abcd"),
    current=st.none() | _EXECUTIONS,
    starting=st.lists(_EXECUTIONS, max_size=3),
    arrived=st.integers(0, 9),
    ended=st.booleans(),
)
def test_nothing_is_stopped_that_was_not_meant(
    kind: CommandKind,
    expected: str | None,
    current: Execution | None,
    starting: list[Execution],
    arrived: int,
    ended: bool,
) -> None:
    found = target(kind, expected, current, starting, arrived, ended=ended)
    there = [*([current] if current else []), *starting]
    if isinstance(found, Apply):
        assert found.turn_ids
        if expected is not None:
            assert found.turn_ids == (expected,)
        else:
            assert all(
                any(run.turn_id == name and run.started_at <= arrived for run in there) for name in found.turn_ids
            )
    if isinstance(found, NotRunning):
        assert current is None
    if not there and expected is None:
        assert found == NotRunning()


@pytest.mark.parametrize(
    ("outcome", "code", "state", "word"),
    [
        (Outcome.CANCELLED, None, "applied", "stopped"),
        (Outcome.COMPLETED, None, "obsolete", "not_running"),
        (Outcome.PAUSED, None, "obsolete", "not_running"),
        (Outcome.FAILED, "harness_exited", "obsolete", "not_running"),
        (Outcome.FAILED, "superseded", "obsolete", "superseded"),
        (Outcome.LOST, "execution_lost", "obsolete", "lost"),
    ],
)
def test_what_a_command_came_to_case_a15(outcome: Outcome, code: str | None, state: str, word: str) -> None:
    assert settled(outcome, code) == (state, word)


PENDING = Found(CommandState.PENDING, 0, 10_000, 0, None, None, turn_open=False)
CLAIMED = replace(PENDING, state=CommandState.CLAIMED, deliveries=1, claim_ms=1, claimed_by="r1")
APPLIED = replace(PENDING, state=CommandState.APPLIED, deliveries=1, claimed_by="r1")


@pytest.mark.parametrize(
    ("found", "step"),
    [
        (PENDING, Settle(CommandState.OBSOLETE, CommandOutcome.NOT_RUNNING)),
        (replace(PENDING, age_ms=int(SWEEP_SECONDS * 1000) - 1), Leave()),
        (replace(PENDING, turn_open=True), Leave()),
        (replace(PENDING, holder="r1"), Deliver()),
        (replace(PENDING, turn_outcome=Outcome.PAUSED), Deliver()),
        (replace(PENDING, holder="r1", deliveries=DELIVERIES), Settle(CommandState.OBSOLETE, CommandOutcome.FAILED)),
        (CLAIMED, Leave()),
        (replace(CLAIMED, claim_ms=0), Settle(CommandState.OBSOLETE, CommandOutcome.NOT_RUNNING)),
        (replace(CLAIMED, claim_ms=0, holder="r1"), Deliver()),
        (replace(CLAIMED, deliveries=DELIVERIES), Leave()),
        (replace(CLAIMED, claim_ms=-1, deliveries=DELIVERIES), Settle(CommandState.OBSOLETE, CommandOutcome.FAILED)),
        (replace(CLAIMED, turn_outcome=Outcome.LOST), Settle(CommandState.OBSOLETE, CommandOutcome.LOST)),
        (replace(PENDING, turn_outcome=Outcome.CANCELLED), Settle(CommandState.APPLIED, CommandOutcome.STOPPED)),
        (
            replace(PENDING, turn_outcome=Outcome.FAILED, turn_error="superseded"),
            Settle(CommandState.OBSOLETE, CommandOutcome.SUPERSEDED),
        ),
        (APPLIED, Settle(CommandState.APPLIED, CommandOutcome.NOT_RUNNING)),
        (replace(APPLIED, turn_open=True), Leave()),
        (replace(APPLIED, holder="r1"), Leave()),
        (replace(APPLIED, holder="r2"), Settle(CommandState.APPLIED, CommandOutcome.NOT_RUNNING)),
        (replace(APPLIED, turn_outcome=Outcome.PAUSED, holder="r1"), Leave()),
    ],
)
def test_what_a_sweep_does_case_m9(found: Found, step: object) -> None:
    assert care(found) == step
