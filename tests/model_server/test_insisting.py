"""A model that insists on a command until it had a result."""

from __future__ import annotations

from typing import Any

import pytest

from tests.model_server.script import Item, Step, decide

TOOLS: dict[str, dict[str, Any]] = {"Bash": {"properties": {"command": {}}}}
WANTED = [Item("user", "[[insist:ls]]")]


def step(*more: Item) -> Step:
    return decide([*WANTED, *more], TOOLS)


@pytest.mark.parametrize(
    "more",
    [
        [],
        [Item("assistant", "call"), Item("user", "go on")],
        [Item("assistant", "call"), Item("tool_result", "aborted"), Item("user", "go on")],
        [Item("assistant", "call"), Item("tool_result", "[Request interrupted by user]"), Item("user", "go on")],
    ],
)
def test_it_asks_again(more: list[Item]) -> None:
    tool = step(*more).tool
    assert tool is not None
    assert tool.arguments["command"] == "ls"


def test_a_result_is_a_result() -> None:
    assert step(Item("assistant", "call"), Item("tool_result", "a b")).directive == "tool_done"
    after = [Item("assistant", "call"), Item("tool_result", "a b"), Item("assistant", "fine"), Item("user", "thanks")]
    assert step(*after).directive == "echo"


def test_a_later_directive_wins() -> None:
    assert step(Item("assistant", "call"), Item("user", "[[text:no]]")).chunks == ("no",)
    later = [Item("assistant", "call"), Item("user", "[[text:no]]"), Item("assistant", "no"), Item("user", "and now")]
    assert step(*later).directive == "echo"
