"""``acp-runner prompt``: what it prints, and its exit codes (DESIGN 5)."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from runner.cli import prompt as prompt_module
from runner.errors import TURN_IN_USE_SENTENCE, RunnerError
from tests.cli.conftest import Invoke, Served
from tests.server.double import FakeHandle, finished_handle, line, question, result


def admitted(n: int = 1, turn_id: str = "t1") -> bytes:
    return line(n, "turn_admitted", {"turn_id": turn_id, "epoch": 1, "replica_id": "r", "prompt_ids": ["p1"]})


def requests(served: Served) -> list[Any]:
    return [call[3][0] for call in served.sessions.calls if call[0] == "dispatch"]


def test_text_goes_to_stdout_and_the_rest_to_stderr(invoke: Invoke, served: Served) -> None:
    served.sessions.next_handle = lambda: finished_handle(
        admitted(),
        line(2, "environment", {"phase": "starting", "start": "cold", "reason": "miss", "elapsed_ms": 0}),
        line(3, "environment", {"phase": "ready", "start": "cold", "reason": "miss", "elapsed_ms": 12}),
        line(4, "message_delta", {"message_id": "m", "text": "he"}),
        line(5, "message_delta", {"message_id": "m", "text": "llo"}),
        line(6, "message", {"message_id": "m", "text": "hello", "supersedes_from": "1.4"}),
        line(7, "tool_call", {"tool_call_id": "c", "title": "ls", "kind": "execute", "status": "in_progress"}),
        line(8, "tool_call_update", {"tool_call_id": "c", "status": "completed"}),
        line(9, "message", {"message_id": "n", "text": "bye"}),
    )
    ran = invoke("prompt", "--session", "s1", "hi")
    assert ran.exit_code == 0
    assert ran.stdout == "hello\nbye\n"
    assert "agent ready after 12 ms (cold, miss)" in ran.stderr
    assert "tool execute: ls [in_progress]" in ran.stderr
    assert "tool completed: ls" in ran.stderr
    assert requests(served)[0].prompt == "hi"


def test_json_prints_the_lines_as_they_come(invoke: Invoke) -> None:
    ran = invoke("prompt", "--session", "s1", "--json", "hi")
    assert ran.exit_code == 0
    lines = [json.loads(item) for item in ran.stdout.splitlines()]
    assert [item.get("type", item["kind"]) for item in lines] == ["turn_admitted", "message_delta", "done", "result"]
    assert ran.stderr == ""


def test_a_session_is_made_up_and_told(invoke: Invoke, served: Served) -> None:
    ran = invoke("prompt", "hi")
    session_id = served.sessions.calls[-1][2]
    assert session_id.startswith("cli-")
    assert f"session {session_id}" in ran.stderr


def test_stdin_is_read_for_a_dash(invoke: Invoke, served: Served) -> None:
    assert invoke("prompt", "--session", "s1", "-", answers="from a pipe").exit_code == 0
    assert requests(served)[0].prompt == "from a pipe"


def test_options_become_fields(invoke: Invoke, served: Served) -> None:
    options = ["--harness", "demo", "--mode", "plan", "--model", "m", "--env", "A=b=c", "--permissions", "allow"]
    assert invoke("prompt", "-s", "s1", *options, "--workspace", ".", "--keep", "hi").exit_code == 0
    request = requests(served)[0]
    assert (request.harness, request.mode, request.model, request.env) == ("demo", "plan", "m", {"A": "b=c"})
    assert request.permissions.default == "allow"
    assert request.workspace.path == os.getcwd()
    assert request.keep_on_disconnect


def test_what_was_not_given_is_left_out(invoke: Invoke, served: Served) -> None:
    invoke("prompt", "-s", "s1", "hi")
    given = requests(served)[0].model_fields_set
    assert given == {"prompt", "prompt_id", "on_busy"}


def test_only_declared_keys_are_forwarded(invoke: Invoke, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEMO_KEY", "sk-1234567")
    monkeypatch.setenv("OTHER_KEY", "sk-7654321")
    ran = invoke("prompt", "-s", "s1", "hi")
    assert requests(served)[0].secrets == {"DEMO_KEY": "sk-1234567"}
    assert "sk-1234567" not in ran.output
    invoke("prompt", "-s", "s1", "--harness", "another", "hi")
    assert requests(served)[1].secrets == {}


@pytest.mark.parametrize("outcome", ["failed", "lost", "cancelled"])
def test_exit_1_for_every_other_ending(invoke: Invoke, served: Served, outcome: str) -> None:
    error = {"code": "harness_exited", "message": "It exited with code 3.", "retryable": False}
    fields = {"error": error} if outcome != "cancelled" else {"stop_reason": "cancelled", "cancel_settled": True}
    served.sessions.next_handle = lambda: finished_handle(admitted(), outcome=outcome, **fields)
    ran = invoke("prompt", "-s", "s1", "hi")
    assert ran.exit_code == 1
    assert ("stopped" if outcome == "cancelled" else "harness_exited: It exited with code 3.") in ran.stderr


def test_exit_1_for_an_error_before_the_stream(invoke: Invoke, served: Served) -> None:
    served.sessions.error = RunnerError("harness_unknown", "There is no harness 'x'.")
    ran = invoke("prompt", "-s", "s1", "--harness", "demo", "hi")
    assert ran.exit_code == 1
    assert "Traceback" not in ran.output


@pytest.mark.parametrize(
    "arguments",
    [["prompt"], ["prompt", " "], ["prompt", "-s", "a/b", "x"], ["prompt", "--env", "A", "x"], ["nonsense"]],
)
def test_exit_2_for_bad_usage(invoke: Invoke, served: Served, arguments: list[str]) -> None:
    assert invoke(*arguments).exit_code == 2
    assert requests(served) == []


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_exit_3_when_a_turn_runs(invoke: Invoke, served: Served, flags: list[str]) -> None:
    served.sessions.refuse()
    ran = invoke("prompt", "-s", "s1", *flags, "hi")
    assert ran.exit_code == 3
    assert TURN_IN_USE_SENTENCE in ran.stderr


def test_exit_4_when_paused(invoke: Invoke, served: Served) -> None:
    served.sessions.questions = [question()]
    served.sessions.next_handle = lambda: finished_handle(admitted(), outcome="paused", stop_reason="paused")
    ran = invoke("prompt", "-s", "s1", "hi")
    assert ran.exit_code == 4
    assert "acp-runner approve i1 --session s1 --allow" in ran.stderr


def test_at_a_terminal_it_asks_and_goes_on(invoke: Invoke, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prompt is attached to again; what was shown is not shown twice."""
    monkeypatch.setattr(prompt_module, "at_terminal", lambda: True)
    served.sessions.questions = [question()]
    first = [admitted(), line(2, "message_delta", {"message_id": "m", "text": "before "})]
    second = [admitted(3, "t2"), line(4, "message_delta", {"message_id": "m", "text": "after"})]
    handles = [
        finished_handle_of(first, outcome="paused"),
        finished_handle_of([*first, *second], turn_id="t2"),
    ]
    served.sessions.next_handle = in_order(handles)
    ran = invoke("prompt", "-s", "s1", "hi", answers="9\n1\n")
    assert ran.exit_code == 0
    assert [ran.stdout.count(word) for word in ("before", "after")] == [1, 1]
    assert "execute: rm -rf build" in ran.stderr
    answer = next(call for call in served.sessions.calls if call[0] == "answer")
    assert (answer[3][0], answer[3][1].option_id) == ("i1", "yes")
    one, two = requests(served)
    assert one == two


