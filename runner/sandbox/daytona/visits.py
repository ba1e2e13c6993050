"""Sandboxes that are awake for nobody but a reader or writer of their files; a turn's start takes them over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, TypeVar

from runner.clock import Clock
from runner.errors import RunnerError
from runner.rules.daytona import Failure, fits, judge
from runner.sandbox.daytona.leaving import Down
from runner.sandbox.daytona.lifecycle import Vanished
from runner.sandbox.daytona.service import CallFailed, DaytonaService, Found
from runner.sandbox.port import SandboxSpec
from runner.sandbox.remote import RemoteSandbox
from runner.tasks import Tasks

T = TypeVar("T")
PATIENCE_SECONDS: Final = 45.0
LINGER_SECONDS: Final = 30.0
"""How long a sandbox that was woken for a file stays awake for the next one."""
POLL_SECONDS: Final = 0.1
PAUSE_SECONDS: Final = 15.0
log = logging.getLogger("runner.sandbox.daytona")


@dataclass(frozen=True, slots=True)
class Ground:
    """What visits share with the provider's starts.

    Attributes:
        service: opens or gives the client.
        held: name to who counts as having the sandbox: a seat, or a visit.
        live: seat to its running sandbox.
        capacity: how many may run; 0: any number.
        up: brings the sandbox of a session (spec, name, deadline) up; makes one only where it is told to.
        down: puts one to sleep; None when that was not seen.
        awake: told that a disk (name) is in use.
        asleep: told what became of a sandbox (spec, name, what is known) behind a visit.
    """

    service: Callable[[], Awaitable[DaytonaService]]
    held: dict[str, str]
    live: Mapping[str, RemoteSandbox]
    capacity: int
    up: Callable[[SandboxSpec, str, float, bool], Awaitable[Found]]
    down: Down
    awake: Callable[[str], None]
    asleep: Callable[[SandboxSpec, str, str | None], None]

    @property
    def room(self) -> bool:
        """Whether one more sandbox may run."""
        return fits(len(self.held), self.capacity)


@dataclass(slots=True, eq=False)
class Visit:
    """One stay.

    Attributes:
        closed: it is being ended or taken over, and takes no more users.
        stale: the sandbox is not what it was: this ends with the last user, and another look tells.
        up: its result is None when there was none behind a look that had shown one.
    """

    spec: SandboxSpec
    name: str
    up: asyncio.Task[Found | RunnerError | None]
    users: int = 0
    closed: bool = False
    stale: bool = False
    timer: asyncio.TimerHandle | None = None
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def enter(self) -> None:
        """One more user."""
        self.users += 1
        self.idle.clear()
        self.stay()

    def stay(self) -> None:
        """It is not ended by itself for now."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    @property
    def failed(self) -> bool:
        """Whether the sandbox did not come up."""
        return self.up.done() and (self.up.cancelled() or not isinstance(self.up.result(), Found))


