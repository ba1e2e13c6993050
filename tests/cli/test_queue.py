"""``acp-runner queue``, and what ``prompt`` does with a busy session."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.cli.conftest import Invoke, Served
from tests.cli.test_prompt import requests
from tests.server.double import FakeHandle, line, result


def test_the_queue_is_listed(invoke: Invoke, served: Served) -> None:
    served.sessions.active = "A"
    served.sessions.waiting = [{"prompt_id": "B", "state": "queued", "position": 1}]
    ran = invoke("queue", "list", "s1")
    assert ran.exit_code == 0
    assert [row.split() for row in ran.stdout.splitlines()[1:]] == [["A", "active"], ["1", "B", "queued"]]
    ran = invoke("queue", "list", "s1", "--json")
    assert json.loads(ran.stdout)["items"] == served.sessions.waiting
    assert invoke("queue", "list", "unknown").exit_code == 1


def test_an_abort_says_whether_it_did_anything(invoke: Invoke, served: Served) -> None:
    served.sessions.abortable.add("B")
    ran = invoke("queue", "abort", "s1", "B")
    assert (ran.exit_code, ran.stderr) == (0, "aborted B\n")
    ran = invoke("queue", "abort", "s1", "B")
    assert ran.exit_code == 1
    assert "nothing to abort" in ran.stderr
    ran = invoke("queue", "abort", "s1", "B", "--json")
    assert (ran.exit_code, json.loads(ran.stdout)) == (1, {"aborted": False})


@pytest.mark.parametrize("on_busy", ["queue", "steer", "reject"])
def test_a_prompt_says_what_to_do_when_busy(invoke: Invoke, served: Served, on_busy: str) -> None:
    assert invoke("prompt", "-s", "s1", "--on-busy", on_busy, "hi").exit_code == 0
    assert requests(served)[0].on_busy == on_busy


def test_what_to_do_when_busy_is_checked(invoke: Invoke) -> None:
    assert invoke("prompt", "-s", "s1", "--on-busy", "wait", "hi").exit_code == 2


def test_an_absorbed_prompt_is_told(invoke: Invoke, served: Served) -> None:
    def absorbed() -> FakeHandle:
        handle = FakeHandle()
        handle.plan = lambda reader: reader.feed(line(1, "turn_queued", {"prompt_id": "p1", "position": 2})).end()
        handle.resolve(result("absorbed", ok=True, absorbed_by="p2", text=""))
        return handle

    served.sessions.next_handle = absorbed
    ran = invoke("prompt", "-s", "s1", "--on-busy", "queue", "hi")
    assert ran.exit_code == 0
    assert "queued at position 2" in ran.stderr
    assert "sent together with a later message" in ran.stderr


def test_ctrl_c_of_a_queued_prompt_takes_no_other_with_it(invoke: Invoke, served: Served) -> None:
    sessions = served.sessions
    sessions.abortable = {"any"}

    def queued() -> FakeHandle:
        handle = FakeHandle()

        def plan(reader: object) -> None:
            handle.readers[0].feed(line(1, "turn_queued", {"prompt_id": "p1", "position": 1}))
            os.kill(os.getpid(), signal.SIGINT)

        handle.plan = plan
        return handle

    async def abort(caller: object, session_id: str, prompt_id: str) -> bool:
        sessions.calls.append(("abort_prompt", "default", session_id, prompt_id))
        sessions.handles[0].readers[0].end()
        sessions.handles[0].resolve(result("cancelled", turn_id=None, text=""))
        return True

    sessions.next_handle = queued
    sessions.abort_prompt = abort  # type: ignore[method-assign]
    ran = invoke("prompt", "-s", "s1", "--on-busy", "queue", "hi")
    assert ran.exit_code == 1
    sent = requests(served)[0].prompt_id
    assert [call[3] for call in sessions.calls if call[0] == "abort_prompt"] == [sent]
    assert "cancel" not in [call[0] for call in sessions.calls]
