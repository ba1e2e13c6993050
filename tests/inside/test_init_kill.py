"""The cell init kills what a turn started, and nothing else (DESIGN 3.3.4, 3.3.7)."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from tests.agents.census import until
from tests.inside.cell import Cell

HOSTILE = str(Path(__file__).with_name("hostile.py"))
LAME = Path(__file__).with_name("lame_init.py")
EVERY_KIND = ("plain", "setsid", "nohup", "daemon", "pair", "deaf", "stopped", "loop", "loop")


def start(cell: Cell, **env: str) -> int:
    """The hostile agent, ready; its pid."""
    pid = cell.spawn(sys.executable, HOSTILE, env=env)
    assert cell.line() == f"ready {pid}"
    return pid


def test_every_hostile_child_dies_and_agent_and_helper_stay(cell: Cell) -> None:
    """Cases D4, D9: children that left the group and the session die; the helper answers with its old pid."""
    agent = start(cell)
    helper = cell.say("helper")
    before = set(cell.alive())
    for turn in range(3):
        cell.ok(op="mark", turn=f"turn-{turn}")
        for kind in EVERY_KIND:
            cell.say(kind)
        until(lambda: len(cell.alive()) >= len(before) + len(EVERY_KIND), what="all hostile processes")
        reply = cell.ok(op="kill_turn", turn=f"turn-{turn}", seconds=5)
        assert reply["survivors"] == []
        assert reply["killed"] >= len(EVERY_KIND)
        assert set(cell.alive()) == before
        assert cell.say("ping") == helper
    assert agent in before


def test_processes_of_earlier_turns_are_kept(cell: Cell) -> None:
    """What an earlier turn left running is not the next turn's."""
    start(cell)
    cell.ok(op="mark", turn="one")
    cell.say("setsid")
    left = until(lambda: [pid for pid, line in cell.alive().items() if "sleep 600" in line])
    cell.ok(op="mark", turn="two")
    cell.say("nohup")
    assert cell.ok(op="kill_turn", turn="two", seconds=5)["survivors"] == []
    assert set(left) <= set(cell.alive())
    assert cell.ok(op="kill_turn", turn="one", seconds=5)["killed"] >= 1
    assert not set(left) & set(cell.alive())


def test_a_job_of_an_earlier_turn_that_keeps_forking_is_no_survivor(cell: Cell) -> None:
    """Case D9: a kept job starts a new child for each that is killed; the later turn's own processes still all die."""
    start(cell)
    cell.ok(op="mark", turn="one")
    cell.say("nohup")
    # A child of the loop looks like it until it runs its own command.
    job = min(until(lambda: [pid for pid, line in cell.alive().items() if "while :; do" in line]))
    for turn in range(4):
        cell.ok(op="mark", turn=f"later-{turn}")
        cell.say("setsid")
        cell.say("loop")
        own = until(lambda: [pid for pid, line in cell.alive().items() if "sleep 600" in line])
        assert cell.ok(op="kill_turn", turn=f"later-{turn}", seconds=5)["survivors"] == []
        assert not set(own) & set(cell.alive())
        assert job in cell.alive()


def test_kill_of_a_turn_without_processes_kills_nobody(cell: Cell) -> None:
    start(cell)
    cell.ok(op="mark", turn="t")
    assert cell.ok(op="kill_turn", turn="t", seconds=1) | {"id": 0} == {
        "id": 0,
        "ok": True,
        "killed": 0,
        "survivors": [],
    }


def test_children_of_a_wrapped_agent_die(cell: Cell) -> None:
    """Case D2: the agent is a wrapper that forked the real one; what the real one starts is the turn's all the same."""
    cell.spawn("sh", "-c", f"{sys.executable} {HOSTILE}; exit $?")
    assert cell.line().startswith("ready")
    before = set(cell.alive())
    cell.ok(op="mark", turn="t")
    cell.say("nohup")
    cell.say("plain")
    assert cell.ok(op="kill_turn", turn="t", seconds=5)["killed"] >= 2
    assert set(cell.alive()) == before
    assert cell.say("hello") == "hello"


