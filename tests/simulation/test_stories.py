"""Stories of runs that failed, or that are worth keeping: the turn's rules still do what they did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.rules.story import replay
from tests.simulation.run import run_seed

STORIES = sorted((Path(__file__).parent / "stories").glob("*.json"))


@pytest.mark.parametrize("file", STORIES, ids=lambda file: file.stem)
def test_a_kept_story_does_the_same_again(file: Path) -> None:
    items = json.loads(file.read_text())
    assert any(item["machine"] == "turn" for item in items)
    assert replay(items) == []


def test_stories_are_kept() -> None:
    assert STORIES


@pytest.mark.parametrize("seed", range(40))
def test_a_fresh_story_can_be_stepped_again(seed: int) -> None:
    run = run_seed(seed, tell=True)
    for name, items in run.stories.items():
        assert replay(items) == [], name


def test_a_rule_that_changed_is_found() -> None:
    items = json.loads(STORIES[0].read_text())
    turns = [item for item in items if item["machine"] == "turn"]
    turns[-1]["after"]["phase"] = "prompting"
    assert replay(items) != []
