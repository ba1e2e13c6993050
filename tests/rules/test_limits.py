"""Limits of a turn (DESIGN 4.1): each alone, all together, suspended where a human or a tool is waited for."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.errors import CODES
from runner.rules.limits import SENTENCES, Due, Limits, Progress, first_due

OFF = Limits(None, None, None, None, None)
STILL = Progress(started_at=0, prompted_at=10, last_life=10, updated=False, output=False)
SPOKE = replace(STILL, updated=True, output=True, last_life=50)


def due(limits: Limits, progress: Progress) -> tuple[float, str] | None:
    found = first_due(limits, progress)
    return (found.at, found.code) if found is not None else None


@pytest.mark.parametrize(
    ("limits", "progress", "expected"),
    [
        (replace(OFF, total_seconds=100), STILL, (100, "limit_total")),
        (replace(OFF, total_seconds=100), SPOKE, (100, "limit_total")),
        (replace(OFF, idle_seconds=100), STILL, (110, "limit_idle")),
        (replace(OFF, idle_seconds=100), replace(STILL, last_life=2), (110, "limit_idle")),
        (replace(OFF, idle_seconds=100), SPOKE, (150, "limit_idle")),
        (replace(OFF, first_update_seconds=100), STILL, (110, "limit_first_update")),
        (replace(OFF, first_update_seconds=100), replace(STILL, last_life=90), (110, "limit_first_update")),
        (replace(OFF, first_update_seconds=100), replace(STILL, updated=True), None),
        (replace(OFF, quiet_seconds=100), SPOKE, (150, "limit_quiet")),
        (replace(OFF, quiet_seconds=100), replace(SPOKE, output=False), None),
        (replace(OFF, quiet_seconds=100), replace(SPOKE, tools=[(40, "make")]), None),
        (replace(OFF, quiet_seconds=100), replace(SPOKE, open_tools=True), None),
        (replace(OFF, tool_call_seconds=100), replace(SPOKE, tools=[(40, "make")]), (140, "limit_tool_call")),
        (replace(OFF, tool_call_seconds=100), replace(SPOKE, tools=[(40, "b"), (30, "a")]), (130, "limit_tool_call")),
        (replace(OFF, tool_call_seconds=100), SPOKE, None),
    ],
)
def test_each_limit_alone(limits: Limits, progress: Progress, expected: tuple[float, str] | None):
    assert due(limits, progress) == expected


def test_the_defaults_are_those_of_the_design():
    assert Limits() == Limits(None, 1800, 120, 1800, 300)


def test_null_switches_each_off_case_i7():
    """Case I7: whatever the turn does, no limit means no limit, and each can be set without the others."""
    busy = replace(SPOKE, tools=[(0, "make")])
    for progress in (STILL, SPOKE, busy, replace(busy, asking=True)):
        assert first_due(OFF, progress) is None
    for field in fields(Limits):
        seen = {found.code for p in (STILL, SPOKE, busy) if (found := first_due(replace(OFF, **{field.name: 5.0}), p))}
        assert seen == {f"limit_{field.name.removesuffix('_seconds')}"}


def test_a_long_healthy_turn_has_no_wall_clock_by_default_case_i3():
    """Case I3: 46 minutes of steady progress; what runs out next is always measured from the last sign of life."""
    for minute in range(1, 47):
        life = 60.0 * minute
        found = first_due(Limits(), replace(SPOKE, last_life=life))
        assert found is not None
        assert found.at > life + 60, found


def test_a_long_tool_call_is_named_case_i1():
    found = first_due(Limits(), replace(SPOKE, last_life=1700, tools=[(40, "pytest -x"), (900, "sleep")]))
    assert found == Due(1840, "limit_tool_call", "The tool call “pytest -x” ran longer than 1800 s.")


def test_any_message_is_a_sign_of_life_case_e10():
    """Case E10: ten minutes of nothing but unknown notifications; life moves the idle limit, but is no update."""
    noise = replace(STILL, last_life=600)
    assert due(replace(OFF, idle_seconds=300), noise) == (900, "limit_idle")
    assert due(replace(OFF, first_update_seconds=120), noise) == (130, "limit_first_update")


def test_while_a_human_is_asked_only_the_total_and_other_tools_count():
    asking = replace(SPOKE, asking=True)
    assert first_due(replace(Limits(), total_seconds=None), asking) is None
    assert due(Limits(total_seconds=4000), asking) == (4000, "limit_total")
    assert due(Limits(), replace(asking, tools=[(40, "make")])) == (1840, "limit_tool_call")
    assert first_due(Limits(), replace(STILL, asking=True)) is None


def test_every_limit_has_a_code_and_a_sentence():
    assert set(SENTENCES) == {code for code in CODES if code.startswith("limit_")}
    assert {f"limit_{field.name.removesuffix('_seconds')}" for field in fields(Limits)} == set(SENTENCES)


seconds = st.none() | st.floats(0.1, 1e5)
moments = st.floats(0, 1e5)
progresses = st.builds(
    Progress,
    started_at=moments,
    prompted_at=moments,
    last_life=moments,
    updated=st.booleans(),
    output=st.booleans(),
    tools=st.lists(st.tuples(moments, st.text(max_size=5)), max_size=3),
    open_tools=st.booleans(),
    asking=st.booleans(),
)


@given(st.builds(Limits, seconds, seconds, seconds, seconds, seconds), progresses)
def test_the_first_of_all_is_the_first_of_each(limits: Limits, progress: Progress):
    alone = [first_due(replace(OFF, **{f.name: getattr(limits, f.name)}), progress) for f in fields(Limits)]
    earliest = min((found.at for found in alone if found is not None), default=None)
    together = first_due(limits, progress)
    assert (together.at if together else None) == earliest
