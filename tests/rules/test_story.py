"""The story of a session's machines: what is kept, how it is shown, and that a turn's moves can be stepped again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.rules import story
from runner.rules.turn import (
    AgentGone,
    Answered,
    Begin,
    Event,
    Fired,
    LimitReached,
    Prepared,
    PrepareFailed,
    Quiet,
    Reaped,
    Stop,
    Turn,
    step,
)
from runner.terms import StopReason

KEY = ("p", "s")
SECRET = "sk-very-secret"


class Book:
    """Stories at a clock that counts."""

    def __init__(self) -> None:
        self.now = 0
        self.stories = story.Stories(self.tick)

    def tick(self) -> int:
        self.now += 1
        return self.now

    def live(self, *events: Event, turn_id: str = "t1", **state: Any) -> list[dict[str, Any]]:
        """One turn's moves as a client reads them."""
        machine = Turn(**state, story=self.stories.turn(KEY, turn_id))
        for event in events:
            step(machine, event)
        return self.shown()

    def shown(self) -> list[dict[str, Any]]:
        rendered = [story.render(told) for told in self.stories.of(KEY)]
        items: list[dict[str, Any]] = json.loads(json.dumps(rendered))
        assert items == rendered
        return items


LIVES: list[tuple[str, list[Event], dict[str, Any]]] = [
    ("completed", [Begin(), Prepared(), Answered("end_turn")], {"output": True}),
    ("empty", [Begin(), Prepared(), Answered("end_turn")], {}),
    (
        "stopped",
        [Begin(), Prepared(), Stop(StopReason.CANCEL), Fired("cancel_again"), Answered("cancelled"), Reaped(False)],
        {},
    ),
    ("killed", [Begin(), Prepared(), Stop(StopReason.CANCEL), Stop(StopReason.KILL)], {}),
    ("superseded", [Begin(), Stop(StopReason.LEASE_LOST, RunnerError("superseded", SECRET)), Prepared()], {}),
    ("not prepared", [Begin(), PrepareFailed(RunnerError("sandbox_start_failed", SECRET))], {}),
    ("exited", [Begin(), Prepared(), AgentGone(RunnerError("harness_exited", SECRET))], {}),
    ("too long", [Begin(), Prepared(), LimitReached(RunnerError("limit_total", SECRET))], {}),
    ("refused", [Begin(), Prepared(), Answered(None, -32000, SECRET)], {}),
    ("paused", [Begin(), Prepared(resumed=True), Quiet()], {"resumes": True}),
]


@pytest.mark.parametrize(("events", "state"), [row[1:] for row in LIVES], ids=[row[0] for row in LIVES])
def test_a_told_turn_does_the_same_again(events: list[Event], state: dict[str, Any]) -> None:
    items = Book().live(*events, **state)
    assert [item["event"]["name"] for item in items] == [type(event).__name__ for event in events]
    assert story.replay(items) == []


@pytest.mark.parametrize(("events", "state"), [row[1:] for row in LIVES], ids=[row[0] for row in LIVES])
def test_nothing_that_an_agent_or_a_client_said_is_in_it(events: list[Event], state: dict[str, Any]) -> None:
    assert SECRET not in json.dumps(Book().live(*events, **state))


def test_a_move_as_a_client_reads_it() -> None:
    items = Book().live(Begin(), Prepared(), Stop(StopReason.CANCEL))
    assert items[0] == {
        "at": 1,
        "machine": "turn",
        "id": "t1",
        "event": {"name": "Begin"},
        "before": {"phase": "admitted"},
        "after": {"phase": "preparing"},
        "effects": [{"name": "Prepare"}],
    }
    assert items[2]["event"] == {"name": "Stop", "reason": "cancel"}
    assert items[2]["after"] == {"phase": "cancelling", "stop": "cancel", "frame_sent": True}
    assert items[2]["effects"][-1] == {"name": "After", "timer": "settle", "seconds": None}


def test_words_with_details_for_the_other_machines() -> None:
    book = Book()
    book.stories.tell(KEY, "pool", "seat_1", ("checkout", {"reason": "miss"}), None, "busy", ["destroy"])
    book.stories.tell(KEY, "lease", "t1", "running", None, {"epoch": 1, "owner": "rep_1"})
    assert [(item["event"], item["before"], item["after"], item["effects"]) for item in book.shown()] == [
        ({"name": "checkout", "reason": "miss"}, {}, {"state": "busy"}, [{"name": "destroy"}]),
        ({"name": "running"}, {}, {"epoch": 1, "owner": "rep_1"}, []),
    ]
    assert story.replay(book.shown()) == []


def test_what_the_rules_do_otherwise_now_is_found() -> None:
    items = Book().live(Begin(), Prepared(), Stop(StopReason.CANCEL), Answered("cancelled"), Reaped(False))
    items[3]["effects"] = []
    items[4]["after"]["phase"] = "cancelling"
    found = story.replay(items)
    assert len(found) == 2
    assert found[0].startswith("move 3 of t1, Answered: effects was []")
    assert found[1].startswith("move 4 of t1, Reaped: after was")


def test_a_move_that_is_illegal_now_is_found() -> None:
    items = Book().live(Begin())
    items[0]["event"] = {"name": "Reaped", "survivors": False}
    assert story.replay(items) == ["move 0 of t1, Reaped: is illegal: Reaped while admitted"]


def test_updates_between_two_moves_are_taken_from_the_story() -> None:
    book = Book()
    machine = Turn(story=book.stories.turn(KEY, "t1"))
    step(machine, Begin())
    step(machine, Prepared())
    machine.output = True
    step(machine, Answered("end_turn"))
    items = book.shown()
    assert items[-1]["effects"][-1]["outcome"] == "completed"
    assert story.replay(items) == []


def test_a_story_that_lost_its_beginning_is_stepped_from_where_it_begins() -> None:
    items = Book().live(Begin(), Prepared(), Stop(StopReason.CANCEL), Answered("cancelled"), Reaped(True))
    assert story.replay(items[2:]) == []


def test_turns_of_one_session_are_told_apart() -> None:
    book = Book()
    first, second = (Turn(story=book.stories.turn(KEY, name)) for name in ("t1", "t2"))
    for event in (Begin(), Prepared()):
        step(first, event)
        step(second, event)
    assert story.replay(book.shown()) == []


def test_the_ring_keeps_the_newest_moves() -> None:
    book = Book()
    for number in range(story.KEPT_MOVES + 3):
        book.stories.tell(KEY, "pool", f"seat_{number}", "torn")
    assert [told.id for told in book.stories.of(KEY)] == [f"seat_{n}" for n in range(3, story.KEPT_MOVES + 3)]


def test_the_sessions_that_are_told_of_are_bounded() -> None:
    book = Book()
    for number in range(story.KEPT_SESSIONS + 1):
        book.stories.tell(("p", f"s{number}"), "pool", "seat", "torn")
    assert len(book.stories.sessions()) == story.KEPT_SESSIONS
    assert book.stories.of(("p", "s0")) == []


def test_an_ended_session_is_forgotten() -> None:
    book = Book()
    book.stories.tell(KEY, "pool", "seat", "torn")
    book.stories.forget(KEY)
    book.stories.forget(("p", "never"))
    assert book.stories.of(KEY) == []
