"""The other client commands, and how a server is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.cli import locate, questions
from runner.cli.terminal import print_table
from runner.errors import RunnerError
from tests.cli.conftest import Invoke, Served
from tests.postgres_server import PostgresServer
from tests.redis_server import RedisServer
from tests.server.double import FakeReader, question


def calls(served: Served, name: str) -> list[Any]:
    return [call[3] for call in served.sessions.calls if call[0] == name]


def test_sessions(invoke: Invoke, served: Served) -> None:
    for arguments in (["sessions"], ["sessions", "list"]):
        ran = invoke(*arguments)
        assert ran.exit_code == 0
        assert "s1" in ran.stdout
        assert "completed" in ran.stdout
    assert json.loads(invoke("sessions", "--json").stdout)["items"][0]["session_id"] == "s1"
    assert json.loads(invoke("sessions", "list", "--json", "--limit", "3").stdout)["next_cursor"] is None
    assert calls(served, "sessions")[-1] == (3, None)


def test_show(invoke: Invoke) -> None:
    ran = invoke("sessions", "show", "s1")
    assert ran.exit_code == 0
    assert "session_id: s1" in ran.stdout
    assert "pool.start: cold" in ran.stdout
    assert json.loads(invoke("sessions", "show", "s1", "--json").stdout)["state"] == "idle"


def test_stop_and_kill(invoke: Invoke, served: Served) -> None:
    ran = invoke("sessions", "stop", "s1", "--turn", "t1", "--wait", "5")
    assert ran.exit_code == 0
    assert "idle: not_running" in ran.stderr
    (request,) = calls(served, "cancel")
    assert (request.expected_execution_id, request.wait_seconds) == ("t1", 5)
    assert json.loads(invoke("sessions", "kill", "s1", "--json").stdout)["command_id"] == "c1"


def test_export(invoke: Invoke, served: Served) -> None:
    ran = invoke("sessions", "export", "s1")
    assert (ran.exit_code, ran.stderr) == (0, "")
    assert [json.loads(line)["kind"] for line in ran.stdout.splitlines()] == ["session", "record", "end"]
    part = b'{"kind":"end","records":0,"complete":false,"missing":["begin"]}\n'
    served.sessions.export_reader = lambda: FakeReader().feed(part).end()
    ran = invoke("sessions", "export", "s1")
    assert (ran.exit_code, ran.stdout) == (0, part.decode())
    assert "not complete" in ran.stderr
    served.sessions.export_reader = lambda: FakeReader().end()
    ran = invoke("sessions", "export", "s1")
    assert ran.exit_code == 1
    assert "stream_broken" in ran.stderr


def test_fork(invoke: Invoke, served: Served) -> None:
    ran = invoke("sessions", "fork", "s1", "1.3")
    assert (ran.exit_code, ran.stdout, ran.stderr) == (0, "s2\n", "workspace: empty\n")
    made = json.loads(invoke("sessions", "fork", "s1", "1.3", "--to", "mine", "--allow-incomplete", "--json").stdout)
    assert made["session_id"] == "mine"
    assert [request.allow_incomplete for request in calls(served, "fork")] == [False, True]


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_an_error_is_one_line(invoke: Invoke, flags: list[str]) -> None:
    ran = invoke("sessions", "show", "nobody", *flags)
    assert ran.exit_code == 1
    assert ran.stderr == "acp-runner: not_found: There is no session nobody.\n"
    if flags:
        assert json.loads(ran.stdout)["error"]["code"] == "not_found"
    else:
        assert ran.stdout == ""


def test_pool(invoke: Invoke) -> None:
    assert "of 64 seats taken" in invoke("pool").stderr
    assert json.loads(invoke("pool", "--json").stdout)["max_seats"] == 64


def test_approve_the_only_question(invoke: Invoke, served: Served) -> None:
    served.sessions.questions = [question()]
    ran = invoke("approve", "--allow")
    assert ran.exit_code == 0
    assert "answered: consumed" in ran.stderr
    assert calls(served, "answer")[0][1].decision == "allow"
    assert json.loads(invoke("approve", "i1", "--deny", "--json").stdout)["status"] == "consumed"
    assert calls(served, "answer")[1][1].decision == "deny"
    assert invoke("approve", "i1", "--session", "s1", "--option", "yes").exit_code == 0
    assert calls(served, "answer")[2][1].option_id == "yes"


def test_approve_when_it_is_not_clear_which(invoke: Invoke, served: Served) -> None:
    assert "No question is open" in invoke("approve", "--allow").stderr
    served.sessions.questions = [question(), question(interaction_id="i2")]
    ran = invoke("approve", "--allow")
    assert ran.exit_code == 1
    assert "acp-runner approve i2 --session s1 --allow" in ran.stderr
    assert invoke("approve", "i3", "--allow").exit_code == 1
    assert calls(served, "answer") == []


def test_approve_needs_one_verdict(invoke: Invoke, served: Served) -> None:
    served.sessions.questions = [question()]
    assert invoke("approve").exit_code == 2
    assert invoke("approve", "--allow", "--deny").exit_code == 2
    assert calls(served, "answer") == []


def test_approve_asks_at_a_terminal(invoke: Invoke, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "at_terminal", lambda: True)
    served.sessions.questions = [question()]
    assert "left open" in invoke("approve", answers="\n").stderr
    assert invoke("approve", answers="2\n").exit_code == 0
    assert calls(served, "answer")[0][1].option_id == "no"


FORM = {
    "properties": {
        "name": {"type": "string", "title": "Your name"},
        "count": {"type": "integer"},
        "size": {"type": "number"},
        "sure": {"type": "boolean"},
        "kinds": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["name"],
}
FILLED = {"name": "x", "count": 2, "size": 1.5, "sure": True, "kinds": ["a", "b"]}


def form(**fields: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "kind": "elicitation",
        "tool_call": None,
        "options": [],
        "message": "Which?",
        "mode": "form",
    }
    return question(**(given | {"schema": FORM} | fields))


def url() -> dict[str, Any]:
    shown = form(mode="url", url="https://example.test/x")
    del shown["schema"]
    return shown


def test_approve_fills_in_a_form(invoke: Invoke, served: Served) -> None:
    served.sessions.questions = [form()]
    sets = [part for name in ("name=x", "count=2", "size=1.5", "sure=yes", "kinds=a, b") for part in ("--set", name)]
    assert invoke("approve", "--allow", *sets).exit_code == 0
    sent = calls(served, "answer")[0][1]
    assert (sent.action, sent.content, sent.decision) == ("accept", FILLED, None)
    assert invoke("approve", "--deny").exit_code == 0
    assert calls(served, "answer")[1][1].action == "decline"
    for bad in (["--set", "name"], ["--set", "count=two"], ["--set", "sure=maybe"], ["--set", "a=1", "--set", "a=2"]):
        assert invoke("approve", "--allow", *bad).exit_code == 2
    assert invoke("approve", "--deny", "--set", "name=x").exit_code == 2
    assert len(calls(served, "answer")) == 2


def test_approve_agrees_to_a_url(invoke: Invoke, served: Served) -> None:
    served.sessions.questions = [url()]
    assert invoke("approve", "--allow").exit_code == 0
    sent = calls(served, "answer")[0][1]
    assert (sent.action, sent.content) == ("accept", None)


def test_approve_asks_for_a_form_at_a_terminal(invoke: Invoke, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "at_terminal", lambda: True)
    served.sessions.questions = [form()]
    assert "left open" in invoke("approve", answers="\n").stderr
    ran = invoke("approve", answers="y\n\nx\ntwo\n2\n1.5\nyes\na,b\n")
    assert ran.exit_code == 0
    assert "Which?" in ran.stderr
    sent = calls(served, "answer")[0][1]
    assert (sent.action, sent.content) == ("accept", FILLED)
    assert invoke("approve", answers="n\n").exit_code == 0
    assert calls(served, "answer")[1][1].action == "decline"
    served.sessions.questions = [url()]
    ran = invoke("approve", answers="maybe\ny\n")
    assert "https://example.test/x" in ran.stderr
    assert calls(served, "answer")[2][1].action == "accept"


def test_approve_tells_what_the_form_needs(invoke: Invoke, served: Served) -> None:
    served.sessions.questions = [form(), question(interaction_id="i2")]
    ran = invoke("approve", "--allow")
    assert "acp-runner approve i1 --session s1 --allow --set 'name=…'" in ran.stderr


def test_a_question_without_options_can_only_be_denied_case_f15(
    invoke: Invoke, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "at_terminal", lambda: True)
    served.sessions.questions = [question(options=[], last_error="No room.")]
    ran = invoke("approve", answers="\n")
    assert "left open" in ran.stderr
    assert "No room." in ran.stderr
    assert invoke("approve", answers="y\n").exit_code == 0
    assert calls(served, "answer")[0][1].decision == "deny"


def test_a_closed_question(invoke: Invoke, served: Served) -> None:
    served.sessions.questions = [question()]

    async def closed(*_: Any) -> Any:
        raise RunnerError("interaction_closed", "The question was withdrawn.")

    served.sessions.answer = closed  # type: ignore[assignment,method-assign]
    ran = invoke("approve", "i1", "--session", "s1", "--allow")
    assert (ran.exit_code, "interaction_closed" in ran.stderr) == (1, True)


@pytest.mark.parametrize("command", [["sessions"], ["sessions", "stop", "s"], ["pool"], ["approve", "--allow"]])
def test_without_a_server_it_says_how_to_start_one(bare: Invoke, command: list[str]) -> None:
    ran = bare(*command)
    assert ran.exit_code == 1
    assert "acp-runner serve" in ran.stderr


def test_a_server_is_found_by_the_state_directory(bare: Invoke, served: Served, tmp_path: Path) -> None:
    for directory in (tmp_path / "state", tmp_path / "other"):
        directory.mkdir()
        (directory / "server.json").write_text(json.dumps({"url": served.url, "pid": os.getpid()}))
        (directory / "token").write_text("all\n")
    assert bare("sessions").exit_code == 0
    assert bare("sessions", "--state-dir", str(tmp_path / "other")).exit_code == 0


def test_where_a_server_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("local")
    note = tmp_path / "server.json"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for text in (json.dumps({"url": "http://127.0.0.1:1", "pid": gone.pid}), "nonsense", "{}"):
        note.write_text(text)
        assert locate.find(tmp_path, {}) is None
    note.write_text(json.dumps({"url": "http://127.0.0.1:1", "pid": os.getpid()}))
    assert locate.find(tmp_path, {"ACP_RUNNER_URL": "http://x"}) == locate.Place("http://127.0.0.1:1", "local")
    environ = {"ACP_RUNNER_STATE_DIR": str(tmp_path), "ACP_RUNNER_URL": "http://127.0.0.1:2"}
    assert locate.find(None, environ) == locate.Place("http://127.0.0.1:2", "local")
    for url in ("http://runner.example", "http://localhost.evil.example", "http://127.evil.example"):
        environ["ACP_RUNNER_URL"] = url
        assert locate.find(None, environ) == locate.Place(url, None)
    environ["ACP_RUNNER_TOKEN"] = "given"
    assert locate.find(None, environ) == locate.Place("http://127.evil.example", "given")


def test_harness_list_and_check(bare: Invoke) -> None:
    for arguments in (["harness"], ["harness", "list"]):
        ran = bare(*arguments)
        assert ran.exit_code == 0
        assert "demo" in ran.stdout
    items = {item["name"]: item for item in json.loads(bare("harness", "list", "--json").stdout)["items"]}
    assert items["demo"]["available"] is True
    assert items["codex"]["install_command"] == "acp-runner harness install codex"
    ran = bare("harness", "check", "codex", "--json")
    assert ran.exit_code == 1
    assert json.loads(ran.stdout)["ok"] is False
    ran = bare("harness", "check", "nothing")
    assert (ran.exit_code, "harness_unknown" in ran.stderr) == (1, True)
    ran = bare("harness", "install", "demo")
    assert (ran.exit_code, "nothing to install" in ran.stderr) == (0, True)


def test_doctor_is_redacted_and_names_what_helps(bare: Invoke, tmp_path: Path) -> None:
    (tmp_path / "acp-runner.toml").write_text('[secrets]\nKEY = "sk-hidden-value"\n[server]\nport = 9999\n')
    ran = bare("doctor")
    assert ran.exit_code == 0
    assert "port = 9999" in ran.stdout
    assert "sk-hidden-value" not in ran.output
    assert "acp-runner harness install codex" in ran.stdout
    told = json.loads(bare("doctor", "--json").stdout)
    assert told["settings"]["server"]["port"] == 9999
    assert {"python", "state directory", "server", "harness demo"} <= {item["name"] for item in told["findings"]}


def test_doctor_says_whether_keys_enter_sandboxes(bare: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "kept out of local sandboxes of claude, codex" in bare("doctor").stdout
    monkeypatch.setenv("ACP_RUNNER_CREDENTIALS__PROXY", "false")
    assert "model keys: they enter sandboxes; set [credentials] proxy = true" in bare("doctor").stdout


def test_doctor_looks_at_the_database(
    bare: Invoke, tmp_path: Path, postgres_server: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says where it is, and never the password."""
    (tmp_path / "acp-runner.toml").write_text(f'[store]\nurl = "{postgres_url}"\n')

    def found() -> tuple[int, str]:
        ran = bare("doctor", "--json")
        assert postgres_url.split(":")[2].partition("@")[0] not in ran.output
        (store,) = [item for item in json.loads(ran.stdout)["findings"] if item["name"] == "store"]
        return ran.exit_code, store["detail"]

    place = f"postgresql://127.0.0.1:{postgres_server.port}/"
    code, said = found()
    assert code == 0
    assert said.startswith(place)
    assert "it is empty" in said
    postgres_server.sql("CREATE TABLE meta (other TEXT)", postgres_url.rpartition("/")[2])
    assert found()[0] == 1
    assert "another program" in found()[1]
    postgres_server.kill()
    code, said = found()
    assert code == 1
    assert "cannot be used" in said
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    monkeypatch.delitem(sys.modules, "runner.store.postgres.store", raising=False)
    assert "pip install 'acp-runner[postgres]'" in found()[1]


