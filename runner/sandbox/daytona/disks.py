"""The sleeping disks that a runner knows of, and when each one's window ends (DESIGN 3.4, case C3)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from runner.clock import Clock
from runner.sandbox.port import Disk

PROVIDER: Final = "daytona"


class Disks:
    """One timer for each disk.

    Args:
        clock: on the scale of the loop.
        over: called with a sandbox's name when its disk's window ends; it is no longer known then.
    """

    def __init__(self, clock: Clock, over: Callable[[str], None]) -> None:
        self._clock = clock
        self._over = over
        self._known: dict[str, tuple[Disk, asyncio.TimerHandle]] = {}

    @property
    def all(self) -> tuple[Disk, ...]:
        """Those that are kept now."""
        return tuple(disk for disk, _ in self._known.values())

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def keep(self, name: str, project: str, session_id: str, seconds: float) -> None:
        """The sandbox ``name`` is asleep, for so long; a window that runs already is not changed."""
        if name not in self._known:
            timer = asyncio.get_running_loop().call_later(max(0.0, seconds), self._end, name)
            self._known[name] = Disk(PROVIDER, project, session_id, self._clock.monotonic() + seconds), timer

    def drop(self, name: str) -> None:
        """It is no longer asleep, or it goes."""
        known = self._known.pop(name, None)
        if known is not None:
            known[1].cancel()

    def clear(self) -> None:
        """Forget all; the service's auto-delete is the net below."""
        for name in list(self._known):
            self.drop(name)

    def _end(self, name: str) -> None:
        self._known.pop(name, None)
        self._over(name)
