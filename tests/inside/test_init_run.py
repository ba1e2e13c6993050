"""A command beside the agent: its output, its end, and what a kill of its turn takes."""

from __future__ import annotations

import base64
import os
from typing import Any

from tests.agents.census import until
from tests.inside.cell import MARKER, Cell


def run(cell: Cell, script: str, **more: Any) -> int:
    environment = {"PATH": os.environ["PATH"], MARKER: cell.marker}
    argv = ["/bin/sh", "-c", script]
    return cell.send(op="run", run="t1", argv=argv, env=environment, cwd="/", **more)


def said(cell: Cell) -> bytes:
    outputs = [event for event in cell.events if event["event"] == "output"]
    assert {event["run"] for event in outputs} <= {"t1"}
    return b"".join(base64.b64decode(event["data"]) for event in outputs)


def test_a_command_says_all_and_tells_its_end(cell: Cell) -> None:
    cell.spawn("cat")
    reply = cell.reply(run(cell, "pwd; echo oops >&2; cat; exit 3"))
    assert reply | {"id": 0} == {"id": 0, "ok": True, "code": 3, "signal": None, "truncated": False}
    assert said(cell) == b"/\noops\n", "and its stdin is empty"
    assert cell.say("still there") == "still there"
    assert cell.reply(run(cell, "kill -9 $$"))["signal"] == 9


def test_output_beyond_the_limit_is_dropped_and_the_command_goes_on(cell: Cell) -> None:
    cell.spawn("cat")
    reply = cell.reply(run(cell, "head -c 3000000 /dev/zero; exit 5"))
    assert (reply["code"], reply["truncated"], len(said(cell))) == (5, True, 1024 * 1024)
    cell.events.clear()
    reply = cell.reply(run(cell, "printf 12345", limit=5))
    assert (reply["truncated"], said(cell)) == (False, b"12345")


def test_what_holds_the_pipe_is_not_waited_for_and_goes_with_the_turn(cell: Cell) -> None:
    cell.spawn("cat")
    cell.ok(op="mark", turn="t1")
    assert cell.reply(run(cell, "sleep 600 & setsid sleep 601 & echo started"))["code"] == 0
    assert said(cell) == b"started\n"
    until(lambda: sum("sleep" in command for command in cell.alive().values()) == 2)
    reply = cell.ok(op="kill_turn", turn="t1", seconds=5)
    assert (reply["killed"], reply["survivors"]) == (2, [])
    assert cell.say("still there") == "still there"


def test_a_kill_of_the_turn_ends_the_command(cell: Cell) -> None:
    cell.spawn("cat")
    cell.ok(op="mark", turn="t1")
    running = run(cell, "echo up; sleep 600 | cat")
    cell.event("output")
    killing = cell.send(op="kill_turn", turn="t1", seconds=5)
    replies: dict[int, dict[str, Any]] = {}
    while len(replies) < 2:
        message = cell.receive()
        if "event" not in message:
            replies[message["id"]] = message
    assert replies[running]["signal"] == 9
    assert replies[killing]["survivors"] == []


def test_a_command_needs_an_agent_and_runs_alone(cell: Cell) -> None:
    assert "no agent" in cell.reply(run(cell, "true"))["error"]
    cell.spawn("cat")
    running = run(cell, "echo up; sleep 600")
    cell.event("output")
    assert "runs already" in cell.reply(run(cell, "true"))["error"]
    torn = cell.send(op="teardown", seconds=5)
    assert "torn down" in cell.reply(running)["error"]
    assert cell.reply(torn)["proof"] == "echild"


def test_a_command_that_cannot_start_leaves_nothing(cell: Cell) -> None:
    cell.spawn("cat")
    before = len(os.listdir(f"/proc/{cell.process.pid}/fd"))
    for _ in range(3):
        error = cell.ask(op="run", run="t1", argv=["no-such-command"], env={}, cwd="/")["error"]
        assert "ENOENT" in error
    assert "limit" in cell.ask(op="run", run="t1", argv=["x"], env={}, cwd="/", limit=-1)["error"]
    assert len(os.listdir(f"/proc/{cell.process.pid}/fd")) == before
    assert cell.reply(run(cell, "true"))["code"] == 0
