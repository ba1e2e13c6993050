"""What is counted of a turn when it ends, from its result (DESIGN 4.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from runner.metrics import (
    ADMISSION,
    COST,
    FIRST_UPDATE,
    READY,
    SANDBOX_SECONDS,
    STARTS,
    TOKENS,
    TURN_ERRORS,
    TURN_SECONDS,
    TURNS,
    Family,
    Metrics,
)
from runner.terms import Outcome

TOKEN_KINDS: Final = ("input", "output", "thought", "cached_read", "cached_write")
UNSPLIT: Final = "unsplit"
"""Tokens of an agent that tells their total alone."""
NO_AGENT: Final = "none"
IN_TURN: Final = "turn"
WARM: Final = "warm"


def turn_ended(metrics: Metrics, project: str, harness: str, result: Mapping[str, Any]) -> None:
    """Count a turn that this replica ended."""
    start = result["start"] or NO_AGENT
    metrics.add(TURNS, result["outcome"], harness)
    if "error" in result:
        metrics.add(TURN_ERRORS, result["error"]["code"])
    if result["start"]:
        metrics.add(STARTS, start, result["reason"] or "")
    timings = result["timings"]
    _observe(metrics, ADMISSION, timings["admitted_ms"])
    _observe(metrics, READY, timings["ready_ms"], start)
    _observe(metrics, FIRST_UPDATE, timings["first_update_ms"], start)
    _observe(metrics, TURN_SECONDS, timings["total_ms"], result["outcome"])
    _used(metrics, project, result["usage"])


def turns_lost(metrics: Metrics, count: int) -> None:
    """Count turns of replicas that are gone, which this one ended."""
    if count:
        metrics.add(TURNS, Outcome.LOST.value, NO_AGENT, amount=count)


def warm_seconds(metrics: Metrics, project: str, seconds: float) -> None:
    """Count a time in which a sandbox was kept for the next turn."""
    if seconds > 0:
        metrics.add(SANDBOX_SECONDS, project, WARM, amount=seconds)


def _observe(metrics: Metrics, family: Family, milliseconds: float | None, *labels: str) -> None:
    if milliseconds is not None:
        metrics.observe(family, milliseconds / 1000, *labels)


def _used(metrics: Metrics, project: str, usage: Mapping[str, Any]) -> None:
    counts = {kind: usage[f"{kind}_tokens"] for kind in TOKEN_KINDS if f"{kind}_tokens" in usage}
    if not counts and "total_tokens" in usage:
        counts = {UNSPLIT: usage["total_tokens"]}
    for kind, count in counts.items():
        metrics.add(TOKENS, project, kind, amount=count)
    for currency, amount in usage.get("cost", {}).items():
        metrics.add(COST, project, currency, amount=amount)
    if "sandbox_seconds" in usage:
        metrics.add(SANDBOX_SECONDS, project, IN_TURN, amount=usage["sandbox_seconds"])