def test_doctor_looks_at_the_lease_plane(bare: Invoke, tmp_path: Path, redis_server: RedisServer) -> None:
    def found(more: str = "") -> tuple[int, str]:
        (tmp_path / "acp-runner.toml").write_text(f'[leases]\nurl = "{redis_server.url}"\n{more}')
        ran = bare("doctor", "--json")
        (leases,) = [item for item in json.loads(ran.stdout)["findings"] if item["name"] == "leases"]
        return ran.exit_code, leases["detail"]

    assert found() == (0, "the plane is reached; runners there: 0")
    redis_server.kill()
    code, said = found()
    assert (code, "cannot be used" in said) == (0, True)
    assert found('on_unreachable = "closed"\n')[0] == 1


def test_a_help_text_names_its_table(bare: Invoke) -> None:
    for words, named in ((["serve"], "[server] host"), (["worker"], "[records]"), (["prompt"], "[local] roots")):
        said = bare(*words, "--help").output
        assert named in " ".join(said.replace("│", " ").split())


def test_doctor_looks_at_the_record_stream(bare: Invoke, tmp_path: Path, redis_server: RedisServer) -> None:
    """Runners go on without it: it is told, and no reason to fail."""
    url = redis_server.url.replace("redis://", "redis://:secret@")
    redis_server.command("CONFIG", "SET", "requirepass", "secret")
    store = f'[store]\nurl = "sqlite:///{tmp_path / "store.sqlite3"}"\n'
    (tmp_path / "acp-runner.toml").write_text(f'{store}[records]\nstream = "{url}"\n')

    def found() -> tuple[bool, str]:
        ran = bare("doctor", "--json")
        assert ran.exit_code == 0
        assert "secret@" not in ran.output
        (stream,) = [item for item in json.loads(ran.stdout)["findings"] if item["name"] == "record stream"]
        return stream["ok"], stream["detail"]

    try:
        assert found() == (True, "it is reached; 0 records wait there, 0 of them are delivered to a worker")
    finally:
        redis_server.restart()
    redis_server.kill()
    assert found()[0] is False


