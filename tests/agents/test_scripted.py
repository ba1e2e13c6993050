"""The scripted agent does what its script says: the doubles that other tests stand on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agents import AgentScript, Gate, directive, steps
from tests.agents.census import until


class Wire:
    """A blocking client of one agent process."""

    def __init__(self, script: AgentScript) -> None:
        self.script = script
        self.log = script.log
        self.process = subprocess.Popen(
            script.argv,
            env={"PATH": os.environ["PATH"], **script.env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        self.stdout = self.process.stdout
        self.next_id = 0

    def close(self) -> None:
        self.script.kill()
        self.process.communicate()

    def write(self, frame: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"jsonrpc": "2.0", **frame}).encode() + b"\n")
        self.process.stdin.flush()

    def send(self, method: str, **params: Any) -> int:
        self.next_id += 1
        self.write({"id": self.next_id, "method": method, "params": params})
        return self.next_id

    def prompt(self, text: str = "hi", session: str = "s") -> int:
        return self.send("session/prompt", sessionId=session, prompt=[{"type": "text", "text": text}])

    def cancel(self) -> None:
        self.write({"method": "session/cancel", "params": {"sessionId": "s"}})

    def line(self) -> bytes:
        return self.stdout.readline()

    def next(self) -> Any:
        """The next frame, shortened: a text, a result, an error code or a method."""
        frame = json.loads(self.line())
        if "result" in frame:
            return frame["id"], frame["result"]
        if "error" in frame:
            return frame["id"], frame["error"]["code"]
        if frame["method"] == "session/update":
            update = frame["params"]["update"]
            return update["content"]["text"] if "content" in update else update["sessionUpdate"]
        return frame["method"], frame["id"]


Start = Callable[..., Wire]
CANCELLED = {"stopReason": "cancelled"}
END = {"stopReason": "end_turn"}


@pytest.fixture
def script(tmp_path: Path) -> AgentScript:
    return AgentScript(tmp_path)


@pytest.fixture
def start() -> Iterator[Start]:
    wires: list[Wire] = []

    def run(script: AgentScript) -> Wire:
        wires.append(Wire(script))
        return wires[-1]

    yield run
    for wire in wires:
        wire.close()


def test_polite_without_a_script(script: AgentScript, start: Start) -> None:
    wire = start(script)
    wire.send("initialize", protocolVersion=1)
    assert wire.next()[1]["protocolVersion"] == 1
    wire.send("session/new", cwd="/", mcpServers=[])
    assert wire.next() == (2, {"sessionId": f"scripted-{wire.process.pid}-1"})
    wire.prompt()
    assert [wire.next(), wire.next()] == ["answer 1", (3, END)]
    wire.prompt("and?")
    assert [wire.next(), wire.next()] == ["answer 2", (4, END)]
    wire.cancel()
    assert wire.process.stdin is not None
    wire.process.stdin.close()
    assert wire.process.wait(5) == 0
    wire.process.stdin = None
    assert wire.log.methods() == [
        "initialize",
        "session/new",
        "session/prompt",
        "session/prompt",
        "session/cancel",
    ]
    assert wire.log.prompts() == ["hi", "and?"]
    assert wire.log.pids() == [wire.process.pid]
    assert wire.log.events("eof")


def test_steps_by_ordinal_and_by_directive(script: AgentScript, start: Start) -> None:
    script.on_prompt(steps.text("first"), steps.reply()).on_prompt(steps.text("later"), steps.reply_with(None))
    wire = start(script)
    for expected in (["first", (1, END)], ["later", (2, None)], ["later", (3, None)]):
        wire.prompt()
        assert [wire.next(), wire.next()] == expected
    wire.prompt(directive(steps.usage(), steps.fail(-32000)))
    assert [wire.next(), wire.next()] == ["usage_update", (4, -32000)]


def test_cancel_settles_and_drops_the_rest(script: AgentScript, start: Start) -> None:
    script.on_prompt(steps.text("a"), steps.hang(), steps.text("never"), steps.reply())
    wire = start(script)
    wire.prompt()
    assert wire.next() == "a"
    wire.cancel()
    assert wire.next() == (1, CANCELLED)
    wire.prompt(directive(steps.text("b"), steps.reply()))
    assert [wire.next(), wire.next()] == ["b", (2, END)]


@pytest.mark.parametrize(
    ("step", "answer"),
    [
        (steps.settle("end_turn"), END),
        (steps.settle_error(), -32800),
        (steps.settle_with(None), None),
        (steps.settle(), CANCELLED),
    ],
)
def test_late_answers_to_a_cancel(
    script: AgentScript, start: Start, tmp_path: Path, step: dict[str, Any], answer: Any
) -> None:
    """The cancel is only acknowledged, then answered when the gate opens, then spoken after."""
    gate = Gate(tmp_path / "gate")
    script.on_prompt(steps.text("a"), steps.hang())
    script.on_cancel(steps.text("stopping"), steps.gate(gate), step, steps.text("late"))
    wire = start(script)
    wire.prompt()
    assert wire.next() == "a"
    wire.cancel()
    assert wire.next() == "stopping"
    gate.open()
    assert [wire.next(), wire.next()] == [(1, answer), "late"]
    assert gate.is_reached


def test_a_cancel_that_gets_lost_and_one_that_works(script: AgentScript, start: Start) -> None:
    """The first cancel is swallowed, the repeated one obeyed."""
    script.on_prompt(steps.hang()).on_cancel().on_cancel(steps.settle())
    wire = start(script)
    wire.prompt()
    wire.cancel()
    wire.cancel()
    assert wire.next() == (1, CANCELLED)
    assert len(wire.log.frames("session/cancel")) == 2


def test_second_terminal_with_the_next_prompt(script: AgentScript, start: Start) -> None:
    script.on_prompt(steps.reply_stop("cancelled"))
    script.on_prompt(steps.reply_to(1), steps.text("real"), steps.reply(), steps.reply(again=True))
    wire = start(script)
    wire.prompt()
    wire.prompt()
    got = [wire.next() for _ in range(5)]
    assert sorted(map(str, got[:2])) == sorted(map(str, [(1, CANCELLED), (1, CANCELLED)]))
    assert got[2:] == ["real", (2, END), (2, END)]


@pytest.mark.parametrize(
    ("choice", "verdict", "seen"),
    [
        ({"result": {"outcome": {"outcome": "selected", "optionId": "yes"}}}, "allowed", ["did", (1, END)]),
        ({"result": {"outcome": {"outcome": "selected", "optionId": "no"}}}, "denied", ["did not", (1, END)]),
        ({"error": {"code": -32000, "message": "no"}}, "denied", ["did not", (1, END)]),
        ({"result": {"outcome": {"outcome": "cancelled"}}}, "cancelled", [(1, CANCELLED)]),
    ],
)
def test_permission(script: AgentScript, start: Start, choice: dict[str, Any], verdict: str, seen: list[Any]) -> None:
    question = steps.ask(allowed=[steps.text("did")], denied=[steps.text("did not")])
    script.on_prompt(steps.tool("call-1"), question, steps.reply())
    wire = start(script)
    wire.prompt()
    assert [wire.next(), wire.next()] == ["tool_call", ("session/request_permission", 1)]
    wire.write({"id": 1, **choice})
    assert [wire.next() for _ in seen] == seen
    assert [entry["verdict"] for entry in wire.log.events("answered")] == [verdict]


@pytest.mark.parametrize(("ids", "expected"), [("one", [1, 2]), ("zero", [0, 1]), ("uuid", None)])
def test_two_permissions_at_once(tmp_path: Path, start: Start, ids: str, expected: list[int] | None) -> None:
    """Both are open, answered in reverse order."""
    script = AgentScript(tmp_path, ids=ids)
    script.on_prompt(steps.ask("a", wait=False), steps.ask("b", wait=False), steps.answers(), steps.reply())
    wire = start(script)
    wire.prompt()
    found = [wire.next()[1] for _ in range(2)]
    assert found == expected if expected is not None else all(isinstance(item, str) for item in found)
    for identity in reversed(found):
        wire.write({"id": identity, "result": {"outcome": {"outcome": "selected", "optionId": "yes"}}})
    assert wire.next() == (1, END)
    assert [entry["id"] for entry in wire.log.events("answered")] == found


@pytest.mark.parametrize("size", [65535, 65536, 65537, 1024 * 1024])
def test_lines_of_an_exact_size(script: AgentScript, start: Start, size: int) -> None:
    wire = start(script.on_prompt(steps.line(size), steps.line(size, pieces=7), steps.reply()))
    wire.prompt()
    for _ in range(2):
        line = wire.line()
        assert len(line) == size + 1
        assert json.loads(line)["method"] == "session/update"


def test_noise_flood_and_stderr(script: AgentScript, start: Start) -> None:
    script.on_start(steps.noise()).on_prompt(steps.stderr(5000), steps.flood(300_000), steps.exit_with(3, "last words"))
    wire = start(script)
    for noise in steps.NOISE.values():
        for part in noise.splitlines(keepends=True):
            assert wire.line() == part
    wire.prompt()
    assert wire.line() == b"x" * 300_000
    assert wire.process.stderr is not None
    assert len(wire.process.stderr.read()) == 5000 + len("last words\n")
    assert wire.process.wait(5) == 3


def test_odd_texts_travel(script: AgentScript, start: Start) -> None:
    wire = start(script.on_prompt(steps.text("nul \0 lone \ud800"), steps.raw(b"\xc3\x28\n"), steps.reply()))
    wire.prompt()
    assert rb"nul \u0000 lone \ud800" in wire.line()
    assert wire.line() == b"\xc3\x28\n"


def test_handshake_variants(script: AgentScript, start: Start) -> None:
    script.on_initialize(steps.reply_merged(protocolVersion="1")).on_initialize(
        steps.reply_merged(["protocolVersion", "agentCapabilities"])
    )
    wire = start(script)
    wire.send("initialize")
    assert wire.next()[1]["protocolVersion"] == "1"
    wire.send("initialize")
    assert set(wire.next()[1]) == {"agentInfo", "authMethods"}


def test_silence_gates_and_idle_updates(script: AgentScript, start: Start, tmp_path: Path) -> None:
    """No answer at all, a delayed session/new, an update before any prompt."""
    gate = Gate(tmp_path / "new")
    script.on_initialize().on_new(steps.gate(gate), steps.reply(), steps.text("banner"))
    wire = start(script)
    wire.send("initialize")
    wire.send("session/new")
    gate.open()
    assert wire.next() == (2, {"sessionId": f"scripted-{wire.process.pid}-1"})
    assert wire.next() == "banner"


def test_processes_of_every_kind(script: AgentScript, start: Start) -> None:
    kinds = ("plain", "setsid", "nohup", "deaf", "holds_stdout")
    script.on_prompt(*[steps.spawn(how=kind) for kind in kinds], steps.reply())
    wire = start(script)
    wire.prompt()
    assert wire.next() == (1, END)
    pids = dict(zip(kinds, wire.log.spawned(), strict=True))
    until(
        lambda: {kind for kind in kinds if os.getsid(pids[kind]) == pids[kind]} == {"setsid", "nohup", "holds_stdout"}
    )
    assert {*pids.values(), wire.process.pid} <= set(script.alive())


def test_blocked_by_its_tool_until_the_tool_is_killed(script: AgentScript, start: Start) -> None:
    """DESIGN 3.3.4: some agents cannot answer because their tool blocks."""
    script.on_prompt(steps.run("echo x; sleep 600"), steps.reply_stop("cancelled")).on_cancel(steps.text("noted"))
    wire = start(script)
    wire.prompt()
    wire.cancel()
    assert wire.next() == "noted"
    until(wire.log.spawned)
    os.killpg(wire.log.spawned()[0], signal.SIGKILL)
    assert wire.next() == (1, CANCELLED)


def test_wrapper_that_dies_alone(tmp_path: Path, start: Start) -> None:
    """TERM ends the wrapper, the real agent lives on and ignores it."""
    script = AgentScript(tmp_path, wrap=True, ignore_signals=("TERM", "HUP"), stay=True)
    wire = start(script)
    wire.prompt()
    assert [wire.next(), wire.next()] == ["answer 1", (1, END)]
    (agent,) = script.log.pids()
    assert agent != wire.process.pid
    wire.process.terminate()
    assert wire.process.wait(5) == -signal.SIGTERM
    os.kill(agent, signal.SIGTERM)
    wire.prompt()
    assert wire.next() == "answer 2"


def test_stops_reading(tmp_path: Path, start: Start) -> None:
    script = AgentScript(tmp_path, stop_reading_after="session/prompt")
    wire = start(script)
    wire.prompt()
    assert [wire.next(), wire.next()] == ["answer 1", (1, END)]
    wire.prompt("unread")
    assert wire.log.prompts() == ["hi"]


@pytest.mark.parametrize(
    ("step", "code"), [(steps.exit_with(0), 0), (steps.exit_with(9), 9), (steps.die_by("KILL"), -9)]
)
def test_exits(script: AgentScript, start: Start, step: dict[str, Any], code: int) -> None:
    wire = start(script.on_new(step))
    wire.send("session/new")
    assert wire.process.wait(5) == code


def test_unknown_methods_to_the_client(script: AgentScript, start: Start) -> None:
    script.on_prompt(
        steps.notify("_vendor/progress", percent=5),
        steps.update("brand_new_kind", anything=1),
        steps.request("_vendor/question"),
        steps.reply(),
    )
    wire = start(script)
    wire.prompt()
    assert json.loads(wire.line())["method"] == "_vendor/progress"
    assert wire.next() == "brand_new_kind"
    assert wire.next() == ("_vendor/question", 1)
    wire.write({"id": 1, "error": {"code": -32601, "message": "method not found"}})
    assert wire.next() == (1, END)


async def test_waiting_for_frames_and_gates(script: AgentScript, start: Start, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    wire = start(script.on_prompt(steps.gate(gate, deaf=True), steps.text("still speaking"), steps.reply()))
    wire.prompt()
    await gate.reached()
    wire.cancel()
    await script.log.wait_for_method("session/cancel")
    assert wire.next() == (1, CANCELLED)
    gate.open()
    assert wire.next() == "still speaking"
    assert await script.log.wait_for(lambda log: log.events("replied"))
    with pytest.raises(AssertionError, match="the agent received"):
        await script.log.wait_for(lambda log: log.frames("session/close"), seconds=0.05)
