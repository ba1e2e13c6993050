"""``acp-runner chat``: from a pipe, and at a terminal of its own."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runner.errors import TURN_IN_USE_SENTENCE, RunnerError
from tests.cli.conftest import Invoke, Served
from tests.cli.test_prompt import admitted, requests
from tests.server.double import FakeHandle, finished_handle, line, result

SECONDS = 15.0


def answering(text: str) -> FakeHandle:
    return finished_handle(admitted(), line(2, "message_delta", {"message_id": "m", "text": text}))


def test_lines_of_a_pipe_are_sent_one_after_the_other(invoke: Invoke, served: Served) -> None:
    answers = iter(["one", "two"])
    served.sessions.next_handle = lambda: answering(next(answers))
    ran = invoke("chat", "-s", "s1", "--harness", "demo", answers="first\n\nsecond\n")
    assert (ran.exit_code, ran.stdout) == (0, "one\ntwo\n")
    assert [(request.prompt, request.on_busy) for request in requests(served)] == [
        ("first", "queue"),
        ("second", "queue"),
    ]
    assert len({request.prompt_id for request in requests(served)}) == 2


def test_a_refused_message_is_told_and_not_sent_again(invoke: Invoke, served: Served) -> None:
    served.sessions.refuse()
    ran = invoke("chat", "-s", "s1", "--on-busy", "reject", answers="hi\n")
    assert ran.exit_code == 1
    assert f"Message not sent: {TURN_IN_USE_SENTENCE}" in ran.stderr
    assert len(requests(served)) == 1


def test_an_error_before_the_stream_is_not_sent_either(invoke: Invoke, served: Served) -> None:
    def full() -> FakeHandle:
        raise RunnerError("queue_full", "100 prompts wait already.", retry_after=1)

    served.sessions.next_handle = full
    ran = invoke("chat", "-s", "s1", "--harness", "demo", answers="hi\n")
    assert ran.exit_code == 1
    assert "Message not sent: 100 prompts wait already." in ran.stderr


class Terminal:
    """A person at ``acp-runner chat``."""

    def __init__(self, url: str, tmp_path: Path) -> None:
        self._end, theirs = pty.openpty()
        self.shown = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "runner.cli.main", "chat", "--session", "s1", "--harness", "demo"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "ACP_RUNNER_URL": url, "ACP_RUNNER_TOKEN": "all", "COLUMNS": "100", "TERM": "xterm"},
            cwd=tmp_path,
            start_new_session=True,
        )
        os.close(theirs)

    def types(self, text: str) -> None:
        os.write(self._end, text.encode())

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"no {what} in:\n{self.shown}"
            if select.select([self._end], [], [], 0.02)[0]:
                try:
                    self.shown += os.read(self._end, 65536).decode("utf-8", "replace")
                except OSError:
                    pass

    def shows(self, text: str) -> None:
        self.until(lambda: text in self.plain, repr(text))

    @property
    def plain(self) -> str:
        """What was shown, without the movements of the cursor."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.shown).replace("\r", "")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        os.close(self._end)


@pytest.fixture
def terminal(served: Served, tmp_path: Path) -> Iterator[Terminal]:
    person = Terminal(served.url, tmp_path)
    yield person
    person.close()


def test_at_a_terminal_messages_wait_and_esc_aborts_the_current_one(served: Served, terminal: Terminal) -> None:
    """Typed while a turn runs: it waits, is shown so, and runs on when Esc ended the one before."""
    sessions = served.sessions
    first: list[FakeHandle] = []
    second: list[FakeHandle] = []

    def next_handle() -> FakeHandle:
        handle = FakeHandle()
        if not first:
            handle.plan = lambda reader: reader.feed(admitted())
            first.append(handle)
        else:
            queued = line(1, "turn_queued", {"prompt_id": "p2", "position": 1}, "p2")
            handle.plan = lambda reader: reader.feed(queued)
            second.append(handle)
        return handle

    async def abort(caller: object, session_id: str, prompt_id: str) -> bool:
        sessions.calls.append(("abort_prompt", "default", session_id, prompt_id))
        first[0].readers[0].end()
        first[0].resolve(result("cancelled", text=""))
        return True

    def go_on() -> None:
        delta = line(3, "message_delta", {"message_id": "m", "text": "for you\n"}, "p2")
        second[0].readers[0].feed(line(2, "turn_admitted", {"turn_id": "t2", "prompt_ids": ["p2"]}, "p2"), delta).end()
        second[0].resolve(result())

    sessions.next_handle = next_handle
    sessions.abort_prompt = abort  # type: ignore[method-assign]
    sessions.active = "A"
    terminal.shows("Esc stops the current prompt")
    terminal.types("one\r")
    terminal.until(lambda: first, "first dispatch")
    terminal.types("two\r")
    terminal.shows("queued at position 1")
    terminal.shows("[1 waiting: “two”] > ")
    terminal.types("half a thought")
    terminal.types("\x1b")
    terminal.shows("stopped")
    assert [call[3] for call in sessions.calls if call[0] == "abort_prompt"] == ["A"]
    served.do(go_on)
    terminal.shows("for you")
    terminal.shows("> half a thought")
    terminal.types("\x15\x04")
    terminal.until(lambda: terminal.process.poll() is not None, "end")
    assert terminal.process.returncode == 0


def test_at_a_terminal_a_refused_message_stays_on_the_line(served: Served, terminal: Terminal) -> None:
    served.sessions.refuse()
    terminal.shows("Ctrl-D leaves")
    terminal.types("precious\r")
    terminal.shows("Message not sent")
    terminal.until(lambda: terminal.plain.endswith("> precious"), "line")
    assert len(requests(served)) == 1, "nothing tries again"
    terminal.process.send_signal(signal.SIGINT)
    terminal.until(lambda: terminal.process.poll() is not None, "end")
    assert terminal.process.returncode == 0
