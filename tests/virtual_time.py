"""An event loop whose clock jumps: hours of timers pass in milliseconds, and always in the same order.

When nothing is ready, the loop moves its own time to the next timer instead of waiting for it. Mark a coroutine test
with ``@pytest.mark.virtual_time`` (or a module with ``pytestmark``) to run on it; async fixtures of that test do too.

Limits, on purpose:

* Time stands still while real work is out: a job in an executor, a registered descriptor (socket, pipe, child
  process), or a predicate given to ``hold_while``. The loop then waits for it on the real clock, at most ``patience``
  seconds, and raises ``VirtualTimeStuck``: such a test belongs on the real loop, with short configured limits.
* A thread that answers by ``call_soon_threadsafe`` is not seen. Tell the loop with ``hold_while``, or use a twin that
  lives in memory.
* Timers due in the same instant run in the heap's order: repeatable, but not first come, first served.
* Code under test reads the loop's clock (``LoopClock``), never ``time``.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any

EPOCH_MS = 1_767_225_600_000  # 2026-01-01T00:00:00Z
LIMIT_SECONDS = 10 * 86_400.0  # beyond the longest expiry of the product, seven days


class Deadlock(AssertionError):
    """Every task waits and no timer, descriptor or job can wake one."""


class VirtualTimeStuck(AssertionError):
    """Real work kept virtual time from passing, or virtual time passed its limit."""


class _JumpingSelector(selectors.BaseSelector):
    """Polls the real selector; where asyncio would sleep, it asks the loop to jump."""

    def __init__(self, inner: selectors.BaseSelector) -> None:
        self._inner = inner
        self.idle: Callable[[float | None, float], bool] = lambda timeout, since: True

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._inner.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._inner.get_map()

    def close(self) -> None:
        self._inner.close()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = self._inner.select(0)
        if timeout is not None and timeout <= 0:
            return events
        since = time.monotonic()
        while not events and not self.idle(timeout, since):
            events = self._inner.select(0.01)
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """``asyncio.SelectorEventLoop`` on virtual time, which starts at 0 and passes only in jumps.

    Args:
        patience: real seconds that the loop waits for outside work before it gives up.
        limit: virtual seconds after which a test is taken for one that waits for ever beside a periodic timer.
    """

    def __init__(self, *, patience: float = 10.0, limit: float = LIMIT_SECONDS) -> None:
        self._now = 0.0
        self._patience = patience
        self._limit = limit
        self._jobs = 0
        self._holds: list[Callable[[], bool]] = []
        selector = _JumpingSelector(selectors.DefaultSelector())
        super().__init__(selector)
        self._own_descriptors = len(selector.get_map())
        self._jumping = selector
        selector.idle = self._idle

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def hold_while(self, busy: Callable[[], bool]) -> None:
        """Keep time still while ``busy()``: for a thread that will answer by ``call_soon_threadsafe``."""
        self._holds.append(busy)

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """As in asyncio; time stands still until the job is done."""
        future = super().run_in_executor(executor, func, *args)
        self._jobs += 1
        future.add_done_callback(self._job_done)
        return future

    def _job_done(self, _: asyncio.Future[Any]) -> None:
        self._jobs -= 1

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """As in asyncio; time stands still while the threads end, so ``timeout`` cannot run out."""
        self._jobs += 1
        try:
            await super().shutdown_default_executor()
        finally:
            self._jobs -= 1

    def _idle(self, timeout: float | None, since: float) -> bool:
        """Nothing is ready: jump to the timer ``timeout`` seconds away (True), or wait for outside work (False)."""
        outside = self._outside()
        if outside:
            if time.monotonic() - since > self._patience:
                raise VirtualTimeStuck(
                    f"virtual time stood still for {self._patience} s because of {outside}\n{self._story()}"
                )
            return False
        if timeout is None:
            raise Deadlock(f"nothing can wake this loop any more\n{self._story()}")
        if self._now + timeout > self._limit:
            limit, self._limit = self._limit, float("inf")
            raise VirtualTimeStuck(f"{limit:.0f} virtual seconds passed and the test still waits\n{self._story()}")
        self._now += timeout
        return True

    def _outside(self) -> str:
        descriptors = len(self._jumping.get_map()) - self._own_descriptors
        parts = [
            f"{self._jobs} executor job(s)" if self._jobs else "",
            f"{descriptors} descriptor(s)" if descriptors > 0 else "",
            "a hold" if any(busy() for busy in self._holds) else "",
        ]
        return ", ".join(part for part in parts if part)

    def _story(self) -> str:
        lines = []
        for task in asyncio.all_tasks(self):
            frames = task.get_stack(limit=1)
            where = f"{frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else "not started"
            lines.append(f"  task {task.get_name()} waits at {where}")
        return "\n".join(sorted(lines)) or "  no task is left"


class LoopClock:
    """The ``runner.clock.Clock`` of the running loop: on a ``VirtualTimeLoop`` it starts at 2026-01-01T00:00:00Z."""

    def __init__(self, epoch_ms: int = EPOCH_MS) -> None:
        self._epoch_ms = epoch_ms

    def monotonic(self) -> float:
        """The running loop's ``time()``, in seconds."""
        return asyncio.get_running_loop().time()

    def now_ms(self) -> int:
        """Milliseconds since 1970: the epoch given plus what passed on the loop."""
        return self._epoch_ms + round(self.monotonic() * 1000)
