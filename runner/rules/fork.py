"""A history that is cut at a cursor: what goes into the fork, and what must be closed there (DESIGN 4, ``fork``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from runner.rules.unfinished import Unfinished
from runner.terms import EventType, InteractionStatus, Outcome, PromptState

FORKED: Final = "forked"
"""``reason`` of what was closed because the history was cut there, and kind of the fork's notice."""
INTERRUPTED: Final = "No result: the conversation was forked before this call ended."
BEGUN: Final = "The conversation up to here was taken over from another session."
SPENT: Final = frozenset({"workspace_files", "secrets_expire_at"})
"""What of a configuration holds for one sandbox only."""


class Closed(NamedTuple):
    """A record that the fork gets behind the copied ones; ``turn_id`` None: outside of turns."""

    turn_id: str | None
    prompt_id: str | None
    type: EventType
    data: dict[str, Any]


@dataclass(slots=True)
class Cut:
    """Sees the records that go over, oldest first; what they leave open at their end.

    Attributes:
        open: what their session would have to close at a boot; its ``context``: an agent knew something.
        unanswered: the last prompt that was sent has no completed answer.
    """

    open: Unfinished = field(default_factory=Unfinished)
    unanswered: bool = False
    _turn: tuple[str, str | None] | None = None
    _sent: bool = False
    _questions: dict[str, None] = field(default_factory=dict)

    def see(self, turn_id: str | None, prompt_id: str | None, kind: str, data: Mapping[str, Any]) -> None:
        """Take the next record."""
        self.open.see(kind, data)
        match kind:
            case EventType.TURN_ADMITTED if turn_id is not None:
                self._turn = (turn_id, prompt_id)
                self._sent = "resumes" in data
            case EventType.USER_MESSAGE:
                self._sent = self.unanswered = True
                if self._turn is not None:
                    self._turn = (self._turn[0], prompt_id)
            case EventType.DONE:
                self._turn = None
                self.unanswered = self.unanswered and data.get("outcome") != Outcome.COMPLETED
            case EventType.INTERACTION_REQUESTED:
                self._questions[str(data.get("interaction_id"))] = None
            case EventType.INTERACTION_CLOSED:
                self._questions.pop(str(data.get("interaction_id")), None)

    def closing(self) -> list[Closed]:
        """Every ending that the cut history lacks, in the order of a turn's own end."""
        turn_id, owner = self._turn if self._turn is not None else (None, None)
        found: list[tuple[EventType, dict[str, Any], str | None]] = []
        for interaction_id in self._questions:
            closed = {"interaction_id": interaction_id, "status": InteractionStatus.CANCELLED.value, "reason": FORKED}
            found.append((EventType.INTERACTION_CLOSED, closed, owner))
        for tool in self.open.tools.values():
            said = {"type": "content", "content": {"type": "text", "text": INTERRUPTED}}
            found.append((EventType.TOOL_CALL, {**tool, "status": "failed", "content": [said]}, owner))
        state = PromptState.ABORTED if self._sent or self._turn is None else PromptState.CANCELLED
        for prompt_id in self.open.prompts:
            found.append((EventType.PROMPT_ENDED, {"prompt_id": prompt_id, "state": state.value}, prompt_id))
        if turn_id is not None:
            word = Outcome.CANCELLED.value
            done = {"turn_id": turn_id, "outcome": word, "stop_reason": word, "reason": FORKED}
            found.append((EventType.DONE, done, owner))
        records = [Closed(turn_id, prompt_id, kind, data) for kind, data, prompt_id in found]
        return [*records, *([Closed(None, None, EventType.SESSION_IDLE, {})] if self.open.busy else [])]


def config_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The session's configuration as its fork begins with it: secrets only by their names and references."""
    return {name: value for name, value in config.items() if name not in SPENT}


def notice(session_id: str, after: str, workspace: str, reason: str | None = None) -> dict[str, Any]:
    """What the fork's history says behind all that it took over; ``reason``: why its workspace is empty."""
    said = {"kind": FORKED, "session_id": session_id, "after": after, "workspace": workspace, "message": BEGUN}
    return said if reason is None else {**said, "reason": reason}


def origin_of(agent_state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What was answered when a session was made as a fork; None for any other session."""
    made = agent_state.get("fork")
    return made if isinstance(made, dict) else None


def lacks_begin(agent_state: Mapping[str, Any]) -> bool:
    """Whether a session is a fork of a history that was not whole."""
    origin = origin_of(agent_state)
    return origin is not None and not origin["complete"]
