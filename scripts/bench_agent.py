"""An agent for one figure: when did ``session/cancel`` reach it? It holds every prompt and answers with the instant."""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def send(frame: dict[str, Any]) -> None:
    """Write one frame."""
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **frame}) + "\n")
    sys.stdout.flush()


def say(text: str) -> None:
    """A message chunk."""
    update = {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": text}}
    send({"method": "session/update", "params": {"sessionId": "bench", "update": update}})


def main() -> None:
    """Serve until stdin ends."""
    held = None
    for line in sys.stdin:
        heard = time.monotonic_ns()
        frame = json.loads(line)
        match frame.get("method"):
            case "initialize":
                send({"id": frame["id"], "result": {"protocolVersion": 1, "agentCapabilities": {}}})
            case "session/new":
                send({"id": frame["id"], "result": {"sessionId": "bench"}})
            case "session/prompt":
                held = frame["id"]
                say("held ")
            case "session/cancel" if held is not None:
                say(str(heard))
                send({"id": held, "result": {"stopReason": "cancelled"}})
                held = None


if __name__ == "__main__":
    main()
