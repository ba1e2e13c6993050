"""An agent for one figure: when did ``session/cancel`` reach it? It holds every prompt and answers with the instant.

The prompt ``speak N`` has it say something N times a second meanwhile.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from typing import Any

WRITING = threading.Lock()


def send(frame: dict[str, Any]) -> None:
    """Write one frame."""
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **frame}) + "\n")
    sys.stdout.flush()


def say(text: str) -> None:
    """A message chunk."""
    update = {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": text}}
    send({"method": "session/update", "params": {"sessionId": "bench", "update": update}})


def speak(pause: float, over: threading.Event) -> None:
    """Say a dot at each pause until the prompt is over."""
    while not over.wait(pause):
        with WRITING:
            if not over.is_set():
                say(".")


def plan(count: int) -> None:
    """That many updates of which each is a record."""
    for n in range(count):
        entries = [{"content": f"step {n}", "status": "pending", "priority": "low"}]
        update = {"sessionUpdate": "plan", "entries": entries}
        send({"method": "session/update", "params": {"sessionId": "bench", "update": update}})


def main() -> None:
    """Serve until stdin ends."""
    held = None
    over = threading.Event()
    for line in sys.stdin:
        heard = time.monotonic_ns()
        frame = json.loads(line)
        match frame.get("method"):
            case "initialize":
                send({"id": frame["id"], "result": {"protocolVersion": 1, "agentCapabilities": {}}})
            case "session/new":
                send({"id": frame["id"], "result": {"sessionId": "bench"}})
            case "session/prompt":
                held, over = frame["id"], threading.Event()
                say("held ")
                if many := re.search(r"records (\d+)", line):
                    plan(int(many[1]))
                    send({"id": held, "result": {"stopReason": "end_turn"}})
                    held = None
                if times := re.search(r"speak (\d+)", line):
                    threading.Thread(target=speak, args=(1 / int(times[1]), over), daemon=True).start()
            case "session/cancel" if held is not None:
                with WRITING:
                    over.set()
                    say(str(heard))
                    send({"id": held, "result": {"stopReason": "cancelled"}})
                held = None


if __name__ == "__main__":
    main()
