"""The demo agent over real pipes; every frame it sends is checked against the published schema."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.session.chain import CONTINUE
from tests.agents.census import until
from tests.inside.demo_client import DemoClient, text_of


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[DemoClient]:
    with DemoClient(tmp_path) as client:
        client.open()
        yield client


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_plain_text_is_answered_from_memory(demo: DemoClient) -> None:
    assert demo.said("hi there") == "You said: hi there (message 1 of this conversation)"
    assert demo.said('quote " and ünï \x01') == 'You said: quote " and ünï \x01 (message 2 of this conversation)'


def test_sessions_do_not_share_memory(demo: DemoClient) -> None:
    demo.said("one")
    first = demo.session
    assert demo.open() != first
    assert "message 1" in demo.said("two")


def test_stream_is_exact(demo: DemoClient) -> None:
    reply, updates = demo.prompt("/stream 5000")
    assert reply["result"]["stopReason"] == "end_turn"
    assert text_of(updates) == "".join(f"{number} " for number in range(5000))
    assert {len(update["content"]["text"]) for update in demo.prompt("/stream 20 40")[1]} == {40}


def test_tool_call_goes_through_its_states(demo: DemoClient) -> None:
    _, updates = demo.prompt("/tool echo one; sleep 0.05; echo two; pwd")
    states = [update.get("status") for update in updates if "toolCallId" in update]
    assert states[:2] == ["pending", "in_progress"]
    assert states[-1] == "completed"
    assert updates[-2]["content"][0]["content"]["text"] == f"one\ntwo\n{demo.home}\n"
    _, failed = demo.prompt("/tool exit 3")
    assert failed[-2]["status"] == "failed"
    assert text_of(failed) == "exit code 3"


def test_a_background_child_that_holds_stdout_does_not_hold_the_tool_call(demo: DemoClient) -> None:
    began = time.monotonic()
    text = demo.prompt("/tool sleep 30 & echo $!")[1][-2]["content"][0]["content"]["text"]
    assert time.monotonic() - began < 10
    os.kill(int(text), signal.SIGKILL)


@pytest.mark.parametrize("command", ["/sleep 60", "/hang", "/stream 50000000", "/tool sleep 600", "/ask", "/ask2"])
def test_cancel_is_obeyed_promptly_and_memory_stays(demo: DemoClient, command: str) -> None:
    """DESIGN 3.3: the open prompt answers cancelled, and the conversation goes on."""
    identity = demo.start(command)
    if command not in ("/sleep 60", "/hang"):
        demo.update()
    began = time.monotonic()
    demo.cancel()
    reply, updates = demo.wait(identity)
    assert reply["result"] == {"stopReason": "cancelled"}
    assert time.monotonic() - began < 5
    states = {update["toolCallId"]: update.get("status") for update in updates if "toolCallId" in update}
    assert set(states.values()) <= {"failed"}
    assert "message 2" in demo.said("and now?")


def test_cancel_kills_the_tool_but_not_what_leaked(demo: DemoClient) -> None:
    leaked = int(demo.said("/leak sleep 600").split()[1])
    identity = demo.start("/tool echo $$; exec sleep 600")
    while True:
        update = demo.update()
        if update.get("content") and update.get("toolCallId"):
            break
    pid = int(update["content"][0]["content"]["text"])
    demo.cancel()
    demo.wait(identity)
    try:
        until(lambda: not alive(pid))
        assert alive(leaked)
    finally:
        os.kill(leaked, signal.SIGKILL)


def test_deaf_ignores_cancel_until_the_session_is_closed(demo: DemoClient) -> None:
    identity = demo.start("/deaf")
    demo.cancel()
    demo.notify("$/cancel_request", requestId=identity)
    assert "error" in demo.call("session/prompt", sessionId=demo.session, prompt=[{"type": "text", "text": "x"}])
    closing = demo.send("session/close", sessionId=demo.session)
    assert demo.wait(identity)[0]["result"] == {"stopReason": "cancelled"}
    assert demo.wait(closing)[0]["result"] == {}
    assert demo.call("session/close", sessionId=demo.session)["error"]["code"] == -32602


def test_cancel_request_is_answered_with_its_code(demo: DemoClient) -> None:
    identity = demo.start("/hang")
    demo.notify("$/cancel_request", requestId=identity)
    assert demo.wait(identity)[0]["error"]["code"] == -32800


@pytest.mark.parametrize(
    ("option", "status", "stop"),
    [
        ("allow_once", "completed", "end_turn"),
        ("allow_always", "completed", "end_turn"),
        ("reject_once", "failed", "end_turn"),
        (None, "failed", "cancelled"),
    ],
)
def test_permission_is_asked_and_obeyed(demo: DemoClient, option: str | None, status: str, stop: str) -> None:
    identity = demo.start("/ask Delete everything")
    question = demo.question()
    assert question["params"]["toolCall"]["title"] == "Delete everything"
    assert [choice["kind"] for choice in question["params"]["options"]] == ["allow_once", "allow_always", "reject_once"]
    demo.answer(question, option)
    reply, updates = demo.wait(identity)
    assert reply["result"]["stopReason"] == stop
    assert [update["status"] for update in updates if "status" in update] == [status]
    assert text_of(updates) == (f"Delete everything: {option}. " if option else "")


def test_two_questions_are_answered_in_any_order(demo: DemoClient) -> None:
    identity = demo.start("/ask2 Go")
    first, second = demo.question(), demo.question()
    demo.answer(second, "reject_once")
    demo.answer(first, "allow_once")
    reply, updates = demo.wait(identity)
    assert reply["result"]["stopReason"] == "end_turn"
    assert text_of(updates) == "Go 1: allow_once. Go 2: reject_once. "


@pytest.mark.parametrize(
    ("command", "answer", "said"),
    [
        ("/form", {"action": "accept", "content": {"name": "Ada", "times": 2}}, "accept name=Ada times=2. "),
        ("/form", {"action": "decline"}, "decline. "),
        ("/url https://example.test/", {"action": "accept"}, "accept. "),
        ("/url", {"action": "cancel"}, "cancel. "),
    ],
)
def test_an_elicitation_is_asked_and_its_answer_told(demo: DemoClient, command: str, answer: Any, said: str) -> None:
    identity = demo.start(command)
    question = demo.question()
    assert question["params"]["mode"] == command.split()[0][1:]
    demo.write({"id": question["id"], "result": answer})
    reply, updates = demo.wait(identity)
    assert (reply["result"]["stopReason"], text_of(updates)) == ("end_turn", said)
    done = [item for item in demo.questions if item["method"] == "elicitation/complete"]
    assert bool(done) == (command.startswith("/url") and answer["action"] == "accept")


@pytest.mark.parametrize("method", ["session/load", "session/resume"])
def test_what_waited_for_the_user_is_asked_again_by_the_next_process(
    demo: DemoClient, tmp_path: Path, method: str
) -> None:
    demo.said("first")
    demo.start("/ask Delete everything")
    demo.question()
    session = demo.session
    demo.process.kill()
    with DemoClient(tmp_path) as again:
        _, updates = again.wait(again.send(method, sessionId=session, cwd=str(tmp_path), mcpServers=[]))
        assert len(updates) == (3 if method == "session/load" else 0)
        again.session = session
        identity = again.start(CONTINUE)
        question = again.question()
        assert question["params"]["toolCall"]["title"] == "Delete everything"
        again.answer(question, "allow_once")
        assert text_of(again.wait(identity)[1]) == "Delete everything: allow_once. "
        assert again.said("so") == "You said: so (message 3 of this conversation)", "it asks once"


def test_mode_and_options_are_applied(demo: DemoClient) -> None:
    assert demo.said("/mode") == "mode default, model demo-fast"
    assert demo.call("session/set_mode", sessionId=demo.session, modeId="plan")["result"] == {}
    options = demo.call("session/set_config_option", sessionId=demo.session, configId="model", value="demo-smart")
    values = {option["id"]: option["currentValue"] for option in options["result"]["configOptions"]}
    assert values == {"mode": "plan", "model": "demo-smart"}
    assert demo.said("/mode") == "mode plan, model demo-smart"
    assert demo.call("session/set_mode", sessionId=demo.session, modeId="no")["error"]["code"] == -32602
    refused = demo.call("session/set_config_option", sessionId=demo.session, configId="model", value="no")
    assert refused["error"]["code"] == -32602


def test_small_commands(demo: DemoClient) -> None:
    assert demo.said("/env GREETING") == "hello from the environment"
    assert demo.said("/env NOTHING") == "(unset)"
    assert demo.said("/cwd") == str(demo.home)
    assert demo.said("/pid") == str(demo.process.pid)
    assert demo.said("/write notes.txt some text") == "wrote notes.txt"
    assert demo.said("/read notes.txt") == "some text\n"
    assert demo.said("/read no-such-file").startswith("cannot read")
    assert demo.said("/bogus") == "unknown command /bogus; /help lists them. "
    assert demo.said("/stream many").startswith("/stream: ")
    assert "/ask2" in demo.said("/help")
    assert [update["sessionUpdate"] for update in demo.prompt("/think deep\n/plan\n/usage")[1]] == [
        "agent_thought_chunk",
        "plan",
        "agent_message_chunk",
        "usage_update",
    ]


def test_odd_endings(demo: DemoClient) -> None:
    """A turn without output, and one that fails."""
    reply, updates = demo.prompt("/empty")
    assert (reply["result"], updates) == ({"stopReason": "end_turn"}, [])
    reply, _ = demo.prompt("/error out of cheese")
    assert reply["error"] == {"code": -32603, "message": "out of cheese"}


def test_noise_and_stderr(demo: DemoClient) -> None:
    """Garbage between frames, and a flood of log lines."""
    assert demo.said("/noise") == "before after"
    assert len(demo.noise) >= 8
    assert demo.said("/stderr 2000") == "wrote 2000 bytes of log"
    assert demo.process.stderr is not None
    assert len(os.read(demo.process.stderr.fileno(), 65536)) == 2000


def test_crash_and_exit(demo: DemoClient, tmp_path: Path) -> None:
    demo.start("/crash 7")
    with pytest.raises(EOFError):
        demo.next()
    assert demo.process.wait(5) == 7
    with DemoClient(tmp_path) as other:
        other.open()
        assert other.said("/exit-idle") == "leaving soon"
        assert other.process.wait(5) == 0


def test_end_of_stdin_ends_the_agent_and_its_tool(demo: DemoClient) -> None:
    demo.start("/tool echo $$; exec sleep 600")
    while not (update := demo.update()).get("content"):
        pass
    assert demo.process.stdin is not None
    demo.process.stdin.close()
    assert demo.process.wait(5) == 0
    assert not alive(int(update["content"][0]["content"]["text"]))
    demo.process.stdin = None


def test_errors_of_the_protocol(demo: DemoClient) -> None:
    assert demo.call("session/unheard_of")["error"]["code"] == -32601
    assert demo.call("session/new", cwd="relative", mcpServers=[])["error"]["code"] == -32602
    assert demo.call("session/prompt", sessionId="no", prompt=[])["error"]["code"] == -32602
    assert demo.call("session/prompt", sessionId=demo.session, prompt="text")["error"]["code"] == -32602
    assert demo.call("session/load", sessionId="../../etc/passwd", cwd="/", mcpServers=[])["error"]["code"] == -32002
    demo.notify("unknown/notification")
    demo.cancel()
    assert "message 1" in demo.said("still here")


def test_load_and_resume_after_a_kill(demo: DemoClient, tmp_path: Path) -> None:
    demo.said("first")
    demo.said("second")
    session = demo.session
    demo.process.kill()
    with DemoClient(tmp_path) as loaded:
        reply, updates = loaded.wait(loaded.send("session/load", sessionId=session, cwd=str(tmp_path), mcpServers=[]))
        assert reply["result"]["modes"]["currentModeId"] == "default"
        assert [update["sessionUpdate"] for update in updates] == ["user_message_chunk", "agent_message_chunk"] * 2
        loaded.session = session
        assert "message 3" in loaded.said("third")
        (listed,) = loaded.call("session/list")["result"]["sessions"]
        assert listed == {"sessionId": session, "cwd": str(tmp_path), "title": "first"}
    with DemoClient(tmp_path) as resumed:
        _, updates = resumed.wait(resumed.send("session/resume", sessionId=session, cwd=str(tmp_path), mcpServers=[]))
        assert updates == []
        resumed.session = session
        assert "message 4" in resumed.said("fourth")


@pytest.mark.parametrize("method", ["session/load", "session/resume"])
@pytest.mark.parametrize(
    ("manner", "kinds"),
    [
        ("well", {"session/load": 4, "session/resume": 0}),
        ("replay", {"session/load": 4, "session/resume": 4}),
        ("empty", {"session/load": 0, "session/resume": 0}),
        ("silent", {"session/load": 4, "session/resume": 0}),
        ("flood 500", {"session/load": 504, "session/resume": 500}),
    ],
)
def test_a_conversation_loads_as_it_was_asked_to(
    demo: DemoClient, tmp_path: Path, method: str, manner: str, kinds: dict[str, int]
) -> None:
    demo.said("first")
    assert demo.said(f"/on-load {manner}") == f"loads: {manner}"
    demo.process.kill()
    with DemoClient(tmp_path) as later:
        later.session = demo.session
        reply, updates = later.wait(later.send(method, sessionId=demo.session, cwd=str(tmp_path), mcpServers=[]))
        assert reply["result"]["modes"]["currentModeId"] == "default"
        assert len(updates) == kinds[method]
        if manner.startswith("flood"):
            assert [later.update()["content"]["text"] for _ in range(3)] == ["late 0 ", "late 1 ", "late 2 "]
        elif manner == "silent":
            identity = later.start("anyone?")
            later.cancel()
            assert later.wait(identity)[0]["result"] == {"stopReason": "cancelled"}
        else:
            assert f"message {1 if manner == 'empty' else 3}" in later.said("next")


def test_a_conversation_that_does_not_load(demo: DemoClient, tmp_path: Path) -> None:
    demo.said("/on-load fail")
    assert demo.said("/on-load sometimes").startswith("/on-load: one of well, fail")
    loading = {"sessionId": demo.session, "cwd": str(tmp_path), "mcpServers": []}
    with DemoClient(tmp_path) as later:
        assert later.call("session/load", **loading)["error"]["code"] == -32603
        later.open()
        assert "message 1" in later.said("fresh")
    demo.said("/on-load crash")
    with DemoClient(tmp_path) as later:
        later.send("session/load", **loading)
        assert later.process.wait(5) == 1
    demo.said("/on-load hang")
    with DemoClient(tmp_path) as later:
        later.send("session/load", **loading)
        later.open()
        assert "message 1" in later.said("fresh")


def test_what_it_is_told_of_an_earlier_conversation_is_no_part_of_the_prompt(demo: DemoClient, tmp_path: Path) -> None:
    record = "<conversation_record>\nlong ago\n</conversation_record>"
    assert demo.said("/told") == "nothing was told"
    blocks = [{"type": "text", "text": text} for text in (record, "/told")]
    identity = demo.send("session/prompt", sessionId=demo.session, prompt=blocks)
    assert text_of(demo.wait(identity)[1]) == record
    demo.process.kill()
    with DemoClient(tmp_path) as later:
        later.session = demo.session
        _, updates = later.wait(later.send("session/load", sessionId=demo.session, cwd=str(tmp_path), mcpServers=[]))
        assert [update["content"]["text"] for update in updates][2:] == [record, "/told", record]
        assert later.said("/told") == record
