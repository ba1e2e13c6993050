"""What of each table there is to visit, and what a number of seeds has visited."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from runner.rules import command, interaction, lease, turn

# The refusal of a busy seat stands behind admission's own (DESIGN 3.1.7): no shell comes that far.
POOL: Final = frozenset(
    {
        ("book", "", "busy"),
        ("checkout", "idle", "busy"),
        ("full", "", ""),
        ("claim", "awaiting_approval", "busy"),
        ("park", "busy", "idle"),
        ("park", "busy", "awaiting_approval"),
        ("remove", "busy", "destroyed"),
        ("remove", "idle", "destroyed"),
        ("remove", "awaiting_approval", "destroyed"),
        ("torn", "destroyed", ""),
    }
)


def there_is() -> dict[str, set[Any]]:
    """Every transition of every table."""
    return {
        "turn": {(phase.value, event.__name__) for phase, event in turn.TABLE},
        "pool": set(POOL),
        "lease": {move.value for move in lease.Move},
        "command": {("", "pending")} | _edges(command.MOVES),
        "interaction": {("", "pending")} | _edges(interaction.MOVES),
    }


def _edges(moves: Mapping[Any, Any]) -> set[Any]:
    return {(before.value, after.value) for before, afters in moves.items() for after in afters}


class Visited:
    """The transitions of many runs together."""

    def __init__(self) -> None:
        self.tables: dict[str, set[Any]] = {name: set() for name in there_is()}

    def add(self, visited: Mapping[str, set[Any]]) -> None:
        """What one run visited."""
        for name, transitions in visited.items():
            self.tables[name] |= transitions

    def missing(self) -> dict[str, list[str]]:
        """What no run has visited, by table."""
        found = {
            name: sorted(_word(transition) for transition in all_of - self.tables[name])
            for name, all_of in there_is().items()
        }
        return {name: words for name, words in found.items() if words}

    def summary(self) -> list[str]:
        """A line for each table."""
        return [
            f"{name}: {len(all_of & self.tables[name])} of {len(all_of)} transitions visited"
            for name, all_of in there_is().items()
        ]


def _word(transition: Any) -> str:
    return transition if isinstance(transition, str) else " ".join(part or "-" for part in transition)
