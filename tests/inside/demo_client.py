"""A small blocking ACP client for the demo agent, which checks every frame against the published schema."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

from acp import schema
from pydantic import TypeAdapter

from tests.agents.census import kill_all

AGENT = Path(__file__).resolve().parents[2] / "sandboxes" / "inside" / "demo_agent.py"
RESULTS: dict[str, Any] = {
    "initialize": schema.InitializeResponse,
    "session/new": schema.NewSessionResponse,
    "session/load": schema.LoadSessionResponse,
    "session/resume": schema.ResumeSessionResponse,
    "session/list": schema.ListSessionsResponse,
    "session/prompt": schema.PromptResponse,
    "session/set_mode": schema.SetSessionModeResponse,
    "session/set_config_option": schema.SetSessionConfigOptionResponse,
}
ELICITATIONS: dict[str, TypeAdapter[Any]] = {
    "elicitation/create": TypeAdapter(schema.CreateElicitationRequest),
    "elicitation/complete": TypeAdapter(schema.CompleteElicitationNotification),
}


class DemoClient:
    """Runs the agent with the given home; a context manager."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._variable = f"DEMO_TEST={uuid.uuid4().hex}"
        self.noise: list[bytes] = []
        self.questions: list[dict[str, Any]] = []
        self._id = 0
        self._methods: dict[int, str] = {}
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(AGENT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                "HOME": str(home),
                "PATH": os.environ["PATH"],
                "GREETING": "hello from the environment",
                **dict([self._variable.split("=")]),
            },
        )
        self.session = ""

    def __enter__(self) -> DemoClient:
        self.call("initialize", protocolVersion=1)
        return self

    def __exit__(self, *error: object) -> None:
        kill_all(self._variable)
        self.process.communicate()

    def open(self) -> str:
        """A new session, used from now on; swallows the list of commands that follows."""
        reply = self.call("session/new", cwd=str(self.home), mcpServers=[])
        self.session = reply["result"]["sessionId"]
        assert self.next()["params"]["update"]["sessionUpdate"] == "available_commands_update"
        return self.session

    def write(self, message: dict[str, Any]) -> None:
        """One frame to the agent."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        self.process.stdin.flush()

    def notify(self, method: str, **params: Any) -> None:
        self.write({"method": method, "params": params})

    def send(self, method: str, **params: Any) -> int:
        """A request without waiting; its id."""
        self._id += 1
        self._methods[self._id] = method
        self.write({"id": self._id, "method": method, "params": params})
        return self._id

    def next(self) -> dict[str, Any]:
        """The next frame, valid by the schema; lines that are no object go to ``noise``."""
        assert self.process.stdout is not None
        while True:
            line = self.process.stdout.readline()
            if not line:
                raise EOFError
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                self.noise.append(line)
                continue
            self._check(message)
            return message

    def _check(self, message: dict[str, Any]) -> None:
        assert message["jsonrpc"] == "2.0"
        if message.get("method") == "session/update":
            schema.SessionNotification.model_validate(message["params"])
        elif message.get("method") == "session/request_permission":
            schema.RequestPermissionRequest.model_validate(message["params"])
        elif message.get("method") in ELICITATIONS:
            ELICITATIONS[message["method"]].validate_python(message["params"])
        else:
            assert "method" not in message
            model = RESULTS.get(self._methods[message["id"]])
            if model is not None and "result" in message:
                model.model_validate(message["result"])

    def wait(self, identity: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The reply to a request and the updates before it; permission requests are kept in ``questions``."""
        updates = []
        while True:
            message = self.next()
            if message.get("method") == "session/update":
                updates.append(message["params"]["update"])
            elif message.get("method") == "session/request_permission" or message.get("method") in ELICITATIONS:
                self.questions.append(message)
            elif message.get("id") == identity:
                return message, updates

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.wait(self.send(method, **params))[0]

    def start(self, text: str, session: str | None = None) -> int:
        """Send a prompt; its request id."""
        return self.send("session/prompt", sessionId=session or self.session, prompt=[{"type": "text", "text": text}])

    def prompt(self, text: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        return self.wait(self.start(text))

    def said(self, text: str) -> str:
        """The whole message text that a prompt is answered with; it must end its turn."""
        reply, updates = self.prompt(text)
        assert reply["result"] == {"stopReason": "end_turn"}
        return text_of(updates)

    def cancel(self) -> None:
        self.notify("session/cancel", sessionId=self.session)

    def update(self) -> dict[str, Any]:
        """The next frame, which must be an update."""
        message = self.next()
        assert message["method"] == "session/update"
        update: dict[str, Any] = message["params"]["update"]
        return update

    def question(self) -> dict[str, Any]:
        """The next permission request or elicitation; updates before it are dropped."""
        while True:
            message = self.next()
            if message.get("method") in ("session/request_permission", "elicitation/create"):
                return message

    def answer(self, question: dict[str, Any], option: str | None) -> None:
        """Choose an option, or withdraw with None."""
        outcome = {"outcome": "cancelled"} if option is None else {"outcome": "selected", "optionId": option}
        self.write({"id": question["id"], "result": {"outcome": outcome}})


def text_of(updates: list[dict[str, Any]]) -> str:
    """The exact concatenation of the message chunks."""
    return "".join(item["content"]["text"] for item in updates if item["sessionUpdate"] == "agent_message_chunk")
