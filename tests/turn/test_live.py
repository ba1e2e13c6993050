"""The inside of a seat: tool calls as last reported, and who owns what its agent says (cases A18, E8, L3)."""

from __future__ import annotations

from typing import Any

import pytest

from runner.acp.connection import Closed, Inbox, Item, PermissionAsked, Updates
from runner.errors import RunnerError
from runner.rules.pool import Seat
from runner.turn.live import LiveSeat, OpenTool

GONE = Closed(RunnerError("harness_exited", "exit code 0"))
MODE = {"sessionUpdate": "current_mode_update", "currentModeId": "plan"}
OPTIONS = {"sessionUpdate": "config_option_update", "configOptions": [{"id": "m", "currentValue": "b"}, "junk"]}
TEXT = {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": "banner"}}


class FakeConnection:
    """Keeps what it answered; ``broken`` as one whose agent is gone."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any]] = []
        self.broken = False

    def respond(self, key: int, result: Any) -> bool:
        if self.broken:
            raise ConnectionError
        self.answers.append((key, result))
        return True


def seat() -> tuple[LiveSeat, Any]:
    connection: Any = FakeConnection()
    booked = Seat(("p", "s"), "s1", 1, "local", {})
    nothing: Any = None
    return LiveSeat(booked, nothing, connection, Inbox(lambda: None), "agent-session", mode="default"), connection


def arrive(live: LiveSeat, *items: Item) -> None:
    for item in items:
        if isinstance(item, Updates):
            live.inbox.put_updates(item.updates, 1)
        else:
            live.inbox.put(item)
    live.inbox.notify()


@pytest.mark.parametrize(
    ("statuses", "running", "ended"),
    [
        (["pending"], False, False),
        (["pending", "in_progress"], True, False),
        (["in_progress", "completed"], False, True),
        (["in_progress", "failed"], False, True),
        (["cancelled"], False, True),
        (["in_progress", None], True, False),
    ],
)
def test_a_tool_call_as_last_reported_case_a18(statuses: list[str | None], running: bool, ended: bool):
    tool = OpenTool({"tool_call_id": "t", "title": "build"}, 0.0)
    for status in statuses:
        tool.merge({"tool_call_id": "t", **({"status": status} if status else {"title": "build it"})})
    assert (tool.running, tool.ended) == (running, ended)
    assert tool.data["title"] == ("build" if None not in statuses else "build it")


def test_an_idle_agents_words_are_nobodys_its_facts_are_kept_its_questions_cancelled_case_e8():
    live, connection = seat()
    exits: list[bool] = []
    live.watch_idle(lambda: exits.append(True))
    arrive(live, Updates([TEXT]), PermissionAsked(7, {}), Updates([MODE, OPTIONS]))
    assert (live.stray_items, live.held, exits) == (2, [], [])
    assert (live.mode, live.config_options) == ("plan", [{"id": "m", "currentValue": "b"}])
    assert connection.answers == [(7, {"outcome": {"outcome": "cancelled"}})]


@pytest.mark.parametrize("before", [False, True])
def test_an_exit_is_told_once_it_comes_or_when_it_came_before_case_l3(before: bool):
    live, connection = seat()
    connection.broken = True
    exits: list[bool] = []
    if before:
        arrive(live, PermissionAsked(1, {}), GONE)
    live.watch_idle(lambda: exits.append(True))
    if not before:
        arrive(live, PermissionAsked(1, {}), GONE)
    assert (exits, live.alive) == ([True], False)


def test_a_turn_begins_with_what_the_agent_told_about_itself_and_nothing_else_case_e8():
    live, connection = seat()
    arrive(live, Updates([TEXT, MODE]), PermissionAsked(7, {}), Updates([TEXT]))
    live.take()
    assert (live.held, live.mode) == ([Updates([MODE])], "plan")
    assert [key for key, _ in connection.answers] == [7]
    assert len(live.inbox) == 0


def test_a_paused_chains_words_wait_for_the_turn_that_resumes_it():
    live, connection = seat()
    live.prompt_request = 3
    arrive(live, Updates([TEXT]), PermissionAsked(7, {}))
    live.take()
    assert (len(live.inbox), live.held, connection.answers) == (2, [], [])


def test_nobody_listens_to_a_seat_that_is_torn_down():
    live, _ = seat()
    exits: list[bool] = []
    live.watch_idle(lambda: exits.append(True))
    live.leave()
    arrive(live, GONE)
    assert exits == []


@pytest.mark.parametrize("info", [{}, {"mode": 5}, {"config_options": "x"}, {"mode": None, "config_options": None}])
def test_nonsense_teaches_nothing(info: dict[str, Any]):
    live, _ = seat()
    live.learn(info)
    assert (live.mode, live.config_options) == ("default", [])
