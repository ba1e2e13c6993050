"""Everything that is left to chance in one run, drawn from one seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
SHORT = (0.001, 0.002, 0.004, 0.02, 0.1)
LONG = (0.3, 0.8, 2.0, 3.5, 7.0)


class Chance:
    """A seeded source of choices and of latencies."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def often(self, probability: float) -> bool:
        """True with this probability."""
        return self.random.random() < probability

    def pick(self, choices: Sequence[T]) -> T:
        """One of them."""
        return choices[int(self.random.random() * len(choices))]

    def seconds(self, long: float = 0.02) -> float:
        """A latency: mostly none or a little, with probability ``long`` one that shows."""
        drawn = self.random.random()
        if drawn < long:
            return self.pick(LONG)
        return 0.0 if drawn < 0.6 else self.pick(SHORT)

    async def wait(self, long: float = 0.02) -> None:
        """Suspend, as a call to the outside does: others run meanwhile."""
        await asyncio.sleep(self.seconds(long))
