"""Which agent session may be gone on with, and how (cases M6, I6)."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from runner.rules.resume import (
    MAX_FAILURES,
    AgentSession,
    Place,
    Proven,
    came_back_empty,
    failures_of,
    obstacle,
    way,
)

HERE = Place("demo", "f1", "local", "/w", "home-1")
KNOWN = AgentSession("native-1", HERE)


def test_a_known_agent_session_at_its_own_place_may_be_tried() -> None:
    assert obstacle(KNOWN, HERE, "load") is None
    assert obstacle(KNOWN, HERE, "resume") is None


@pytest.mark.parametrize(
    ("known", "here", "proven", "why"),
    [
        (None, HERE, "load", "no_agent_session"),
        (KNOWN, replace(HERE, harness="codex"), "load", "changed:harness"),
        (KNOWN, replace(HERE, facet="f2"), "load", "changed:harness"),
        (KNOWN, HERE, "none", "not_proven"),
        (KNOWN, replace(HERE, provider="daytona"), "load", "changed:provider"),
        (KNOWN, replace(HERE, workspace="/other"), "load", "changed:workspace"),
        (KNOWN, replace(HERE, home="home-2"), "load", "home_lost"),
        (replace(KNOWN, failures=MAX_FAILURES), HERE, "load", "failed_before"),
    ],
)
def test_what_stands_in_its_way(known: AgentSession | None, here: Place, proven: Proven, why: str) -> None:
    assert obstacle(known, here, proven) == why


@pytest.mark.parametrize(
    ("proven", "loads", "resumes", "expected"),
    [
        ("none", True, True, None),
        ("load", True, True, "load"),
        ("load", False, True, None),
        ("resume", True, True, "resume"),
        ("resume", False, True, "resume"),
        ("resume", True, False, "load"),
        ("resume", False, False, None),
    ],
)
def test_the_way_needs_proof_and_an_offer(proven: Proven, loads: bool, resumes: bool, expected: str | None) -> None:
    """Case M6: measured, not trusted."""
    assert way(proven, loads=loads, resumes=resumes) == expected


def test_a_load_without_a_replay_is_a_failure() -> None:
    assert came_back_empty("load", 0)
    assert not came_back_empty("load", 1)
    assert not came_back_empty("resume", 0)


def test_failures_add_up_to_a_budget_until_the_harness_changes() -> None:
    """Case I6: a bad load never loops."""
    known = KNOWN
    for _ in range(MAX_FAILURES):
        assert obstacle(known, HERE, "load") is None
        known = known.failed(surely=True)
    assert obstacle(known, HERE, "load") == "failed_before"
    assert failures_of(known, replace(HERE, home="home-2")) == MAX_FAILURES
    assert failures_of(known, replace(HERE, facet="f2")) == 0
    assert failures_of(None, HERE) == 0


def test_a_session_that_never_answered_has_nothing_to_load() -> None:
    """Its refusal says nothing about the harness: a first turn may end before the agent keeps anything."""
    assert KNOWN.failed(surely=False).failures == 0
    assert KNOWN.failed(surely=True).failures == 1
    answered = KNOWN.works(resumed=False)
    assert answered.failed(surely=False).failures == 1
    failed = answered.failed(surely=True)
    assert failed.works(resumed=False).failures == 1
    assert failed.works(resumed=True).failures == 0


def test_it_is_stored_as_json_and_read_back() -> None:
    known = replace(KNOWN, failures=1, answered=True)
    assert AgentSession.of(json.loads(json.dumps(known.as_json()))) == known


@pytest.mark.parametrize(
    "stored",
    [
        None,
        [],
        {},
        {"agent_session_id": "a", "place": None},
        {"agent_session_id": 5, "place": HERE.__class__.__slots__},
        {"agent_session_id": "a", "place": {"harness": "demo"}},
        {**KNOWN.as_json(), "agent_session_id": None},
        {**KNOWN.as_json(), "failures": "many"},
    ],
)
def test_anything_else_is_none(stored: object) -> None:
    assert AgentSession.of(stored) is None
