"""A point where an agent waits for the test."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path


class Gate:
    """A file that the agent waits for; one gate for one wait.

    Args:
        path: where no file is yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> None:
        """Let the agent pass, now or later."""
        self.path.touch()

    @property
    def is_reached(self) -> bool:
        """Whether the agent has come to the gate."""
        return self.path.with_name(self.path.name + ".reached").exists()

    async def reached(self, seconds: float = 10.0) -> None:
        """Wait until the agent has come to the gate."""
        deadline = time.monotonic() + seconds
        while not self.is_reached:
            assert time.monotonic() < deadline, f"the agent did not reach {self.path.name} in {seconds} s"
            await asyncio.sleep(0.005)
