"""An ACP agent that does what a script says, right or wrong; ``tests/agents/steps.py`` documents every step.

Environment: SCRIPT, the path of a JSON script (without it the agent is polite); FRAME_LOG, a file that gets one JSON
line for every frame received and for every event of the process. A prompt whose text is a JSON list of steps runs those
instead of the script's. Standard library only; each request runs on a thread of its own.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

Step = dict[str, Any]
POLL_SECONDS = 0.002
CAPABILITIES = {
    "protocolVersion": 1,
    "agentInfo": {"name": "scripted", "version": "1"},
    "agentCapabilities": {"loadSession": True, "sessionCapabilities": {"close": {}, "resume": {}}},
    "authMethods": [],
}


class Over(Exception):
    """The turn was settled by its cancel: its remaining steps are dropped."""


class Request:
    """One request of the client (or the start of the process), and what its steps know."""

    def __init__(self, frame: dict[str, Any], ordinal: int = 0) -> None:
        self.id = frame.get("id")
        self.method = frame.get("method", "")
        params = frame.get("params")
        self.params: dict[str, Any] = params if isinstance(params, dict) else {}
        self.session = self.params.get("sessionId", "")
        self.ordinal = ordinal
        self.answered = False
        self.settled = threading.Event()
        self.deaf = False
        self.turn_lock = threading.RLock()
        self.waiting: list[tuple[Any, Step]] = []
        self.targets: list[Request] = []


class Agent:
    """Reads frames, logs them and runs the steps of their method."""

    def __init__(self, script: dict[str, Any]) -> None:
        self.script = script
        self.hooks: dict[str, list[list[Step]]] = script.get("on", {})
        self.prompts: list[Request] = []
        self.counts: dict[str, int] = {}
        self.answers: dict[str, Any] = {}
        self.lock = threading.Lock()
        self.sessions = 0
        self.next_id = 0
        self.log_fd = -1
        if os.environ.get("FRAME_LOG"):
            self.log_fd = os.open(os.environ["FRAME_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def log(self, **entry: Any) -> None:
        """One line of the frame log, on disk when this returns."""
        if self.log_fd >= 0:
            line = json.dumps({"pid": os.getpid(), "at": time.time(), **entry})
            os.write(self.log_fd, line.encode("ascii") + b"\n")

    def write(self, data: bytes) -> None:
        """Bytes to stdout, whole; blocks while the client does not read."""
        with self.lock:
            view = memoryview(data)
            while view:
                view = view[os.write(1, view) :]

    def send(self, message: dict[str, Any]) -> None:
        self.write(json.dumps({"jsonrpc": "2.0", **message}).encode("ascii") + b"\n")

    def new_id(self) -> Any:
        """The id of a request of ours: from 1, from 0, or a UUID (``ids`` of the script)."""
        kind = self.script.get("ids", "one")
        with self.lock:
            self.next_id += 1
            return str(uuid.uuid4()) if kind == "uuid" else self.next_id - (kind == "zero")

    def run(self) -> None:
        """Start steps, then serve until stdin ends."""
        for name in self.script.get("ignore_signals", []):
            signal.signal(signal.Signals[f"SIG{name}"], signal.SIG_IGN)
        if self.script.get("wrap"):
            self._wrap()
        self.log(event="start", argv=sys.argv)
        self.perform(Request({}), self.script.get("start", []))
        rest = b""
        while data := os.read(0, 65536):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._receive(line)
        self.log(event="eof")
        while self.script.get("stay"):
            time.sleep(60)
        os._exit(0)

    def _wrap(self) -> None:
        """Become the parent of the real agent, as npm and shell wrappers are."""
        child = os.fork()
        if child:
            os.close(self.log_fd) if self.log_fd >= 0 else None
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _, status = os.waitpid(child, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)

    def _receive(self, line: bytes) -> None:
        try:
            frame = json.loads(line)
        except ValueError:
            self.log(event="bad_line", text=line.decode("utf-8", "replace"))
            return
        self.log(frame=frame)
        if "method" not in frame:
            self.answers[str(frame.get("id"))] = frame
            return
        method = frame["method"]
        ordinal = self.counts[method] = self.counts.get(method, 0) + 1
        request = Request(frame, ordinal)
        if method == "session/prompt":
            self.prompts.append(request)
        elif method == "session/cancel":
            request.targets = [prompt for prompt in self.prompts if prompt.session == request.session]
        elif method == "session/new":
            self.sessions += 1
            request.session = f"scripted-{os.getpid()}-{self.sessions}"
        steps = self._steps(request)
        if steps or "id" in frame:
            threading.Thread(target=self.perform, args=(request, steps), daemon=True).start()
        if self.script.get("stop_reading_after") == method:
            self.log(event="stopped_reading")
            while True:
                time.sleep(60)

    def _steps(self, request: Request) -> list[Step]:
        if request.method == "session/prompt":
            blocks = request.params.get("prompt", [])
            texts = [block.get("text", "") for block in blocks if isinstance(block, dict)]
            text = "".join(text for text in texts if not text.startswith("<conversation_record>"))
            if text.startswith('[{"do"'):
                return list(json.JSONDecoder().raw_decode(text)[0])
        planned = self.hooks.get(request.method)
        if planned:
            return planned[min(request.ordinal, len(planned)) - 1]
        if request.method == "session/prompt":
            return [{"do": "text", "text": f"answer {request.ordinal}"}, {"do": "reply"}]
        if request.method == "session/cancel":
            return [{"do": "settle"}]
        return [{"do": "reply"}]

    def perform(self, request: Request, steps: list[Step]) -> None:
        """Run steps in order; ``Over`` ends them."""
        try:
            for step in steps:
                act = STEPS[step["do"]]
                if step["do"] in INSTANT:
                    with request.turn_lock:
                        self.check(request)
                        act(self, request, step)
                else:
                    self.check(request)
                    act(self, request, step)
        except Over:
            self.log(event="over", method=request.method)
        except BrokenPipeError:
            self.log(event="broken_pipe", method=request.method)

    def check(self, request: Request) -> None:
        """``Over`` when the cancel settled this turn."""
        if request.settled.is_set() and not request.deaf:
            raise Over

    def pause(self, request: Request, done: Callable[[], Any]) -> None:
        """Wait for a condition, or for the cancel that settles this turn."""
        while not done():
            self.check(request)
            time.sleep(POLL_SECONDS)

    def update(self, request: Request, update: dict[str, Any]) -> None:
        session = request.session or f"scripted-{os.getpid()}-{self.sessions}"
        self.send({"method": "session/update", "params": {"sessionId": session, "update": update}})

    def default_result(self, request: Request) -> Any:
        """What a polite agent answers."""
        if request.method == "initialize":
            return CAPABILITIES
        if request.method == "session/new":
            return {"sessionId": request.session}
        return {"stopReason": "end_turn"} if request.method == "session/prompt" else {}

    def reply(self, request: Request, step: Step) -> None:
        """Answer a request once, or once more with ``again``."""
        if request.answered and not step.get("again"):
            return
        request.answered = True
        if "error" in step:
            body: dict[str, Any] = {"error": step["error"]}
        elif "result" in step:
            body = {"result": step["result"]}
        elif "stop" in step:
            body = {"result": {"stopReason": step["stop"]}}
        elif "merge" in step:
            merged = {**self.default_result(request), **step["merge"]}
            body = {"result": {name: value for name, value in merged.items() if name not in step.get("drop", [])}}
        else:
            body = {"result": self.default_result(request)}
        identity = step.get("as_id", request.id)
        self.send({"id": identity, **body})
        self.log(event="replied", method=request.method, ordinal=request.ordinal)


def do_reply(agent: Agent, request: Request, step: Step) -> None:
    if request.method == "session/cancel":
        raise ValueError("a cancel has no answer; use settle")
    agent.reply(request, step)


def do_settle(agent: Agent, request: Request, step: Step) -> None:
    for prompt in request.targets:
        with prompt.turn_lock:
            if not prompt.answered:
                prompt.settled.set()
                agent.reply(prompt, {"stop": "cancelled", **step})


def do_reply_to(agent: Agent, request: Request, step: Step) -> None:
    agent.reply(agent.prompts[step["prompt"] - 1], {**step, "again": True})


def do_chunk(agent: Agent, request: Request, step: Step) -> None:
    kind = "agent_thought_chunk" if step["do"] == "thought" else "agent_message_chunk"
    update = {"sessionUpdate": kind, "content": {"type": "text", "text": step["text"]}}
    for _ in range(step.get("times", 1)):
        agent.update(request, update)


def do_update(agent: Agent, request: Request, step: Step) -> None:
    agent.update(request, step["update"])


def do_notify(agent: Agent, request: Request, step: Step) -> None:
    agent.send({"method": step["method"], "params": step.get("params", {})})


def do_request(agent: Agent, request: Request, step: Step) -> None:
    identity = step["id"] if "id" in step else agent.new_id()
    params = {"sessionId": request.session, **step.get("params", {})}
    agent.send({"id": identity, "method": step["method"], "params": params})
    request.waiting.append((identity, step))
    if step.get("wait", True):
        do_answers(agent, request, step)


def do_answers(agent: Agent, request: Request, step: Step) -> None:
    """Wait for every answer that is still out, then do what was planned for each outcome."""
    waiting, request.waiting = request.waiting, []
    for identity, asked in waiting:
        name = str(identity)
        agent.pause(request, partial(agent.answers.__contains__, name))
        answer = agent.answers.pop(name)
        outcome = (answer.get("result") or {}).get("outcome") or {}
        kinds = {option["optionId"]: str(option.get("kind")) for option in asked.get("options", [])}
        kind = "error" if "error" in answer else outcome.get("outcome", "selected")
        allowed = kinds.get(outcome.get("optionId", ""), "").startswith("allow")
        verdict = "cancelled" if kind == "cancelled" else "allowed" if kind == "selected" and allowed else "denied"
        agent.log(event="answered", id=identity, verdict=verdict)
        agent.perform(request, asked.get(f"then_{verdict}", []))
        if verdict == "cancelled" and request.answered:
            raise Over


def do_raw(agent: Agent, request: Request, step: Step) -> None:
    data = base64.b64decode(step["base64"])
    pieces = max(1, step.get("pieces", 1))
    size = -(-len(data) // pieces)
    for start in range(0, len(data), max(1, size)):
        agent.write(data[start : start + size])


def do_line(agent: Agent, request: Request, step: Step) -> None:
    """One message chunk whose line, without its newline, has exactly ``size`` bytes."""
    update = {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": ""}}
    params = {"sessionId": request.session, "update": update}
    empty = json.dumps({"jsonrpc": "2.0", "method": "session/update", "params": params}).encode("ascii")
    cut = empty.rindex(b'""') + 1
    line = empty[:cut] + b"x" * (step["size"] - len(empty)) + empty[cut:] + b"\n"
    do_raw(agent, request, {"base64": base64.b64encode(line), "pieces": step.get("pieces", 1)})


def do_flood(agent: Agent, request: Request, step: Step) -> None:
    """Bytes without a newline, to stdout, or log lines to stderr."""
    left = step["bytes"]
    block = (b"x" * 99 + (b"\n" if step.get("stderr") else b"x")) * 655
    while left > 0:
        if step.get("stderr"):
            left -= os.write(2, block[:left])
        else:
            agent.write(block[:left])
            left -= len(block)
    if step.get("stderr"):
        agent.log(event="stderr_written")


def do_gate(agent: Agent, request: Request, step: Step) -> None:
    path = step["path"]
    with open(path + ".reached", "w", encoding="utf-8"):
        pass
    request.deaf = request.deaf or step.get("deaf", False)
    agent.pause(request, lambda: os.path.exists(path))


def do_sleep(agent: Agent, request: Request, step: Step) -> None:
    until = time.monotonic() + step["seconds"]
    agent.pause(request, lambda: time.monotonic() >= until)


def do_hang(agent: Agent, request: Request, step: Step) -> None:
    agent.pause(request, lambda: False)


def do_exit(agent: Agent, request: Request, step: Step) -> None:
    if step.get("close_stdout"):
        os.close(1)
        return
    if step.get("stderr"):
        os.write(2, step["stderr"].encode() + b"\n")
    if step.get("signal"):
        os.kill(os.getpid(), signal.Signals[f"SIG{step['signal']}"])
        time.sleep(60)
    os._exit(step.get("code", 0))


def do_spawn(agent: Agent, request: Request, step: Step) -> None:
    """A process that goes on; its pid is in the frame log before the next step."""
    import subprocess

    how, command = step.get("how", "plain"), step["command"]
    deaf = f"trap '' TERM HUP INT; {command}"
    argv = {
        "plain": ["/bin/sh", "-c", command],
        "setsid": ["setsid", "/bin/sh", "-c", command],
        "nohup": ["nohup", "setsid", "/bin/sh", "-c", command],
        "daemon": ["setsid", "/bin/sh", "-c", f"({deaf}) & exit 0"],
        "deaf": ["/bin/sh", "-c", deaf],
        "holds_stdout": ["setsid", "/bin/sh", "-c", command],
    }[how]
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=None if how == "holds_stdout" else subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    if how == "daemon":
        process.wait()
    agent.log(event="spawned", child=process.pid, how=how)


def do_run(agent: Agent, request: Request, step: Step) -> None:
    """A command that blocks this request, cancelled or not, until it is gone."""
    import subprocess

    process = subprocess.Popen(
        ["/bin/sh", "-c", step["command"]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    agent.log(event="spawned", child=process.pid, how="run")
    agent.log(event="ran", child=process.pid, status=process.wait())
    agent.check(request)


INSTANT = frozenset({"reply", "text", "thought", "update", "notify"})
STEPS: dict[str, Callable[[Agent, Request, Step], None]] = {
    "reply": do_reply,
    "settle": do_settle,
    "reply_to": do_reply_to,
    "text": do_chunk,
    "thought": do_chunk,
    "update": do_update,
    "notify": do_notify,
    "request": do_request,
    "answers": do_answers,
    "raw": do_raw,
    "line": do_line,
    "flood": do_flood,
    "gate": do_gate,
    "sleep": do_sleep,
    "hang": do_hang,
    "exit": do_exit,
    "spawn": do_spawn,
    "run": do_run,
}


def main() -> None:
    """Load the script and serve."""
    script: dict[str, Any] = {}
    if os.environ.get("SCRIPT"):
        with open(os.environ["SCRIPT"], encoding="utf-8") as file:
            script = json.load(file)
    Agent(script).run()


if __name__ == "__main__":
    main()