def in_order(makers: list[Callable[[], FakeHandle]]) -> Callable[[], FakeHandle]:
    def make() -> FakeHandle:
        return makers.pop(0)()

    return make


def finished_handle_of(lines: list[bytes], **fields: Any) -> Any:
    return lambda: finished_handle(*lines, **fields)


def test_a_question_left_open_is_exit_4(invoke: Invoke, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_module, "at_terminal", lambda: True)
    served.sessions.questions = [question()]
    served.sessions.next_handle = lambda: finished_handle(admitted(), outcome="paused")
    for answers in ("\n", ""):
        assert invoke("prompt", "-s", "s1", "hi", answers=answers).exit_code == 4


def test_a_broken_stream_is_attached_to_again(invoke: Invoke, served: Served) -> None:
    shown = [admitted(), line(2, "message_delta", {"message_id": "m", "text": "he"})]

    def broken() -> FakeHandle:
        handle = FakeHandle()
        handle.plan = lambda reader: reader.feed(b"".join(shown), RuntimeError("gone"))
        return handle

    rest = line(3, "message_delta", {"message_id": "m", "text": "llo"})
    handles = [broken, finished_handle_of([*shown, rest])]
    served.sessions.next_handle = in_order(handles)
    ran = invoke("prompt", "-s", "s1", "hi")
    assert (ran.exit_code, ran.stdout) == (0, "hello\n")
    one, two = requests(served)
    assert one.prompt_id == two.prompt_id


