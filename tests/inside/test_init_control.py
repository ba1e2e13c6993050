"""The control channel of the cell init: spawn, exit reports, bounds, and what it does with nonsense."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.agents.census import alive_with, until
from tests.inside.cell import INIT, MARKER, Cell


def test_ready_says_that_orphans_come_home(cell: Cell) -> None:
    assert cell.event("ready") == {"event": "ready", "pid": cell.process.pid, "subreaper": True}


def test_agent_has_only_the_given_environment_and_descriptors(cell: Cell) -> None:
    """Case K1: neither the init nor the agent holds anything of the caller's environment or open files."""
    os.environ["LEAKED_FROM_RUNNER"] = "secret"
    try:
        script = (
            "import os,json;print(json.dumps([dict(os.environ), sorted(os.listdir('/proc/self/fd')), os.getcwd()]))"
        )
        cell.spawn(sys.executable, "-I", "-S", "-c", script, env={"ONLY": "this"}, cwd="/tmp")
        environment, descriptors, cwd = json.loads(cell.line())
    finally:
        del os.environ["LEAKED_FROM_RUNNER"]
    environment.pop("LC_CTYPE", None)
    assert environment == {"PATH": os.environ["PATH"], MARKER: cell.marker, "ONLY": "this"}
    assert descriptors == ["0", "1", "2", "3"], "3 is the listing itself"
    assert cwd == "/tmp"
    init_environment = Path(f"/proc/{cell.process.pid}/environ").read_bytes().split(b"\0")
    assert not [item for item in init_environment if item.startswith(b"LEAKED")]


def test_agent_leads_a_session_with_default_signals(cell: Cell) -> None:
    pid = cell.spawn("cat")
    assert os.getsid(pid) == pid
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = int(status.split("SigIgn:")[1].split()[0], 16)
    blocked = int(status.split("SigBlk:")[1].split()[0], 16)
    assert (ignored, blocked) == (0, 0)


def test_stdio_ends_with_the_agent(cell: Cell) -> None:
    """The init holds no copy of the agent's pipes: the end of stdout arrives, and stdin breaks."""
    cell.spawn("sh", "-c", "echo out; echo err >&2")
    assert cell.line() == "out"
    assert cell.line() == ""
    assert os.read(cell.stderr, 100) == b"err\n"
    assert os.read(cell.stderr, 100) == b""
    cell.event("exited")
    with pytest.raises(BrokenPipeError):
        cell.write("anyone?")


@pytest.mark.parametrize(
    ("command", "code", "number"),
    [("exit 0", 0, None), ("exit 7", 7, None), ("kill -KILL $$", None, 9), ("kill -TERM $$", None, 15)],
)
def test_exit_report(cell: Cell, command: str, code: int | None, number: int | None) -> None:
    """How the agent ended is known, and the init stays until it is told."""
    pid = cell.spawn("sh", "-c", command)
    assert cell.event("exited") == {"event": "exited", "pid": pid, "code": code, "signal": number}
    assert cell.ok(op="ps")["agent"] is None
    assert cell.ok(op="signal", signal=15)["delivered"] is False
    assert cell.process.poll() is None


def test_exits_of_other_processes_are_not_reported(cell: Cell) -> None:
    cell.spawn("sh", "-c", "(setsid sh -c 'exit 3' &) ; read line; echo $line")
    assert cell.say("still here") == "still here"
    assert cell.ok(op="teardown")["proof"] == "echild"
    assert [event["event"] for event in cell.events] == ["ready", "exited"]


def test_signal_reaches_the_agent(cell: Cell) -> None:
    pid = cell.spawn("cat")
    assert cell.ok(op="signal", signal=int(signal.SIGTERM))["delivered"] is True
    assert cell.event("exited") == {"event": "exited", "pid": pid, "code": None, "signal": 15}


