"""One teardown of a sandbox, whoever asks for it how often."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from runner.sandbox.port import Gone
from runner.tasks import Tasks


class Teardown:
    """Callers at the same time share one try, whoever of them is cancelled.

    After a try that proved nothing the next caller begins another.

    Args:
        tasks: of the sandbox.
        work: one try (grace seconds, seconds).
    """

    def __init__(self, tasks: Tasks, work: Callable[[float, float], Coroutine[Any, Any, Gone]]) -> None:
        self._tasks = tasks
        self._work = work
        self._try: asyncio.Task[Gone] | None = None
        self._gone: Gone | None = None

    @property
    def begun(self) -> bool:
        """Whether anybody asked for it."""
        return self._try is not None

    async def done(self, grace_seconds: float, seconds: float) -> Gone:
        """See ``port.Sandbox.destroy``."""
        if self._gone is not None:
            return self._gone
        if self._try is None or self._try.done():
            self._try = self._tasks.spawn("teardown", self._tried(grace_seconds, seconds))
        await asyncio.wait({self._try})
        return self._try.result()

    async def _tried(self, grace: float, seconds: float) -> Gone:
        gone = await self._work(grace, seconds)
        if gone.proven:
            self._gone = gone
        return gone