def test_ctrl_c_stops_the_turn_and_waits_for_its_end(invoke: Invoke, served: Served) -> None:
    def hanging() -> FakeHandle:
        handle = FakeHandle()
        handle.plan = lambda reader: reader.feed(admitted())
        served.loop.call_later(0.2, os.kill, os.getpid(), signal.SIGINT)
        return handle

    async def stopped(caller: Any, session_id: str, request: Any, **more: Any) -> Any:
        reply = await cancel(caller, session_id, request, **more)
        handle = served.sessions.handles[0]
        handle.resolve(result("cancelled", stop_reason="cancelled", cancel_settled=True))
        handle.readers[0].end()
        return reply

    cancel: Any = served.sessions.cancel
    served.sessions.cancel = stopped  # type: ignore[method-assign]
    served.sessions.next_handle = hanging
    ran = invoke("prompt", "-s", "s1", "hi")
    assert ran.exit_code == 1
    assert "stopped" in ran.stderr
    stop = next(call for call in served.sessions.calls if call[0] == "cancel")
    assert stop[3].expected_execution_id == "t1"


def test_a_second_ctrl_c_leaves(invoke: Invoke, served: Served) -> None:
    def hanging() -> FakeHandle:
        handle = FakeHandle()
        handle.plan = lambda reader: reader.feed(admitted())
        for delay in (0.2, 0.4):
            served.loop.call_later(delay, os.kill, os.getpid(), signal.SIGINT)
        return handle

    served.sessions.next_handle = hanging
    assert invoke("prompt", "-s", "s1", "hi").exit_code == 130


def test_an_agent_cannot_write_to_the_terminal(invoke: Invoke, served: Served) -> None:
    evil = "a\x1b]0;owned\x07\x9b31mb\ud800"
    served.sessions.next_handle = lambda: finished_handle(
        admitted(),
        line(2, "message_delta", {"message_id": "m", "text": evil}),
        line(3, "tool_call", {"tool_call_id": "c", "title": evil, "kind": "execute", "status": "pending"}),
    )
    ran = invoke("prompt", "-s", "s1", "hi")
    assert ran.exit_code == 0
    assert not set(ran.output) & {"\x1b", "\x07", "\x9b"}


def test_without_a_server_that_was_named(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int) -> None:
    monkeypatch.setenv("ACP_RUNNER_URL", f"http://127.0.0.1:{unused_tcp_port}")
    ran = invoke("prompt", "hi")
    assert ran.exit_code == 1
    assert "unreachable" in ran.stderr
    assert "Traceback" not in ran.output
