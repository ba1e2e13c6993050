"""What becomes of a sandbox: the reuse verdict at a start and the allowlist at an ending (DESIGN 3.4, 3.5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from runner.rules.turn import End
from runner.terms import Outcome, SeatState

FACETS: Final = (
    "harness",
    "provider",
    "recipe",
    "isolation",
    "env",
    "secrets",
    "mcp_servers",
    "workspace",
    "patches",
)
"""Order in which a changed facet is named when several changed."""

CREDENTIAL_MARGIN_MS: Final = 60_000


def changed_facet(old: Mapping[str, str], new: Mapping[str, str]) -> str | None:
    """The first facet of the fingerprint that differs, None when the sandbox fits."""
    if old is new:
        return None
    return next((facet for facet in FACETS if old.get(facet) != new.get(facet)), None)


def reuse_verdict(
    old: Mapping[str, str], new: Mapping[str, str], secrets_expire_at_ms: int | None, now_ms: int
) -> str | None:
    """Why a warm sandbox may not serve this prompt; None when it may."""
    facet = changed_facet(old, new)
    if facet is not None:
        return f"changed:{facet}"
    if secrets_expire_at_ms is not None and secrets_expire_at_ms - CREDENTIAL_MARGIN_MS <= now_ms:
        return "credentials_expiring"
    return None


@dataclass(frozen=True, slots=True)
class Windows:
    """How long a seat stays warm, seconds, by why it was parked."""

    idle: float
    approval: float
    stopped: float


@dataclass(frozen=True, slots=True)
class Parked:
    """Park the sandbox in this state for this long.

    ``claimed``: for the turn that follows at once; no other session may take its place meanwhile.
    """

    state: SeatState
    seconds: float
    claimed: bool = False


@dataclass(frozen=True, slots=True)
class Destroyed:
    """Destroy it; ``verdict`` is what the next cold start shows as its reason."""

    verdict: str


def after_ending(end: End, windows: Windows, *, kept: bool, agent_alive: bool, claimed: bool) -> Parked | Destroyed:
    """The table of DESIGN 3.4: an allowlist, everything else destroys.

    Args:
        end: how the turn ended.
        windows: the provider's windows.
        kept: a reader is there, was there within the grace, or the prompt asked to be kept on disconnect.
        agent_alive: the agent process still runs.
        claimed: a next prompt is already admitted; then no reader is asked for.
    """
    if not agent_alive:
        return Destroyed(end.error.code if end.error is not None else "agent_exited")
    if end.outcome is Outcome.PAUSED:
        return Parked(SeatState.AWAITING_APPROVAL, windows.approval)
    if end.outcome is Outcome.COMPLETED:
        return Parked(SeatState.IDLE, windows.idle, claimed) if kept or claimed else Destroyed("no_reader")
    if end.outcome is Outcome.CANCELLED:
        return _after_cancel(end, windows, kept or claimed, claimed)
    return Destroyed(end.error.code if end.error is not None else end.outcome.value)


def _after_cancel(end: End, windows: Windows, kept: bool, claimed: bool) -> Parked | Destroyed:
    if end.label is None or not end.label.cooperative:
        return Destroyed(end.label.value if end.label is not None else "unlabelled")
    if end.settled is False:
        return Destroyed("not_settled")
    if end.survivors:
        return Destroyed("survivors")
    return Parked(SeatState.IDLE, windows.stopped, claimed) if kept else Destroyed("no_reader")
