"""Which spares are kept, for whom, and which dispatch may have one (DESIGN 3.5, 3.10).

want → starting → ready → claimed, or retiring → gone. A claimed spare is a session's seat and none any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

from runner.ids import SPARES, Key
from runner.rules.reuse import changed_facet

LATELY_SECONDS: Final = 3600.0
"""A kind that no turn has started for so long is not kept any more."""
REFILL_SECONDS: Final = 0.5
"""How long a refill waits, so that it does not slow the turn down that made it necessary."""
BACKOFF_SECONDS: Final = (5.0, 300.0)
"""The wait behind the first failure of a kind, doubled by each that follows, and the longest one."""
PLACE: Final = "place"
TRACES: Final = frozenset({PLACE, "agent", "has_context", "fork"})
"""What the stored state of a session has that is not new."""


class Kind(NamedTuple):
    """What a spare is for. ``refs``: which of the operator's secrets it has in which variable, sorted."""

    harness: str
    provider: str
    recipe: str
    refs: tuple[tuple[str, str], ...] = ()


class SpareState(StrEnum):
    """How far a spare is."""

    STARTING = "starting"
    READY = "ready"
    RETIRING = "retiring"


@dataclass(slots=True)
class Spare:
    """One spare. ``facets``: its fingerprint; ``expires_at``: loop time, when it is too old to be handed out."""

    spare_id: str
    kind: Kind
    facets: Mapping[str, str]
    state: SpareState = SpareState.STARTING
    expires_at: float = math.inf


@dataclass(frozen=True, slots=True)
class Begin:
    """Start a spare of this kind."""

    kind: Kind


@dataclass(frozen=True, slots=True)
class Retire:
    """Tear this spare down and remove its directories."""

    spare_id: str
    verdict: str


Effect = Begin | Retire


class ShelfError(Exception):
    """A move that the rule forbids; nothing was changed."""


@dataclass(slots=True)
class Wanted:
    """A kind that spares are kept of: used when, failed how often in a row, not started before."""

    used_at: float
    failures: int = 0
    not_before: float = 0.0