def test_spawn_errors_name_stage_and_reason(cell: Cell, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    plain = tmp_path / "plain.txt"
    plain.write_text("text")
    for argv, cwd, expected in (
        (["no-such-program-anywhere"], "/", "exec: ENOENT"),
        (["/no/such/program"], "/", "exec: ENOENT"),
        ([str(plain)], "/", "exec: EACCES"),
        (["cat"], "/no/such/directory", "cwd: ENOENT"),
        (["cat\0"], "/", "a NUL character"),
    ):
        reply = cell.ask(op="spawn", argv=argv, env={"PATH": os.environ["PATH"]}, cwd=cwd)
        assert reply["ok"] is False
        assert reply["error"].startswith(expected)
    assert cell.alive() == {cell.process.pid: cell.alive()[cell.process.pid]}
    cell.spawn("cat")
    assert cell.say("after all") == "after all"
    assert "already" in cell.ask(op="spawn", argv=["cat"], env={}, cwd="/")["error"]


def test_program_is_looked_up_in_the_agents_own_path(cell: Cell, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    program = tmp_path / "only-here"
    program.write_text("#!/bin/sh\necho found $1\n")
    program.chmod(0o755)
    cell.spawn("only-here", "me", env={"PATH": f"/nowhere:{tmp_path}:/bin"})
    assert cell.line() == "found me"


NONSENSE = [
    b"not json",
    b"[1,2]",
    b'"text"',
    b"null",
    b"{}",
    b'{"id":1}',
    b'{"id":1,"op":5}',
    b'{"id":1,"op":"fly"}',
    b'{"id":1,"op":"spawn"}',
    b'{"id":1,"op":"spawn","argv":[],"env":{},"cwd":"/"}',
    b'{"id":1,"op":"spawn","argv":[""],"env":{},"cwd":"/"}',
    b'{"id":1,"op":"spawn","argv":["cat"],"env":{"A":1},"cwd":"/"}',
    b'{"id":1,"op":"spawn","argv":["cat"],"env":{"A=B\\u0000":"x"},"cwd":"/"}',
    b'{"id":1,"op":"spawn","argv":["cat"],"env":{},"cwd":"/","keep":[""]}',
    b'{"id":1,"op":"mark"}',
    b'{"id":1,"op":"mark","turn":["t"]}',
    b'{"id":1,"op":"kill_turn","turn":"t","seconds":-1}',
    b'{"id":1,"op":"kill_turn","turn":"t"}',
    b'{"id":1,"op":"signal","signal":true}',
    b'{"id":1,"op":"signal","signal":900}',
    b'{"id":1,"op":"teardown","grace_seconds":"soon"}',
    b'{"id":1,"op":"teardown","seconds":1e9}',
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b'{"id":' + b"9" * 10_000 + b"}",
    b"x" * (5 * 1024 * 1024),
]


@pytest.mark.parametrize("line", NONSENSE, ids=lambda line: line[:40].decode("latin-1"))
def test_nonsense_is_refused_and_survived(line: bytes) -> None:
    with Cell() as cell:
        cell.control.sendall(line + b"\n\n  \n")
        assert cell.event("ready")
        assert cell.receive()["ok"] is False
        cell.spawn("cat")
        assert cell.say("still serving") == "still serving"


def test_requests_may_arrive_in_pieces_and_together() -> None:
    with Cell() as cell:
        line = json.dumps({"id": "a", "op": "ps"}).encode() + b"\n"
        for byte in line:
            cell.control.sendall(bytes([byte]))
            time.sleep(0.0002)
        assert cell.reply("a")["processes"] == []
        cell.control.sendall(line.replace(b'"a"', b'"b"') + line.replace(b'"a"', b'"c"'))
        assert cell.reply("b")["ok"]
        assert cell.reply("c")["ok"]


def test_a_peer_that_does_not_read_cannot_block_the_init() -> None:
    """Replies are bounded: the init reads on only when they are taken, and still reports and ends."""
    with Cell() as cell:
        cell.spawn("sh", "-c", "for i in 1 2 3 4 5 6 7 8 9; do sleep 600 & done; wait")
        cell.control.settimeout(0.5)
        line = json.dumps({"id": 1, "op": "ps"}).encode() + b"\n"
        with pytest.raises(TimeoutError):
            cell.control.sendall(line * 1_000_000)
        resident = int(Path(f"/proc/{cell.process.pid}/statm").read_text().split()[1]) * 4096
        assert resident < 60_000_000
        cell.control.close()
        assert cell.process.wait(10) == 0


def test_ps_tells_marked_from_new(cell: Cell) -> None:
    agent = cell.spawn("sh", "-c", "sleep 600 & while read line; do $line & echo ok; done")
    until(lambda: "sleep 600 " in cell.alive().values())
    cell.ok(op="mark", turn="t")
    assert cell.say("sleep 500") == "ok"
    until(lambda: "sleep 500 " in cell.alive().values())
    listing = cell.ok(op="ps")
    marked = {process["command"]: process["marked"] for process in listing["processes"]}
    assert listing["agent"] == agent
    assert marked["sleep 600"] is True
    assert marked["sleep 500"] is False
    assert {process["ppid"] for process in listing["processes"]} == {cell.process.pid, agent}


def test_a_killed_runner_leaves_nobody() -> None:
    """A SIGKILLed runner cannot close anything itself; the kernel ends the channel, and the init tears down."""
    marker = f"killed-runner-{os.getpid()}"
    script = (
        "import os,socket,subprocess,sys,json\n"
        "a,b=socket.socketpair()\n"
        f"p=subprocess.Popen([sys.executable,'-I','-S',{str(INIT)!r},'--control-fd',str(b.fileno())],"
        "pass_fds=[b.fileno()],start_new_session=True)\n"
        "b.close()\n"
        f"env={{'PATH':os.environ['PATH'],{MARKER!r}:{marker!r}}}\n"
        "agent=['sh','-c','setsid nohup sleep 600 & trap \"\" TERM HUP; sleep 600']\n"
        "a.sendall(json.dumps({'id':1,'op':'spawn','argv':agent,'env':env,'cwd':'/'}).encode()+b'\\n')\n"
        "import time; time.sleep(600)\n"
    )
    runner = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, MARKER: marker},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: len(alive_with(f"{MARKER}={marker}")) >= 5, what="runner, init, agent and two children")
    finally:
        runner.kill()
        runner.wait()
    until(lambda: alive_with(f"{MARKER}={marker}") == {}, what="an empty cell")


def test_a_runner_that_is_gone_before_the_first_word(cell: Cell) -> None:
    cell.control.close()
    assert cell.process.wait(10) == 0


def test_only_one_use_of_the_program() -> None:
    wrong = subprocess.run([sys.executable, "-I", "-S", str(INIT), "--control"], capture_output=True, check=False)
    assert (wrong.returncode, wrong.stderr) == (2, b"usage: init.py --control-fd N [--stdio N N N]\n")


def test_idle_init_uses_no_processor_time(cell: Cell) -> None:
    cell.spawn("cat")
    cell.say("x")

    def ticks() -> int:
        fields = Path(f"/proc/{cell.process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = ticks()
    time.sleep(0.3)
    assert ticks() - before <= 1


def test_channel_may_be_half_closed_by_the_runner(cell: Cell) -> None:
    cell.spawn("sh", "-c", "sleep 600 & sleep 600")
    cell.control.shutdown(socket.SHUT_WR)
    assert cell.process.wait(10) == 0
