"""Whether the agent session of an earlier process may be loaded or resumed, and how (DESIGN 3.5, cases M6, I6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

Proven = Literal["none", "load", "resume"]
"""What a harness was seen to do, with its history in the next model request; ``resume``: ``load`` as well."""
Way = Literal["load", "resume"]

MAX_FAILURES: Final = 2
"""So often in a row may it fail in one session; then the session's starts no longer try."""
FIRST_UPDATE_SECONDS: Final = 30.0
"""A resumed agent that has not spoken this long after its first prompt is replaced by a new one (case M7)."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an agent session was made; another place does not have its files.

    Attributes:
        harness: its name.
        facet: digest of the harness's version and command.
        provider: the provider's name.
        workspace: the absolute path that the agent session was opened with.
        home: the private home's own identity; another home at the same path has another.
    """

    harness: str
    facet: str
    provider: str
    workspace: str
    home: str


@dataclass(frozen=True, slots=True)
class AgentSession:
    """The agent session that has a session's context.

    ``agent_session_id`` is the agent's own id, never ours (case M6); ``failures``: how often in a row an attempt to
    go on with an agent session failed here; ``answered``: it has answered a prompt, so that there is something to load.
    """

    agent_session_id: str
    place: Place
    failures: int = 0
    answered: bool = False

    def as_json(self) -> dict[str, Any]:
        """How it is stored in ``SessionRow.agent_state``."""
        return asdict(self)

    @classmethod
    def of(cls, stored: Any) -> AgentSession | None:
        """What ``as_json`` made; None for anything else."""
        if not isinstance(stored, Mapping) or not isinstance(stored.get("place"), Mapping):
            return None
        place = stored["place"]
        words = [str(place.get(name, "")) for name in ("harness", "facet", "provider", "workspace", "home")]
        identity, failures = stored.get("agent_session_id"), stored.get("failures", 0)
        if not isinstance(identity, str) or not all(words) or not isinstance(failures, int):
            return None
        return cls(identity, Place(*words), failures, stored.get("answered") is True)

    def failed(self, *, surely: bool) -> AgentSession:
        """The same after a failure, which counts where it was ``surely`` one: not if there was nothing to load."""
        return replace(self, failures=self.failures + (surely or self.answered))

    def works(self, *, resumed: bool) -> AgentSession:
        """The same after a prompt that it answered; a resumed one has shown that it can be gone on with."""
        return replace(self, answered=True, failures=0 if resumed else self.failures)


def obstacle(known: AgentSession | None, here: Place, proven: Proven) -> str | None:
    """Why an agent at this place cannot go on with a known agent session; None when it may try."""
    if known is None:
        return "no_agent_session"
    if known.place.harness != here.harness or known.place.facet != here.facet:
        return "changed:harness"
    if proven == "none":
        return "not_proven"
    if known.place.provider != here.provider:
        return "changed:provider"
    if known.place.workspace != here.workspace:
        return "changed:workspace"
    if known.place.home != here.home:
        return "home_lost"
    return "failed_before" if known.failures >= MAX_FAILURES else None


def way(proven: Proven, *, loads: bool, resumes: bool) -> Way | None:
    """How this agent goes on, by what its harness proved and what it advertises; None when not at all."""
    if proven == "resume" and resumes:
        return "resume"
    return "load" if proven != "none" and loads else None


def came_back_empty(chosen: Way, replayed: int) -> bool:
    """A load replays the conversation before it answers; without any update there was none to load (case M6)."""
    return chosen == "load" and replayed == 0


def failures_of(known: AgentSession | None, here: Place) -> int:
    """The failures that count for an agent session made here: another version of the harness begins anew."""
    same = known is not None and (known.place.harness, known.place.facet) == (here.harness, here.facet)
    return known.failures if known is not None and same else 0
