"""An agent that asks a chat model at MODEL_URL with MODEL_KEY, and answers with what that said; standard library only.

Its workspace gets ``token.txt`` with the key as it knows it.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from typing import Any


def model_says(prompt: str) -> str:
    tool = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
    body = {"model": "fake-model", "messages": [{"role": "user", "content": prompt}], "tools": [tool]}
    request = urllib.request.Request(
        os.environ["MODEL_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["MODEL_KEY"], "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return str(json.load(answer)["choices"][0]["message"]["content"])
    except urllib.error.HTTPError as error:
        return f"{error.code} {json.load(error)['error']['message']}"


def answer_to(frame: dict[str, Any]) -> dict[str, Any] | None:
    method = frame.get("method")
    if method == "initialize":
        return {"protocolVersion": 1, "agentCapabilities": {}, "authMethods": []}
    if method == "session/new":
        with open("token.txt", "w") as file:
            file.write(os.environ.get("MODEL_KEY", ""))
        return {"sessionId": "session-of-the-agent"}
    if method == "session/prompt":
        text = model_says("".join(block.get("text", "") for block in frame["params"]["prompt"]))
        update = {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": text}}
        tell({"method": "session/update", "params": {"sessionId": "session-of-the-agent", "update": update}})
        return {"stopReason": "end_turn"}
    return None


def tell(frame: dict[str, Any]) -> None:
    print(json.dumps({"jsonrpc": "2.0", **frame}), flush=True)


for line in sys.stdin:
    frame = json.loads(line)
    result = answer_to(frame)
    if result is not None:
        tell({"id": frame["id"], "result": result})
