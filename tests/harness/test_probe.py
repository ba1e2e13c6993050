"""The probe against agents of every manner: it ends in time, says what it saw, leaves nobody."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from runner.config import CustomHarness
from runner.errors import RunnerError
from runner.harness.catalogue import Catalogue
from runner.harness.installer import CheckResult, check
from runner.harness.probe import Initialized, probe

ANSWER = """
import json, os, sys
request = json.loads(sys.stdin.readline())
open({pid!r}, "w").write(str(os.getpid()))
info = {{"name": "tiny", "version": "1.2"}}
result = {{"protocolVersion": request["params"]["protocolVersion"], "agentInfo": info}}
sys.stdout.write("booting\\n[1]\\nnull\\n" + json.dumps({{"method": "x", "id": 1, "params": {{}}}}) + "\\n")
sys.stdout.write(json.dumps({{"jsonrpc": "2.0", "id": 1, "result": result}}) + "\\n")
sys.stdout.flush()
import subprocess, time
subprocess.Popen(["sleep", "300"])
time.sleep(300)
"""


def catalogue(tmp_path: Path, program: str, *words: str) -> Catalogue:
    (tmp_path / "agent.py").write_text(program)
    command = list(words) or [sys.executable, "agent.py"]
    return Catalogue.build({"mine": CustomHarness(command=command)}, tmp_path, base_dir=tmp_path)


def ask(tmp_path: Path, program: str, seconds: float = 20.0) -> Initialized:
    return probe(catalogue(tmp_path, program).get("mine"), tmp_path, seconds)


def group_members(pgid: int) -> list[str]:
    """Processes of a group, read from the process table; those that only wait to be collected do not count."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = status.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(group) == pgid and state != "Z":
            found.append(status.parent.name)
    return found


def test_the_answer_is_found_among_noise_and_nobody_is_left(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    said = ask(tmp_path, ANSWER.format(pid=str(pid_file)))
    assert (said.agent, said.version, said.protocol_version) == ("tiny", "1.2", 1)
    deadline = time.monotonic() + 5
    while group_members(int(pid_file.read_text())) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert group_members(int(pid_file.read_text())) == []


def test_the_agent_sees_a_home_of_its_own_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET_OF_THE_RUNNER", "x")
    program = """
import json, os, sys
sys.stdin.readline()
names = " ".join(sorted(set(os.environ) - {"LC_CTYPE"}))
info = {"name": names, "version": os.environ["HOME"]}
print(json.dumps({"id": 1, "result": {"protocolVersion": 1, "agentInfo": info}}), flush=True)
"""
    said = ask(tmp_path, program)
    assert said.agent == "HOME LANG PATH TERM TMPDIR"
    assert said.version is not None
    assert said.version != os.environ["HOME"]
    assert not Path(said.version).exists()


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        ("import sys; sys.exit('no key given')", "harness_exited", "no key given"),
        ("import os, time; os.close(1); time.sleep(300)", "harness_exited", "ended before"),
        ("import time; time.sleep(300)", "harness_unresponsive", "in time"),
        ("import sys\nwhile True: sys.stdout.write('x' * 65536)", "harness_protocol_error", "flooded"),
        (
            'print(\'{"id":1,"error":{"code":-32603,"message":"broken"}}\', flush=True)',
            "harness_protocol_error",
            "broken",
        ),
        ('print(\'{"id":1,"result":{}}\', flush=True)', "harness_protocol_error", "{}"),
    ],
)
def test_a_bad_agent_is_named_by_its_fault(tmp_path: Path, program: str, code: str, words: str) -> None:
    seconds = 0.5 if code == "harness_unresponsive" else 20.0
    with pytest.raises(RunnerError, match=words) as raised:
        ask(tmp_path, program, seconds)
    assert raised.value.code == code


def test_a_program_that_cannot_be_run(tmp_path: Path) -> None:
    program = tmp_path / "broken"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    spec = catalogue(tmp_path, "", "./broken").get("mine")
    with pytest.raises(RunnerError, match="cannot be run") as raised:
        probe(spec, tmp_path, 5.0)
    assert raised.value.code == "harness_start_failed"


def test_a_check_of_a_custom_harness(tmp_path: Path) -> None:
    listed = catalogue(tmp_path, ANSWER.format(pid=str(tmp_path / "pid")))
    result = check("mine", tmp_path, catalogue=listed)
    assert result.ok
    assert (result.agent, result.version, result.protocol_version) == ("tiny", "1.2", 1)


def test_a_check_that_fails_is_a_result(tmp_path: Path) -> None:
    result = check("mine", tmp_path, catalogue=catalogue(tmp_path, "import sys; sys.exit('oh')"))
    assert result == CheckResult(False, None, result.detail)
    assert "oh" in result.detail
    assert "harness install codex" in check("codex", tmp_path).detail


def test_a_check_of_an_unknown_name_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunnerError) as raised:
        check("nope", tmp_path)
    assert raised.value.code == "harness_unknown"