def test_doctor_proves_a_sandbox_with_a_proxy(bare: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACP_RUNNER_LOCAL__NETWORK", "proxy")
    ran = bare("doctor", "--sandbox", "local")
    assert ran.exit_code == 0, ran.output
    assert "FAILED" not in ran.stdout


def test_doctor_says_how_long_sandboxes_are_kept(bare: Invoke, tmp_path: Path) -> None:
    assert "kept warm, local: idle_seconds 60, approval_seconds 600, stopped_seconds 600" in bare("doctor").stdout
    (tmp_path / "acp-runner.toml").write_text("[pool]\nidle_seconds = 5\n[pool.local]\nstopped_seconds = 7\n")
    assert "kept warm, local: idle_seconds 5, approval_seconds 600, stopped_seconds 7" in bare("doctor").stdout


def test_doctor_says_how_limits_are_kept(bare: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACP_RUNNER_LOCAL__PIDS", "0")
    assert "memory_bytes off, pids off, cpus off" in bare("doctor").stdout
    monkeypatch.setenv("ACP_RUNNER_LOCAL__MEMORY_BYTES", "2147483648")
    assert "memory_bytes 2147483648 by " in bare("doctor").stdout


def test_a_table_in_a_pipe_is_not_folded(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("things", ["a", "b"], [["x" * 90, "y" * 90]])
    assert capsys.readouterr().out.splitlines()[1].split() == ["x" * 90, "y" * 90]


def test_doctor_proves_the_sandbox(bare: Invoke) -> None:
    ran = bare("doctor", "--sandbox", "local", "--json")
    assert ran.exit_code == 0, ran.output
    checks = [item for item in json.loads(ran.stdout)["findings"] if item["name"].startswith("sandbox local: ")]
    assert checks
    assert all(item["ok"] for item in checks)
    assert bare("doctor", "--sandbox", "moon").exit_code == 2


def test_doctor_and_a_bad_file(bare: Invoke, tmp_path: Path) -> None:
    (tmp_path / "acp-runner.toml").write_text("[server]\nprot = 1\n")
    ran = bare("doctor")
    assert ran.exit_code == 1
    assert "server.prot" in ran.stderr
    assert "Traceback" not in ran.output


def test_version_and_help(bare: Invoke) -> None:
    assert bare("--version").stdout.startswith("acp-runner ")
    shown = bare("--help").stdout
    for command in ("serve", "plane", "prompt", "approve", "sessions", "pool", "harness", "doctor"):
        assert command in shown


def test_a_plane_uses_no_other_plane(bare: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACP_RUNNER_LEASES__URL", "http://127.0.0.1:1")
    refused = bare("plane", "--port", "0")
    assert refused.exit_code != 0
    assert "leases.url" in refused.stderr
