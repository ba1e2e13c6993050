"""Brings a sandbox to where it is wanted: look, one step by the table, look again (``rules.daytona``)."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from runner.clock import Clock
from runner.errors import RunnerError, owned_elsewhere
from runner.rules.daytona import RETRY_SECONDS, Want, judge, next_step, start_code
from runner.sandbox.daytona.service import CallFailed, DaytonaService, Found, Plan

RECIPE_LABEL: Final = "acp-runner-recipe"
POLL_SECONDS: Final = 0.2
WAIT_MAX_SECONDS: Final = 4.0
log = logging.getLogger("runner.sandbox.daytona")


async def nowhere(*whose: object) -> bool:
    """Of sandboxes that no other runner can have."""
    return False


class Vanished(Exception):
    """There is no sandbox of this name."""


@dataclass(slots=True)
class Way:
    """What happened on the way up.

    Attributes:
        any_recipe: a disk is taken whatever it is made of: its files are wanted, not its programs.
        make: one is made where there is none.
        created: a new one was asked for, so there is no disk of before.
        woken: a sleeping disk was started.
        recovered, activated: the repair was tried; the snapshot was made usable.
        waits: how often in a row a call had to be put off.
    """

    any_recipe: bool = False
    make: bool = True
    created: bool = False
    woken: bool = False
    recovered: bool = False
    activated: bool = False
    waits: int = 0

    @property
    def ours(self) -> bool:
        """Whether what runs was started here."""
        return self.created or self.woken or self.recovered


class Lifecycle:
    """Steps by name, never by memory: whoever else changed the sandbox meanwhile is seen.

    Args:
        service: the vendor.
        clock: of the deadlines.
        counts, failures: of the provider.
        elsewhere: whether another runner that lives has its session: then it is that one's to stop and to use.
    """

    def __init__(
        self,
        service: DaytonaService,
        clock: Clock,
        counts: Counter[str],
        failures: Counter[tuple[str, str]],
        elsewhere: Callable[[Found], Awaitable[bool]] = nowhere,
    ) -> None:
        self._service = service
        self._clock = clock
        self._counts = counts
        self._failures = failures
        self._elsewhere = elsewhere

    async def bring_up(self, plan: Plan, deadline: float, way: Way) -> Found:
        """A started sandbox of this name: created, woken, repaired or replaced; one that runs is stopped before.

        Args:
            plan: for a new one.
            deadline: loop time.
            way: filled while it goes, for the caller must know it also when this fails or is cancelled.

        Raises:
            Vanished: there is none (any more), and ``way`` says that none is to be made.
            RunnerError: ``provider_at_capacity``, ``sandbox_start_failed``, ``owned_elsewhere``.
        """

        async def step(found: Found | None) -> Found | None:
            left = max(1.0, deadline - self._clock.monotonic())
            if found is None:
                if not way.make:
                    raise Vanished
                way.created = True
                return await self._service.create(plan, left)
            state, desired = found.state, found.desired
            todo = next_step("run", state, desired=desired, recoverable=found.recoverable, recovered=way.recovered)
            if todo in ("use", "start", "recover") and not way.any_recipe:
                _refuse_another_recipe(plan, found)
            if todo == "use" and await self._elsewhere(found):
                raise owned_elsewhere("Another replica has the session's sandbox. Try again.")
            match todo:
                case "use" if way.ours:
                    return found
                case "use":
                    # Of a runner that died: its agent may live on for a while, and a stop proves that it does not.
                    self._counts["leftover"] += 1
                    await self._service.stop(found.id, left)
                case "start":
                    way.woken = True
                    await self._service.start(found.id, left)
                case "recover":
                    way.recovered = True
                    await self._service.recover(found.id, left)
                case "replace":
                    log.warning("sandbox %s is replaced: it is %s: %s", found.name, state, found.reason)
                    self._counts["replaced"] += 1
                    if state not in ("destroyed", "destroying"):
                        await self._service.delete(found.id)
                    await asyncio.sleep(POLL_SECONDS)
                case _:
                    await asyncio.sleep(POLL_SECONDS)
            return None

        return await self._steps(plan, step, deadline, way)

    async def _steps(
        self, plan: Plan, step: Callable[[Found | None], Awaitable[Found | None]], deadline: float, way: Way
    ) -> Found:
        last = "it took too long"
        while self._clock.monotonic() < deadline:
            try:
                found = await step(await self._service.get(plan.name))
                way.waits = 0
                if found is not None:
                    return found
            except CallFailed as failed:
                last = str(failed)
                await self._after(plan, failed, deadline, way)
        raise RunnerError("sandbox_start_failed", f"The sandbox did not start in time: {last}")

    async def _after(self, plan: Plan, failed: CallFailed, deadline: float, way: Way) -> None:
        """Go on behind a failed call, or raise what it means."""
        verdict = judge(failed.call, failed.failure)
        self._failures[failed.call, verdict.action] += 1
        if verdict.action == "activate" and not way.activated:
            way.activated = True
            await self._service.snapshots.activate(plan.snapshot)
            return
        if verdict.action == "fail" or verdict.action == "activate":
            raise RunnerError(start_code(verdict.code), f"Daytona refused the sandbox: {failed}")
        way.waits += 1
        wait = max(verdict.seconds, _back_off(way.waits))
        if self._clock.monotonic() + wait >= deadline:
            raise RunnerError(start_code(verdict.code), f"The sandbox did not start in time: {failed}")
        await asyncio.sleep(wait)

    async def bring_down(self, name: str, want: Want, deadline: float) -> str | None:
        """Put it to sleep or away.

        Returns:
            What is known of it: ``stopped``, ``deleted``, ``elsewhere``: another runner has it by now; None when that
            was refused, or not reached by ``deadline``.
        """
        waits = 0
        while True:
            try:
                found = await self._service.get(name)
                if found is None:
                    return "deleted"
                waits = 0
                match next_step(want, found.state, desired=found.desired):
                    case "done":
                        return "deleted" if found.state in ("destroyed", "destroying") else "stopped"
                    case "stop" | "delete" if want == "sleep" and await self._elsewhere(found):
                        return "elsewhere"
                    case "stop":
                        await self._service.stop(found.id, max(1.0, deadline - self._clock.monotonic()))
                        continue
                    case "delete":
                        await self._service.delete(found.id)
                        continue
                    case _:
                        pass
            except CallFailed as failed:
                verdict = judge(failed.call, failed.failure)
                self._failures[failed.call, verdict.action] += 1
                log.info("sandbox %s: %s failed: %s", name, failed.call, failed)
                if verdict.action == "fail":
                    return None
                waits += 1
            wait = _back_off(waits) if waits else POLL_SECONDS
            if self._clock.monotonic() + wait >= deadline:
                return None
            await asyncio.sleep(wait)


def _back_off(waits: int) -> float:
    """Seconds behind the so manyth failure in a row, from 1 on."""
    return min(RETRY_SECONDS * 2.0 ** (waits - 1), WAIT_MAX_SECONDS)


def _refuse_another_recipe(plan: Plan, found: Found) -> None:
    """A disk is what its image was: another image would cost the session its workspace."""
    wanted = plan.labels.get(RECIPE_LABEL)
    there = found.labels.get(RECIPE_LABEL, wanted)
    if there != wanted:
        text = f"sandbox.recipe: the session's disk is made of {there}; {wanted} needs another session."
        raise RunnerError("invalid_request", text, field="sandbox.recipe")
