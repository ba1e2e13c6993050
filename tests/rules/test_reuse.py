"""What becomes of a sandbox: the table of DESIGN 3.4 row by row, and the reuse verdict of 3.5."""

from __future__ import annotations

from itertools import product

import pytest

from runner.errors import RunnerError
from runner.rules.reuse import (
    FACETS,
    Destroyed,
    Parked,
    Windows,
    after_ending,
    changed_facet,
    reuse_verdict,
)
from runner.rules.turn import End
from runner.terms import Outcome, SeatState, StopReason

WINDOWS = Windows(idle=60, approval=600, stopped=300)
LIMIT = RunnerError("limit_idle", "x")
COOPERATIVE = [StopReason.CANCEL, StopReason.ABORT_PROMPT, StopReason.STEER, StopReason.NEW_PROMPT]
OTHERS = [reason for reason in StopReason if reason not in COOPERATIVE]

COMPLETED = End(Outcome.COMPLETED, "end_turn", settled=True)
PAUSED = End(Outcome.PAUSED, "paused")


def stopped(label: StopReason | None = StopReason.CANCEL, settled: bool | None = True, survivors: bool = False) -> End:
    return End(Outcome.CANCELLED, "cancelled", settled=settled, label=label, survivors=survivors)


def fate(end: End, *, kept: bool = True, alive: bool = True, claimed: bool = False) -> Parked | Destroyed:
    return after_ending(end, WINDOWS, kept=kept, agent_alive=alive, claimed=claimed)


@pytest.mark.parametrize(
    ("end", "parked"),
    [
        (COMPLETED, Parked(SeatState.IDLE, 60)),
        (PAUSED, Parked(SeatState.AWAITING_APPROVAL, 600)),
        *[(stopped(label), Parked(SeatState.IDLE, 300)) for label in COOPERATIVE],
        (stopped(settled=None), Parked(SeatState.IDLE, 300)),
    ],
    ids=["completed", "paused", *COOPERATIVE, "stopped before its frame was sent"],
)
def test_the_allowlist(end: End, parked: Parked):
    assert fate(end) == parked


@pytest.mark.parametrize(
    ("end", "verdict"),
    [
        *[(stopped(label), label.value) for label in OTHERS],
        (stopped(None), "unlabelled"),
        (stopped(settled=False), "not_settled"),
        (stopped(survivors=True), "survivors"),
        (End(Outcome.FAILED, settled=True, error=RunnerError("empty_turn", "x")), "empty_turn"),
        (End(Outcome.FAILED, settled=False, error=LIMIT, label=StopReason.LIMIT), "limit_idle"),
        (End(Outcome.FAILED, settled=False), "failed"),
        (End(Outcome.LOST), "lost"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize(("kept", "claimed"), list(product([True, False], repeat=2)))
def test_everything_else_destroys_and_readers_do_not_matter(end: End, verdict: str, kept: bool, claimed: bool):
    assert fate(end, kept=kept, claimed=claimed) == Destroyed(verdict)


@pytest.mark.parametrize("end", [COMPLETED, stopped()], ids=["completed", "stopped"])
def test_without_a_reader_the_sandbox_goes_whatever_the_abort_says(end: End):
    assert fate(end, kept=False) == Destroyed("no_reader")


@pytest.mark.parametrize("end", [COMPLETED, stopped()], ids=["completed", "stopped"])
def test_a_seat_that_passes_to_an_admitted_prompt_asks_for_no_reader(end: End):
    assert isinstance(fate(end, kept=False, claimed=True), Parked)


def test_a_paused_turn_is_parked_without_a_reader():
    assert fate(PAUSED, kept=False) == Parked(SeatState.AWAITING_APPROVAL, 600)


@pytest.mark.parametrize("end", [COMPLETED, PAUSED, stopped()], ids=["completed", "paused", "stopped"])
def test_a_dead_agent_is_never_parked_case_l3(end: End):
    assert fate(end, alive=False) == Destroyed("agent_exited")


def test_an_error_answer_to_a_stop_keeps_the_sandbox_warm_case_a16():
    """Case A16: only the label, the settling and the reap decide, not the words of the answer."""
    assert isinstance(fate(stopped()), Parked)


def test_an_empty_turn_is_no_point_to_continue_from_case_l1():
    assert fate(End(Outcome.FAILED, settled=True, error=RunnerError("empty_turn", "x"))) == Destroyed("empty_turn")


FACTS = dict.fromkeys(FACETS, "1")


def test_the_same_facts_fit():
    assert changed_facet(FACTS, FACTS) is None
    assert changed_facet(FACTS, dict(FACTS)) is None
    assert reuse_verdict(FACTS, dict(FACTS), None, 0) is None


@pytest.mark.parametrize("facet", FACETS)
def test_each_changed_or_missing_facet_is_named_case_c12(facet: str):
    assert reuse_verdict(FACTS, {**FACTS, facet: "2"}, None, 0) == f"changed:{facet}"
    less = {name: value for name, value in FACTS.items() if name != facet}
    assert changed_facet(FACTS, less) == changed_facet(less, FACTS) == facet


def test_the_first_of_several_changes_is_named():
    assert changed_facet(FACTS, {**FACTS, "patches": "2", "env": "2"}) == "env"


@pytest.mark.parametrize(
    ("expire_ms", "verdict"),
    [(None, None), (160_001, None), (160_000, "credentials_expiring"), (0, "credentials_expiring")],
)
def test_credentials_need_a_minute_to_live_case_n1(expire_ms: int | None, verdict: str | None):
    assert reuse_verdict(FACTS, FACTS, expire_ms, 100_000) == verdict


def test_a_changed_facet_is_named_before_expiring_credentials():
    assert reuse_verdict(FACTS, {**FACTS, "secrets": "2"}, 0, 100_000) == "changed:secrets"
