"""What the clients asked for, what they were told, and what the agents got: the oracle's side of the books."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Dispatched:
    """One dispatch request.

    ``answer``: ``accepted``, ``refused``, ``error:<code>``, or ``unknown`` where the client never heard.
    """

    session_id: str
    prompt_id: str
    token: str
    at: float
    answer: str = "unknown"
    turn_id: str | None = None
    result: dict[str, Any] | None = None


@dataclass
class Stopped:
    """One Stop, kill or DELETE; ``expected`` is the turn that it named."""

    session_id: str
    kind: str
    at: float
    expected: str | None = None
    replied_at: float | None = None
    status: int = 0
    body: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass
class Ledger:
    """Everything said and heard outside of the replicas."""

    dispatched: list[Dispatched] = field(default_factory=list)
    stopped: list[Stopped] = field(default_factory=list)
    frames: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    faults: list[str] = field(default_factory=list)
    deleted: set[str] = field(default_factory=set)

    def frame(self, agent: Any, token: str, overlapping: bool) -> None:
        """An agent got a prompt."""
        self.frames[token] += 1
        if overlapping:
            self.faults.append(f"agent {agent.pid} got prompt {token} while another was open")
