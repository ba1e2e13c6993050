"""What the scripted agent received and did."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Entry = dict[str, Any]


class FrameLog:
    """Reads the log that every process of one script appends to.

    An entry is ``{pid, at, frame}`` for a frame received, or ``{pid, at, event, …}`` with event ``start``, ``eof``,
    ``spawned`` {child, how}, ``ran`` {child, status}, ``replied`` {method, ordinal}, ``answered`` {id, verdict},
    ``over`` {method}, ``stderr_written``, ``stopped_reading``, ``broken_pipe``, ``bad_line``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self) -> list[Entry]:
        """All entries, oldest first; a line that is being written is left out."""
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")[:-1]
        return [json.loads(line) for line in lines]

    def frames(self, method: str | None = None) -> list[Entry]:
        """Frames received, or those of one method."""
        frames = [entry["frame"] for entry in self.entries() if "frame" in entry]
        return [frame for frame in frames if method is None or frame.get("method") == method]

    def events(self, name: str) -> list[Entry]:
        """Events of one name."""
        return [entry for entry in self.entries() if entry.get("event") == name]

    def methods(self) -> list[str]:
        """Methods of all frames, in order; answers are ``result`` or ``error``."""
        return [frame.get("method") or ("error" if "error" in frame else "result") for frame in self.frames()]

    def prompts(self) -> list[str]:
        """The texts of all prompts, in order."""
        return [
            "".join(block.get("text", "") for block in frame["params"]["prompt"])
            for frame in self.frames("session/prompt")
        ]

    def pids(self) -> list[int]:
        """One pid for each agent that was started, in order."""
        return [entry["pid"] for entry in self.events("start")]

    def spawned(self) -> list[int]:
        """Pids of the processes that agents started and announced."""
        return [entry["child"] for entry in self.events("spawned")]

    def answers(self) -> list[Entry]:
        """Answers to the agent's own requests."""
        return [frame for frame in self.frames() if "method" not in frame]

    async def wait_for(self, predicate: Callable[[FrameLog], Any], seconds: float = 10.0) -> Any:
        """Poll until ``predicate(log)`` is true; its value. Fails the test after ``seconds``."""
        deadline = time.monotonic() + seconds
        while True:
            value = predicate(self)
            if value:
                return value
            assert time.monotonic() < deadline, f"not in {seconds} s; the agent received {self.methods()}"
            await asyncio.sleep(0.005)

    async def wait_for_method(self, method: str, count: int = 1, seconds: float = 10.0) -> list[Entry]:
        """Wait until so many frames of a method came; all of them."""
        await self.wait_for(lambda log: len(log.frames(method)) >= count, seconds)
        return self.frames(method)
