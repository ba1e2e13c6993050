"""What turns cost: tokens and money as agents report them, seconds as the runner counts them (DESIGN 4.1, ``usage``).

A turn's usage has only what is known of it; a session's is the sum over its turns, of every outcome. How full the
context is, is a gauge: the newest value counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

TOKENS: Final = {
    "inputTokens": "input_tokens",
    "outputTokens": "output_tokens",
    "thoughtTokens": "thought_tokens",
    "cachedReadTokens": "cached_read_tokens",
    "cachedWriteTokens": "cached_write_tokens",
    "totalTokens": "total_tokens",
}
"""Members of ACP's ``PromptResponse.usage``, which is of one prompt, and ours."""
GAUGES: Final = ("used", "size")
SECONDS: Final = ("turn_seconds", "sandbox_seconds", "warm_seconds")
UNKNOWN_CURRENCY: Final = "unknown"
MAX_CURRENCIES: Final = 8
MAX_CURRENCY_CHARS: Final = 8
MAX_COUNT: Final = 2**53
DIGITS: Final = 9
Spent = dict[str, float]
"""Money by currency."""


@dataclass(slots=True)
class Meter:
    """What is reported and counted during one turn, by however many agents in a row.

    Attributes:
        tokens: summed over the prompts that were answered.
        cost: what the turn added to the agent sessions' own totals.
        context: tokens in the context window, and its size.
        sandbox_seconds: how long the turn had a sandbox, its start included.
    """

    tokens: dict[str, int] = field(default_factory=dict)
    cost: Spent = field(default_factory=dict)
    context: dict[str, int] = field(default_factory=dict)
    sandbox_seconds: float = 0.0

    def answered(self, usage: Any) -> None:
        """Count the ``usage`` of an answer to ``session/prompt``; what is no count is left out."""
        if isinstance(usage, Mapping):
            for theirs, ours in TOKENS.items():
                if _is_count(usage.get(theirs)):
                    self.tokens[ours] = self.tokens.get(ours, 0) + usage[theirs]

    def told(self, update: Mapping[str, Any], spent: Spent) -> None:
        """Take a ``usage_update``.

        Args:
            update: ``used``, ``size`` and ``cost``; the cost is the agent session's total so far.
            spent: that total as it was last told, by currency; it becomes the new one. A total that fell began anew.
        """
        self.context.update({name: update[name] for name in GAUGES if _is_count(update.get(name))})
        currency, amount = _cost(update.get("cost"))
        if amount is None or (currency not in spent and len(spent) >= MAX_CURRENCIES):
            return
        before = spent.get(currency, 0.0)
        added = amount - before if amount >= before else amount
        spent[currency] = amount
        self.cost[currency] = round(self.cost.get(currency, 0.0) + added, DIGITS)

    def usage(self, turn_seconds: float | None) -> dict[str, Any]:
        """The turn's usage; ``turn_seconds``: from its dispatch to its end."""
        found: dict[str, Any] = dict(self.tokens)
        if self.cost:
            found["cost"] = dict(self.cost)
        if self.context:
            found["context"] = dict(self.context)
        if turn_seconds is not None:
            found["turn_seconds"] = _rounded(turn_seconds)
        if self.sandbox_seconds > 0:
            found["sandbox_seconds"] = _rounded(self.sandbox_seconds)
        return found


def with_turn(total: Mapping[str, Any], turn: Mapping[str, Any]) -> dict[str, Any]:
    """A session's usage with one more turn that ended."""
    found = cleaned(total)
    found["turns"] = found.get("turns", 0) + 1
    for name in TOKENS.values():
        if _is_count(turn.get(name)):
            found[name] = found.get(name, 0) + turn[name]
    for currency, amount in spent_of(turn.get("cost")).items():
        found.setdefault("cost", {})
        if currency in found["cost"] or len(found["cost"]) < MAX_CURRENCIES:
            found["cost"][currency] = round(found["cost"].get(currency, 0.0) + amount, DIGITS)
    if isinstance(turn.get("context"), Mapping):
        found["context"] = dict(turn["context"])
    return with_seconds(found, **{name: turn[name] for name in SECONDS if _is_amount(turn.get(name))})


def with_parked(total: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """A session's usage with a time in which its sandbox was kept for the next turn."""
    return with_seconds(total, sandbox_seconds=seconds, warm_seconds=seconds)


def with_seconds(total: Mapping[str, Any], **seconds: float) -> dict[str, Any]:
    """A session's usage with more of ``turn_seconds``, ``sandbox_seconds`` or ``warm_seconds``."""
    found = cleaned(total)
    for name, more in seconds.items():
        if more > 0:
            found[name] = _rounded(found.get(name, 0.0) + more)
    return found


def cleaned(total: Mapping[str, Any]) -> dict[str, Any]:
    """A session's usage as it was stored, without what this version does not know."""
    found: dict[str, Any] = {}
    for name in ("turns", *TOKENS.values()):
        if _is_count(total.get(name)):
            found[name] = total[name]
    if costs := spent_of(total.get("cost")):
        found["cost"] = costs
    if isinstance(total.get("context"), Mapping):
        found["context"] = {name: total["context"][name] for name in GAUGES if _is_count(total["context"].get(name))}
    found |= {name: total[name] for name in SECONDS if _is_amount(total.get(name))}
    return found


def _cost(given: Any) -> tuple[str, float | None]:
    if not isinstance(given, Mapping) or not _is_amount(given.get("amount")):
        return UNKNOWN_CURRENCY, None
    currency = given.get("currency")
    if not (isinstance(currency, str) and currency.isascii() and currency.isalpha()):
        currency = UNKNOWN_CURRENCY
    return currency[:MAX_CURRENCY_CHARS], float(given["amount"])


def spent_of(given: Any) -> Spent:
    """Money by currency as it was stored; empty for anything else."""
    if not isinstance(given, Mapping) or "currency" in given:
        return {}
    return {name: amount for name, amount in given.items() if isinstance(name, str) and _is_amount(amount)}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def _is_amount(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and 0 <= value <= MAX_COUNT


def _rounded(seconds: float) -> float:
    return round(max(0.0, seconds), 3)
