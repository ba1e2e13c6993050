"""What time it is at the plane, told from here: starts and arrivals are compared on its clock (DESIGN 3.7)."""

from __future__ import annotations

from math import inf


class PlaneClock:
    """Maps this process's monotonic clock to the plane's, from answers that carry a reading of it.

    A reading was taken between question and answer, so each narrows the offset; one that contradicts the earlier ones
    (a clock was set, the plane is another process now) starts anew. The later bound is told: an instant is never put
    before it happened, and at most one quick round trip behind.
    """

    def __init__(self) -> None:
        self._low, self._high = -inf, inf

    def learn(self, sent: float, received: float, reading: float) -> None:
        """Take a reading of the plane's clock that was asked for at ``sent`` and was here at ``received``, seconds."""
        low, high = reading - received, reading - sent
        self._low, self._high = max(self._low, low), min(self._high, high)
        if self._low > self._high:
            self._low, self._high = low, high

    def at(self, instant: float) -> float:
        """The plane's clock at an instant of this one; the instant itself as long as nothing was learned."""
        return instant if self._high == inf else instant + self._high
