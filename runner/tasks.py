"""Background tasks with a name and an owner; clean-up that is shielded and bounded (DESIGN 6)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from runner.errors import RunnerError

T = TypeVar("T")
log = logging.getLogger("runner.tasks")


class Tasks:
    """Owner of named background tasks.

    An exception that ends a task is logged with the task's name; it never vanishes and never stops the owner. One that
    says "try again" is told without its traceback.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._live: set[asyncio.Task[Any]] = set()

    def spawn(self, name: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start ``work`` as ``<owner>:<name>``; the owner keeps it alive until it ends."""
        task = asyncio.get_running_loop().create_task(work, name=f"{self.owner}:{name}")
        self._live.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._live.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, RunnerError) and error.retryable:
            log.warning("task %s ended: %s", task.get_name(), error.message)
        elif error is not None:
            log.error("task %s ended with an error", task.get_name(), exc_info=error)

    def __len__(self) -> int:
        return len(self._live)

    @property
    def names(self) -> list[str]:
        """Names of the tasks that still run, for diagnostics."""
        return sorted(task.get_name() for task in self._live)

    async def join(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for all tasks, also those spawned meanwhile, to end by themselves.

        Returns:
            False when some still run.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        while self._live:
            left = deadline - asyncio.get_running_loop().time()
            _, pending = await asyncio.wait(set(self._live), timeout=max(0.0, left))
            if pending:
                return False
        return True

    async def close(self, seconds: float = 5.0) -> None:
        """Cancel every task and wait at most ``seconds`` for them."""
        for task in self._live:
            task.cancel()
        await self.join(seconds)


async def shielded(work: Coroutine[Any, Any, T], seconds: float) -> T:
    """Run clean-up to its end, at most ``seconds``, even when the caller is cancelled meanwhile.

    Raises:
        TimeoutError: ``work`` was cancelled because it took longer than ``seconds``.
        asyncio.CancelledError: the caller was cancelled; raised only after ``work`` ended.
    """
    task = asyncio.get_running_loop().create_task(_bounded(work, seconds))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
        except Exception:
            break
    if cancelled is not None:
        if not task.cancelled() and task.exception() is not None:
            log.error("clean-up failed after its caller was cancelled", exc_info=task.exception())
        raise cancelled
    return task.result()


async def _bounded(work: Coroutine[Any, Any, T], seconds: float) -> T:
    async with asyncio.timeout(seconds):
        return await work
