"""The real command line, server and demo agent, each a process of its own."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runner.resources import resource_path

COMMAND = [sys.executable, "-m", "runner.cli.main"]
SECONDS = 30

CONFIG = """
[turn]
settle_seconds = 1
drain_seconds = 2
[harness.mine]
command = {command}
read = {read}
"""


@dataclass
class Shell:
    """Runs commands on one state directory; remembers what it started."""

    directory: Path
    started: list[subprocess.Popen[str]]

    @property
    def environ(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith("ACP_RUNNER_")}
        return {**own, "ACP_RUNNER_STATE_DIR": str(self.directory / "state"), "TERM": "dumb"}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=self.directory,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        stdout, stderr = process.communicate(timeout=SECONDS)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def result(self, *arguments: str) -> dict[str, Any]:
        ran = self.run("prompt", "--json", *arguments)
        last: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
        assert last["kind"] == "result", ran.stderr
        return last["result"]

    def processes(self) -> list[int]:
        """Everybody with this state directory in the environment or on the command line, but not this test."""
        mark = str(self.directory / "state").encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    told = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                except OSError:
                    continue
                if mark in told:
                    found.append(int(entry.name))
        return found


def until(done: Callable[[], Any], seconds: float = SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := done()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return value


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    command = [sys.executable, str(resource_path("sandboxes", "inside", "demo_agent.py"))]
    shown = json.dumps([str(Path(command[1]).parent)])
    (tmp_path / "acp-runner.toml").write_text(CONFIG.format(command=json.dumps(command), read=shown))
    made = Shell(tmp_path, [])
    try:
        yield made
    finally:
        for process in made.started:
            if process.poll() is None:
                process.terminate()
            process.communicate(timeout=SECONDS)
        assert until(lambda: not made.processes())


@pytest.fixture
def server(shell: Shell) -> subprocess.Popen[str]:
    process = shell.start("serve", "--port", "0")
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    assert set(ready) == {"ready", "url", "replica_id"}
    assert ready["ready"] is True
    return process


@pytest.mark.usefixtures("server")
def test_two_prompts_of_a_custom_harness_the_second_is_a_hit(shell: Shell) -> None:
    first = shell.result("-s", "a", "--harness", "mine", "/stream 3")
    second = shell.result("-s", "a", "/stream 3")
    assert (first["ok"], first["start"], first["text"]) == (True, "cold", "0 1 2 ")
    assert (second["ok"], second["start"]) == (True, "hit")


@pytest.mark.usefixtures("server")
def test_two_at_once_exactly_one_is_admitted(shell: Shell) -> None:
    """The other ends with exit code 3, at once; the admitted one is not disturbed."""
    shell.result("-s", "a", "/stream 1")
    both = [shell.start("prompt", "-s", "a", "/sleep 4") for _ in range(2)]
    codes = sorted(process.wait(SECONDS) for process in both)
    assert codes == [0, 3]


@pytest.mark.usefixtures("server")
def test_stop_of_a_hanging_turn_keeps_the_agent_warm(shell: Shell) -> None:
    hanging = shell.start("prompt", "-s", "a", "--json", "/hang")
    until(lambda: running_turn(shell, "a"))
    stopped = shell.run("sessions", "stop", "a", "--json")
    assert json.loads(stopped.stdout)["outcome"] == "stopped"
    stdout, _ = hanging.communicate(timeout=SECONDS)
    assert hanging.returncode == 1
    result = json.loads(stdout.splitlines()[-1])["result"]
    assert (result["outcome"], result["cancel_settled"]) == ("cancelled", True)
    assert shell.result("-s", "a", "/stream 1")["start"] == "hit"


@pytest.mark.usefixtures("server")
def test_ctrl_c_stops_the_turn(shell: Shell) -> None:
    hanging = shell.start("prompt", "-s", "a", "/hang")
    until(lambda: running_turn(shell, "a"))
    hanging.send_signal(signal.SIGINT)
    _, stderr = hanging.communicate(timeout=SECONDS)
    assert hanging.returncode == 1
    assert "acp-runner: stopped" in stderr
    assert json.loads(shell.run("sessions", "show", "a", "--json").stdout)["state"] == "idle"


def running_turn(shell: Shell, session: str) -> Any:
    shown = shell.run("sessions", "show", session, "--json")
    return shown.returncode == 0 and json.loads(shown.stdout)["running_turn"]


@pytest.mark.usefixtures("server")
def test_a_question_is_exit_4_and_its_printed_command_answers_it(shell: Shell) -> None:
    asked = shell.run("prompt", "-s", "a", "/ask")
    assert asked.returncode == 4
    command = next(line.split() for line in asked.stderr.splitlines() if "acp-runner approve" in line)
    answered = shell.run(*command[1:])
    assert (answered.returncode, "consumed" in answered.stderr) == (0, True)
    until(lambda: json.loads(shell.run("sessions", "show", "a", "--json").stdout)["state"] == "idle")
    assert shell.result("-s", "a", "/stream 1")["start"] == "hit"


@pytest.mark.usefixtures("server")
def test_a_form_is_filled_in_by_its_printed_command(shell: Shell) -> None:
    asked = shell.run("prompt", "-s", "a", "/form")
    assert asked.returncode == 4
    command = next(line for line in asked.stderr.splitlines() if "acp-runner approve" in line)
    answered = shell.run(*shlex.split(command.replace("name=…", "name=Ada Lovelace"))[1:])
    assert (answered.returncode, "consumed" in answered.stderr) == (0, True)
    until(lambda: json.loads(shell.run("sessions", "show", "a", "--json").stdout)["state"] == "idle")
    assert shell.run("prompt", "-s", "a", "/form").returncode == 4
    wrong = shell.run("approve", "--allow", "--set", "name=x", "--set", "times=10")
    assert (wrong.returncode, "content.times" in wrong.stderr) == (1, True)
    assert shell.run("approve", "--deny").returncode == 0


def test_without_a_server_one_is_started_for_the_call(shell: Shell) -> None:
    ran = shell.run("prompt", "/stream 3")
    assert (ran.returncode, ran.stdout.strip()) == (0, "0 1 2")
    assert not (shell.directory / "state" / "server.json").exists()
    assert until(lambda: not shell.processes())
    assert "acp-runner serve" in shell.run("sessions").stderr


def test_a_server_of_one_call_does_not_outlive_its_client(shell: Shell) -> None:
    client = shell.start("prompt", "-s", "a", "/hang")
    until((shell.directory / "state" / "server.json").exists)
    client.kill()
    client.communicate(timeout=SECONDS)
    assert until(lambda: not shell.processes())


@pytest.mark.usefixtures("server")
def test_a_second_serve_on_one_state_directory_is_refused(shell: Shell) -> None:
    second = shell.run("serve", "--port", "0")
    assert second.returncode == 1
    assert "Traceback" not in second.stderr
    assert shell.result("-s", "a", "/stream 1")["ok"]


@pytest.mark.usefixtures("server")
def test_a_port_that_is_taken_is_one_line(shell: Shell, tmp_path: Path) -> None:
    url = json.loads((shell.directory / "state" / "server.json").read_text())["url"]
    other = shell.run("serve", "--port", url.rpartition(":")[2], "--state-dir", str(tmp_path / "other"))
    assert other.returncode == 1
    assert "Traceback" not in other.stderr
    assert "cannot serve" in other.stderr


def test_sigterm_drains_and_leaves_nobody(shell: Shell, server: subprocess.Popen[str]) -> None:
    shell.result("-s", "a", "/stream 1")
    assert len(shell.processes()) >= 2
    server.terminate()
    assert server.wait(SECONDS) == 0
    assert until(lambda: not shell.processes())
    assert not (shell.directory / "state" / "server.json").exists()
