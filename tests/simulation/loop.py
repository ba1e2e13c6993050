"""A virtual-time loop that knows which replica each callback belongs to, so that one can be frozen or killed.

``replica_context`` marks a context; whatever is scheduled in it belongs to that replica, like the threads of a process.
A frozen replica's callbacks wait until it is thawed (SIGSTOP, SIGCONT); a killed one's never run (SIGKILL).
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final
from warnings import catch_warnings, simplefilter

from tests.virtual_time import LIMIT_SECONDS, Deadlock, VirtualTimeStuck

REPLICA: Final[ContextVar[str | None]] = ContextVar("replica", default=None)


def replica_context(name: str) -> Context:
    """A context whose callbacks and tasks belong to the replica."""
    context = copy_context()
    context.run(REPLICA.set, name)
    return context


class SimulationLoop(asyncio.BaseEventLoop):
    """Runs what is ready, else jumps to the next timer; there is no outside.

    Args:
        limit: virtual seconds after which a run is taken for one that never ends.
    """

    _ready: deque[Any]
    _scheduled: list[Any]
    _stopping: bool

    def __init__(self, limit: float = LIMIT_SECONDS) -> None:
        super().__init__()
        self._now = 0.0
        self._limit = limit
        self._held: dict[str, list[Any]] = {}
        self._killed: set[str] = set()
        self._remains: list[Any] = []
        self._buried: set[asyncio.Task[Any]] = set()
        self.complaints: list[str] = []
        self.set_exception_handler(self._complain)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def freeze(self, name: str) -> None:
        """Nothing of this replica runs until ``thaw``."""
        self._held.setdefault(name, [])

    def thaw(self, name: str) -> None:
        """What has become due meanwhile runs now, in its order."""
        self._ready.extend(self._held.pop(name, []))

    def kill(self, name: str) -> None:
        """Nothing of this replica runs any more."""
        self._killed.add(name)
        self._remains += [*asyncio.all_tasks(self), *self._held.pop(name, [])]

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Call it on the loop, a turn later."""
        future = self.create_future()

        def run() -> None:
            if future.done():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_soon(run)
        return future

    def _complain(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if REPLICA.get() not in self._killed:
            self.complaints.append(f"{context.get('message')}: {context.get('exception')!r}")

    def _run_once(self) -> None:
        ready, timers = self._ready, self._scheduled
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
        if not ready and not self._stopping:
            if not timers:
                raise Deadlock("nothing can wake this loop any more")
            self._now = max(self._now, timers[0]._when)
            if self._now > self._limit:
                self._limit = float("inf")
                raise VirtualTimeStuck("the run never comes to rest")
        while timers and timers[0]._when <= self._now:
            timer = heapq.heappop(timers)
            timer._scheduled = False
            ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            if self._held or self._killed:
                name = handle._context.get(REPLICA)
                if name in self._killed:
                    self._remains.append(handle)
                    continue
                held = self._held.get(name)
                if held is not None:
                    held.append(handle)
                    continue
            handle._run()

    def _write_to_self(self) -> None:
        """No other thread wakes this loop."""

    def _process_events(self, event_list: Any) -> None:
        """There are no descriptors."""

    def bury(self) -> None:
        """Close what is left of every task, the killed ones' too, without running the loop."""
        asyncio._set_running_loop(self)
        try:
            with catch_warnings():
                simplefilter("ignore")
                self._close_tasks()
        finally:
            asyncio._set_running_loop(None)
        self.set_exception_handler(lambda loop, context: None)
        self.close()

    def _close_tasks(self) -> None:
        while tasks := asyncio.all_tasks(self) - self._buried:
            for task in tasks:
                self._buried.add(task)
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                with suppress(BaseException):
                    task.get_coro().close()