@dataclass(slots=True)
class Shelf:
    """All spares of one replica. Only these methods change it, none awaits. Instants are loop times.

    Attributes:
        keep: how many of each kind.
        seconds: how old one may get.
    """

    keep: int
    seconds: float
    kinds: dict[Kind, Wanted] = field(default_factory=dict)
    spares: dict[str, Spare] = field(default_factory=dict)
    closed: bool = False

    # -- what happens ------------------------------------------------------------------------------------------------

    def used(self, kind: Kind, now: float, *, always: bool = False) -> None:
        """A turn needs an agent of this kind; the next will, too. ``always``: it is kept whoever uses it."""
        wanted = self.kinds.setdefault(kind, Wanted(now))
        wanted.used_at = math.inf if always else max(wanted.used_at, now)
        if not always and wanted.not_before <= now:
            wanted.not_before = now + REFILL_SECONDS

    def begun(self, spare_id: str, kind: Kind, facets: Mapping[str, str]) -> None:
        """A start that ``due`` asked for is under way."""
        if spare_id in self.spares or self.closed:
            raise ShelfError(f"{spare_id} cannot be started")
        self.spares[spare_id] = Spare(spare_id, kind, facets)

    def opened(self, spare_id: str, now: float) -> None:
        """Its agent session is open: it can be claimed."""
        spare = self._in(spare_id, SpareState.STARTING)
        spare.state, spare.expires_at = SpareState.READY, now + self.seconds

    def lost(self, spare_id: str, now: float, *, failed: bool) -> None:
        """Its start failed, its agent left, or its seat was taken for a turn (which is no failure)."""
        spare = self._in(spare_id, SpareState.STARTING, SpareState.READY)
        spare.state = SpareState.RETIRING
        wanted = self.kinds.get(spare.kind)
        if failed and wanted is not None:
            wanted.failures += 1
            first, most = BACKOFF_SECONDS
            wanted.not_before = now + min(most, first * 2.0 ** min(wanted.failures - 1, 16))

    def given_up(self, kind: Kind) -> None:
        """It lacks what only a dispatch can bring: it is kept when the next turn uses it, unless it always is."""
        wanted = self.kinds.get(kind)
        if wanted is not None and wanted.used_at < math.inf:
            del self.kinds[kind]

    def gone(self, spare_id: str) -> None:
        """Nothing is left of it."""
        self._in(spare_id, SpareState.RETIRING)
        del self.spares[spare_id]

    def close(self) -> list[Retire]:
        """The replica drains: none is started or claimed any more."""
        self.closed = True
        return [self._retired(spare, "shutdown") for spare in self._kept()]

    # -- what is decided ---------------------------------------------------------------------------------------------

    def claim(self, kind: Kind, facets: Mapping[str, str], now: float) -> Spare | None:
        """The oldest spare that fits a dispatch, which is its own from now on; None when there is none."""
        for spare in self.spares.values():
            ready = spare.state is SpareState.READY and spare.expires_at > now and not self.closed
            if ready and spare.kind == kind and changed_facet(spare.facets, facets) is None:
                del self.spares[spare.spare_id]
                if kind in self.kinds:
                    self.kinds[kind].failures = 0
                return spare
        return None

    def due(self, now: float, room: int, prints: Callable[[Kind], Mapping[str, str]]) -> list[Effect]:
        """What is to be done now.

        Args:
            now: the time.
            room: seats that nobody has; a spare never takes the place of anybody.
            prints: the fingerprint that a spare of a kind would get now.
        """
        if self.closed:
            return []
        for kind in [kind for kind, wanted in self.kinds.items() if wanted.used_at + LATELY_SECONDS <= now]:
            del self.kinds[kind]
        effects: list[Effect] = []
        for spare in self._kept():
            verdict = self._stale(spare, now, prints)
            if verdict is not None:
                effects.append(self._retired(spare, verdict))
        for kind, wanted in self.kinds.items():
            if room > 0 and wanted.not_before <= now and self._lacks(kind):
                effects.append(Begin(kind))
                room -= 1
        return effects

    def next_due(self, now: float) -> float | None:
        """When ``due`` may have something to do although nothing happens."""
        times = [spare.expires_at for spare in self._kept()]
        times += [wanted.used_at + LATELY_SECONDS for wanted in self.kinds.values()]
        times += [wanted.not_before for kind, wanted in self.kinds.items() if wanted.not_before > now]
        return min((at for at in times if at < math.inf), default=None)

    def _lacks(self, kind: Kind) -> bool:
        """One start of a kind at a time: a machine that starts many agents at once starts none soon."""
        mine = [spare for spare in self._kept() if spare.kind == kind]
        return len(mine) < self.keep and all(spare.state is SpareState.READY for spare in mine)

    def _stale(self, spare: Spare, now: float, prints: Callable[[Kind], Mapping[str, str]]) -> str | None:
        if spare.kind not in self.kinds:
            return "unused"
        if spare.expires_at <= now:
            return "expired"
        facet = changed_facet(spare.facets, prints(spare.kind))
        return f"changed:{facet}" if facet is not None else None

    def _kept(self) -> list[Spare]:
        return [spare for spare in self.spares.values() if spare.state is not SpareState.RETIRING]

    @staticmethod
    def _retired(spare: Spare, verdict: str) -> Retire:
        spare.state = SpareState.RETIRING
        return Retire(spare.spare_id, verdict)

    def _in(self, spare_id: str, *states: SpareState) -> Spare:
        spare = self.spares.get(spare_id)
        if spare is None or spare.state not in states:
            raise ShelfError(f"{spare_id} is {spare.state if spare is not None else 'not there'}")
        return spare


def is_new(agent_state: Mapping[str, Any], *, epoch: int, chain: bool) -> bool:
    """Whether a turn is the first of a session that has nothing: only such a one may have a spare.

    Args:
        agent_state: what is stored of the session.
        epoch: that of the turn; the first of a session has 1, and nobody had a sandbox of it before.
        chain: it goes on with a paused one.
    """
    return epoch == 1 and not chain and not any(agent_state.get(trace) for trace in TRACES)


def adopted(provider: str, spare_id: str) -> dict[str, str]:
    """How a session's state names the directories that it took over."""
    return {"provider": provider, "spare": spare_id}


def place_of(agent_state: Mapping[str, Any], key: Key, provider: str) -> Key:
    """The key of a session's directories at a provider: those that it took over there, else its own."""
    place = agent_state.get(PLACE)
    if isinstance(place, Mapping) and place.get("provider") == provider and isinstance(place.get("spare"), str):
        return (SPARES, place["spare"])
    return key
