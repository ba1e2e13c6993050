"""One replica's line to the lease plane: every question has its own time-out, every answer tells the plane's time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from runner.clock import Clock
from runner.errors import RunnerError
from runner.leases.plane_clock import PlaneClock
from runner.leases.port import BeatAnswer, Heartbeat, Holder, LeasePlane, ReplicaInfo
from runner.metrics import PLANE_ERRORS, Metrics

log = logging.getLogger("runner.leases")
T = TypeVar("T")

OnCommands = Callable[[str, str, tuple[dict[str, Any], ...]], None]


class PlaneLine:
    """Asks a plane; whatever it does, the asker gets an answer or ``plane_unavailable`` in time.

    Args:
        plane: where leases live.
        clock: its monotonic reading must be the running loop's.
        timeout_seconds: longest wait for one answer.
        on_commands: called with project, session and the pending commands of every answer that carries some.
        metrics: counts questions without an answer.
    """

    def __init__(
        self, plane: LeasePlane, clock: Clock, timeout_seconds: float, on_commands: OnCommands, metrics: Metrics
    ) -> None:
        self._plane = plane
        self._metrics = metrics
        self._clock = clock
        self._timeout = timeout_seconds
        self._on_commands = on_commands
        self._plane_clock = PlaneClock()

    @property
    def shared(self) -> bool:
        """Whether other replicas may use the plane."""
        return self._plane.shared

    def now(self) -> float:
        """The plane's clock now, seconds; see ``PlaneClock``."""
        return self._plane_clock.at(self._clock.monotonic())

    async def beat(self, beat: Heartbeat) -> BeatAnswer:
        """Send one beat; commands in its answer are passed on.

        Raises:
            RunnerError: ``plane_unavailable``.
        """
        sent = self._clock.monotonic()
        answer = await self._asked(self._plane.beat(beat), f"on a beat of turn {beat.turn_id}")
        if answer.now > 0:
            self._plane_clock.learn(sent, self._clock.monotonic(), answer.now)
        if answer.commands:
            try:
                self._on_commands(beat.project, beat.session_id, answer.commands)
            except Exception:
                log.exception("commands for session %s could not be handled", beat.session_id)
        return answer

    async def look(self, project: str, session_id: str) -> Holder | None:
        """``LeasePlane.look``.

        Raises:
            RunnerError: ``plane_unavailable``.
        """
        sent = self._clock.monotonic()
        holder = await self._asked(self._plane.look(project, session_id), f"on a look at session {session_id}")
        if holder is not None:
            self._plane_clock.learn(sent, self._clock.monotonic(), holder.now)
        return holder

    async def announce(self, replica: ReplicaInfo) -> None:
        """``LeasePlane.announce``.

        Raises:
            RunnerError: ``plane_unavailable``.
        """
        await self._asked(self._plane.announce(replica), "on an announcement")

    async def _asked(self, question: Coroutine[Any, Any, T], what: str) -> T:
        try:
            async with asyncio.timeout(self._timeout):
                return await question
        except TimeoutError:
            self._metrics.add(PLANE_ERRORS)
            raise RunnerError("plane_unavailable", f"The lease plane gave no answer in {self._timeout:g} s.") from None
        except RunnerError as error:
            if error.code == "plane_unavailable":
                self._metrics.add(PLANE_ERRORS)
            raise
        except Exception as error:
            self._metrics.add(PLANE_ERRORS)
            log.exception("the lease plane failed %s", what)
            raise RunnerError("plane_unavailable", "The lease plane failed.") from error


class Announcer:
    """Makes a replica known to the others with the beats, whatever happens to the plane.

    Args:
        line: how the plane is asked.
        beat_seconds: time between announcements; a failed one is repeated after a fifth of it.
    """

    def __init__(self, line: PlaneLine, beat_seconds: float) -> None:
        self._line = line
        self._beat_seconds = beat_seconds
        self._news = asyncio.Event()
        self._replica: ReplicaInfo | None = None

    def tell(self, replica: ReplicaInfo) -> bool:
        """What to announce from now on, at once for the first time; whether ``run`` has to be started for it."""
        first = self._replica is None
        self._replica = replica
        self._news.set()
        return first

    async def run(self) -> None:
        """Announce until cancelled."""
        failing = False
        while self._replica is not None:
            self._news.clear()
            pause = self._beat_seconds
            try:
                await self._line.announce(self._replica)
                failing = False
            except RunnerError as error:
                if not failing:
                    log.warning("this replica could not be announced: %s", error.message)
                failing, pause = True, self._beat_seconds / 5
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._news.wait()