def test_named_helpers_keep_their_children_and_kept_programs_only_themselves(cell: Cell) -> None:
    """A helper pattern shelters a whole subtree, a keep pattern one process."""
    cell.spawn("sh", env={"HOME": "/"}, helpers=["helper-program"], keep=["lazy-part"])
    cell.ok(op="mark", turn="t")
    cell.write(
        "sh -c ': helper-program; sleep 601 & wait' & sh -c ': lazy-part; sleep 602 & kill -STOP $$' & echo done"
    )
    assert cell.line() == "done"
    until(lambda: {"sleep 601 ", "sleep 602 "} <= set(cell.alive().values()))
    assert cell.ok(op="kill_turn", turn="t", seconds=5)["survivors"] == []
    lines = set(cell.alive().values())
    assert "sleep 601 " in lines and "sleep 602 " not in lines
    assert any("lazy-part" in line for line in lines)


def test_the_agent_dies_too_when_it_is_not_spared(cell: Cell) -> None:
    pid = start(cell)
    cell.ok(op="mark", turn="t")
    assert cell.ok(op="kill_turn", turn="t", spare_agent=False, seconds=5)["survivors"] == []
    assert cell.event("exited") == {"event": "exited", "pid": pid, "code": None, "signal": signal.SIGKILL}


def test_unmarked_turn_is_refused(cell: Cell) -> None:
    start(cell)
    assert cell.ask(op="kill_turn", turn="never")["error"] == "the turn has no mark"


def test_survivors_are_reported_at_the_deadline(tmp_path: Path) -> None:
    """Case D10: a kill that finds targets and kills none is seen, for a turn and for the whole cell."""
    gate = tmp_path / "signals-work"
    with Cell(init=(str(LAME), str(gate))) as cell:
        start(cell)
        cell.ok(op="mark", turn="t")
        cell.say("plain")
        victim = until(lambda: [pid for pid, line in cell.alive().items() if "sleep 600" in line])
        assert cell.ok(op="kill_turn", turn="t", seconds=0.1)["survivors"] == victim
        reply = cell.ok(op="teardown", seconds=0.1)
        assert reply["proof"] is None and set(victim) <= set(reply["survivors"])
        assert cell.process.poll() is None
        gate.touch()
        assert cell.process.wait(5) == 0


def test_marks_cost_less_than_a_turn_can_notice(cell: Cell) -> None:
    """The mark is on the way of every prompt: a thousandth of a second is far above what it takes."""
    start(cell)
    cell.say("helper")
    costs = []
    for number in range(200):
        began = time.perf_counter()
        cell.ok(op="mark", turn=f"t{number}")
        costs.append(time.perf_counter() - began)
    assert sorted(costs)[100] < 0.005


@pytest.mark.parametrize("grace", [0, 0.2])
def test_teardown_is_proven(cell: Cell, grace: float) -> None:
    """Case D2: whoever ignores stdin's end and every polite signal is killed, and the kernel says so."""
    start(cell, STAY="1")
    cell.say("helper")
    for kind in EVERY_KIND:
        cell.say(kind)
    cell.close_stdin()
    reply = cell.ok(op="teardown", grace_seconds=grace, seconds=10)
    assert reply["proof"] == "echild" and reply["survivors"] == []
    assert cell.process.wait(5) == 0
    assert cell.alive() == {}


def test_teardown_waits_for_an_agent_that_goes_by_itself(cell: Cell) -> None:
    pid = start(cell)
    cell.close_stdin()
    assert cell.ok(op="teardown", grace_seconds=10)["proof"] == "echild"
    assert cell.event("exited") == {"event": "exited", "pid": pid, "code": 0, "signal": None}


def test_teardown_ends_a_kill_under_way(cell: Cell) -> None:
    start(cell)
    cell.ok(op="mark", turn="t")
    for _ in range(3):
        cell.say("loop")
    kill = cell.send(op="kill_turn", turn="t", seconds=30)
    teardown = cell.send(op="teardown")
    answers = [cell.receive() for _ in range(3)]
    assert {answer.get("id") for answer in answers if "id" in answer} <= {kill, teardown}
    while not any(answer.get("id") == teardown for answer in answers):
        answers.append(cell.receive())
    assert next(answer for answer in answers if answer.get("id") == teardown)["proof"] == "echild"


def test_end_of_the_control_channel_tears_all_down(cell: Cell) -> None:
    start(cell, STAY="1")
    for kind in EVERY_KIND:
        cell.say(kind)
    cell.control.close()
    assert cell.process.wait(10) == 0
    assert cell.alive() == {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_polite_signal_to_the_init_tears_all_down(cell: Cell, number: int) -> None:
    start(cell, STAY="1")
    for kind in EVERY_KIND:
        cell.say(kind)
    cell.process.send_signal(number)
    assert cell.process.wait(10) == 0
    assert cell.alive() == {}