class Visits:
    """Every visit of a provider."""

    def __init__(self, ground: Ground, tasks: Tasks, clock: Clock) -> None:
        self._ground = ground
        self._tasks = tasks
        self._clock = clock
        self._visits: dict[str, Visit] = {}
        self._shut = False

    def __contains__(self, name: str) -> bool:
        return name in self._visits

    async def use(
        self,
        spec: SandboxSpec,
        name: str,
        work: Callable[[DaytonaService, Found], Awaitable[T]],
        *,
        make: bool,
        repeat: bool = True,
    ) -> T | None:
        """Do ``work`` while the sandbox is awake: a turn's, or one that is woken for it.

        Args:
            spec: names the session.
            name: of its sandbox.
            work: on what runs; a call of it that failed so that a later one may do is answered by doing all again.
            make: whether a sandbox is made where there is none; else the answer is None.
            repeat: whether ``work`` may be done twice.

        Raises:
            RunnerError: ``session_starting``, ``runner_at_capacity``, ``sandbox_lost``, ``sandbox_start_failed``.
        """
        if self._shut:
            raise _later("the runner is shutting down")
        deadline = self._clock.monotonic() + PATIENCE_SECONDS
        service = await self._ground.service()
        while True:
            try:
                async with self._awake(service, spec, name, make, deadline) as found:
                    return await work(service, found) if found is not None else None
            except CallFailed as failed:
                wait = _pause(failed, repeat)
                if self._clock.monotonic() + wait >= deadline:
                    raise _later(f"it is not reached: {failed}") from failed
            await asyncio.sleep(wait)

    @asynccontextmanager
    async def _awake(
        self, service: DaytonaService, spec: SandboxSpec, name: str, make: bool, deadline: float
    ) -> AsyncIterator[Found | None]:
        visit: Visit | None = None
        while visit is None:
            known = self._visits.get(name)
            seat = self._ground.held.get(name)
            if known is not None and not (known.closed or known.stale):
                visit = known
            elif seat is None and (make or _there(await service.get(name))):
                # Behind the look somebody else may have it.
                visit = None if name in self._ground.held else self._begin(spec, name, deadline, make)
            elif seat is None:
                yield None
                return
            elif seat in self._ground.live and _runs(found := await service.get(name)):
                yield found
                return
            elif self._clock.monotonic() + POLL_SECONDS >= deadline:
                raise _later("it is being started or put to sleep")
            else:
                await asyncio.sleep(POLL_SECONDS)
        visit.enter()
        try:
            up = await asyncio.shield(visit.up)
            if isinstance(up, RunnerError):
                raise up
            if up is None and make:
                raise CallFailed("read", Failure(status=404, message="it was removed meanwhile"))
            visit.stale = visit.stale or up is None
            yield up
        except CallFailed as failed:
            visit.stale = judge(failed.call, failed.failure).action not in ("retry", "fail")
            raise
        finally:
            self._leave(visit)

    def _begin(self, spec: SandboxSpec, name: str, deadline: float, make: bool) -> Visit:
        if self._shut:
            raise _later("the runner is shutting down")
        if not self._ground.room:
            text = "Too many sandboxes run to wake this one for its files. Try again."
            raise RunnerError("runner_at_capacity", text, retry_after=5)
        self._ground.held[name] = f"files of {name}"
        self._ground.awake(name)
        up = self._tasks.spawn(f"wake {name}", self._up(spec, name, deadline, make))
        visit = self._visits[name] = Visit(spec, name, up)
        return visit

    async def _up(self, spec: SandboxSpec, name: str, deadline: float, make: bool) -> Found | RunnerError | None:
        """A failure is a value: whoever waits tells it, and it may be nobody."""
        try:
            return await self._ground.up(spec, name, deadline, make)
        except Vanished:
            return None
        except CallFailed as failed:
            return RunnerError(judge(failed.call, failed.failure).code, f"The sandbox could not be woken: {failed}")
        except RunnerError as error:
            if error.code == "provider_at_capacity":
                return RunnerError("runner_at_capacity", error.message, retry_after=5)
            return error

    def _leave(self, visit: Visit) -> None:
        visit.users -= 1
        if visit.users == 0:
            visit.idle.set()
            self._rest(visit)

    def _rest(self, visit: Visit) -> None:
        if not visit.closed:
            seconds = 0.0 if visit.failed or visit.stale else LINGER_SECONDS
            visit.timer = asyncio.get_running_loop().call_later(seconds, self._end, visit)

    def _end(self, visit: Visit) -> None:
        """Put it to sleep, unless it is in use or that is under way."""
        if visit.users == 0 and not visit.closed:
            visit.closed = True
            visit.stay()
            self._tasks.spawn(f"sleep {visit.name}", self._ended(visit))

    async def _ended(self, visit: Visit) -> None:
        """It counts as running until its stop was seen."""
        await asyncio.wait({visit.up})
        while True:
            known = await self._ground.down(visit.name, away=False)
            if known is not None or self._shut:
                break
            await asyncio.sleep(PAUSE_SECONDS)
        self._let_go(visit)
        self._ground.asleep(visit.spec, visit.name, known)

    def _let_go(self, visit: Visit) -> None:
        del self._visits[visit.name]
        del self._ground.held[visit.name]
        visit.gone.set()

    async def make_way(self, name: str, seconds: float | None) -> bool:
        """For a start: its sandbox is nobody's when this returns, and what only rests makes room.

        What stands in the way after ``seconds`` still does. True: the sandbox runs, with no agent in it.
        """
        runs = False
        try:
            async with asyncio.timeout(seconds):
                while (visit := self._visits.get(name)) is not None:
                    runs = await self._taken(visit)
                while not self._ground.room and (resting := self._resting()) is not None:
                    self._end(resting)
                    await resting.gone.wait()
        except TimeoutError:
            log.info("sandbox %s is still in use for its files", name)
        return runs

    async def _taken(self, visit: Visit) -> bool:
        if visit.closed:
            await visit.gone.wait()
            return False
        visit.closed = True
        visit.stay()
        try:
            await asyncio.wait({visit.up})
            if visit.users:
                await visit.idle.wait()
        except BaseException:
            visit.closed = False
            if visit.users == 0:
                self._rest(visit)
            raise
        self._let_go(visit)
        return not (visit.failed or visit.stale)

    def _resting(self) -> Visit | None:
        return next((visit for visit in self._visits.values() if visit.timer is not None), None)

    async def close(self) -> None:
        """Put to sleep what is awake, and begin no more."""
        self._shut = True
        for visit in list(self._visits.values()):
            visit.users = 0
            self._end(visit)
        await asyncio.gather(*(visit.gone.wait() for visit in list(self._visits.values())))


def _there(found: Found | None) -> bool:
    return found is not None and found.state not in ("destroyed", "destroying")


def _runs(found: Found | None) -> bool:
    return found is not None and found.state == "started" and found.desired in ("", "started")


def _pause(failed: CallFailed, repeat: bool) -> float:
    """How long to wait before all is done again.

    Raises:
        RunnerError: there is no use in it, or it may have been done.
    """
    verdict = judge(failed.call, failed.failure)
    if verdict.action == "fail":
        raise RunnerError(verdict.code, f"The sandbox's files are not reached: {failed}") from failed
    if failed.call == "exec" and not repeat and verdict.action != "retry":
        text = f"The sandbox was lost on the way, and the file may have been written: {failed}"
        raise RunnerError("sandbox_lost", text) from failed
    return max(verdict.seconds, POLL_SECONDS)


def _later(why: str) -> RunnerError:
    return RunnerError(
        "session_starting", f"The session's sandbox cannot be used now: {why}. Try again.", retry_after=1
    )
