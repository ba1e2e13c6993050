"""One conversation of the demo agent and the turn that runs in it."""

from __future__ import annotations

import json
import os

from demo import history

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any

    from demo.loop import Loop, Wait

ROLES = {"told": "user_message_chunk", "user": "user_message_chunk", "agent": "agent_message_chunk"}
MODES = {"default": "Answers and runs commands.", "plan": "Says what it would do."}
MODELS = {"demo-fast": "Short answers.", "demo-smart": "The same answers, with a clever name."}


class Session:
    """State of a conversation: how many prompts it saw, its mode and model, the open turn.

    ``told``: what a client wrote of an earlier conversation; ``silent``: prompts are never answered;
    ``unfinished``: the prompt that waited for the user when an earlier process ended.
    """

    def __init__(self, loop: Loop, cwd: str, identity: str | None = None) -> None:
        self.loop = loop
        self.cwd = cwd
        self.id = identity or os.urandom(12).hex()
        self.prompts = 0
        self.mode = "default"
        self.model = "demo-fast"
        self.turn: Turn | None = None
        self.told = ""
        self.silent = False
        self.unfinished = ""
        self.journal = history.Journal(self.id)
        head, tail = self.frame({"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": "\0"}})
        self.chunk_head, self.chunk_tail = head, tail

    def frame(self, update: dict[str, Any]) -> tuple[bytes, bytes]:
        """The update's line, cut in two where a NUL character stands."""
        message = {"jsonrpc": "2.0", "method": "session/update", "params": {"sessionId": self.id, "update": update}}
        head, _, tail = json.dumps(message, separators=(",", ":")).encode("ascii").partition(b"\\u0000")
        return head, tail + b"\n"

    def update(self, update: str, /, **members: Any) -> None:
        """Queue one ``session/update``."""
        self.loop.send(b"".join(self.frame({"sessionUpdate": update, **members})))

    def say(self, text: str) -> None:
        """Queue one message chunk."""
        self.loop.send(self.chunk_head + json.dumps(text)[1:-1].encode("ascii") + self.chunk_tail)
        if self.turn is not None:
            self.turn.said.append(text)

    def keep(self, turn: Turn) -> None:
        """Write the turn to the history, and the conversation's directory with its first one."""
        first = {"cwd": self.cwd} if self.prompts == 1 else {}
        told = {"told": turn.told} if turn.told else {}
        self.journal.append({**first, **told, "user": turn.text, "agent": "".join(turn.said)})

    def keep_open(self) -> None:
        """Write down that the turn waits for the user: a process after this one asks again."""
        first = {"cwd": self.cwd} if self.prompts == 1 else {}
        if self.turn is not None:
            self.journal.append({**first, "open": self.turn.text})

    def replay(self) -> None:
        """Queue the whole history, as ``session/load`` asks."""
        for entry in history.entries(self.id):
            for role, kind in ROLES.items():
                if entry.get(role):
                    self.update(kind, content={"type": "text", "text": entry[role]})
        if self.unfinished:
            self.update("user_message_chunk", content={"type": "text", "text": self.unfinished})

    def recall(self) -> None:
        """Count the prompts of the history, and know what was told."""
        for entry in history.entries(self.id):
            self.prompts += "user" in entry
            self.told = entry.get("told", self.told)
            self.unfinished = entry.get("open", "")

    @property
    def setup(self) -> dict[str, Any]:
        """Modes and config options, as every answer that sets a session up shows them."""
        return {
            "modes": {
                "currentModeId": self.mode,
                "availableModes": [{"id": name, "name": name.title(), "description": MODES[name]} for name in MODES],
            },
            "configOptions": self.config_options,
        }

    @property
    def config_options(self) -> list[dict[str, Any]]:
        """The complete list of options with their current values."""
        return [_select("mode", "Mode", self.mode, MODES), _select("model", "Model", self.model, MODELS)]


class Turn:
    """One open ``session/prompt``.

    Attributes:
        id: the request's id.
        stop_reason: what the prompt will be answered with.
        error: a JSON-RPC error to answer with instead.
        deaf: ignores cancels.
        told: what its prompt said of an earlier conversation.
    """

    def __init__(self, identity: Any, text: str, told: str = "") -> None:
        self.id = identity
        self.text = text
        self.told = told
        self.work: Generator[Wait] | None = None
        self.stop_reason = "end_turn"
        self.error: dict[str, Any] | None = None
        self.deaf = False
        self.exit_afterwards = False
        self.said: list[str] = []


def _select(identity: str, name: str, current: str, values: dict[str, str]) -> dict[str, Any]:
    return {
        "type": "select",
        "id": identity,
        "name": name,
        "category": identity,
        "currentValue": current,
        "options": [{"value": value, "name": value, "description": values[value]} for value in values],
    }
