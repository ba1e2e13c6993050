"""Has a snapshot: found, activated or built with its log shown; and looks into a sandbox made of it."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import shlex
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from runner.clock import Clock
from runner.errors import RunnerError
from runner.resources import resource_path
from runner.rules.daytona import judge
from runner.rules.snapshot import next_step
from runner.sandbox import contents
from runner.sandbox.daytona.lifecycle import Lifecycle, Way
from runner.sandbox.daytona.service import CallFailed, DaytonaService, Plan
from runner.sandbox.daytona.snapshots import Snapshot
from runner.tasks import shielded

BUILD_SECONDS: Final = 1800.0
LOOK_SECONDS: Final = 1.0
LOG_SECONDS: Final = 10.0
UP_SECONDS: Final = 300.0
REPORT_SECONDS: Final = 300.0
DOWN_SECONDS: Final = 30.0
CHECK_MINUTES: Final = 15
TAIL_LINES: Final = 20
LINE_CHARACTERS: Final = 200
CHECK_LABEL: Final = "acp-runner-check"
log = logging.getLogger("runner.sandbox.daytona")

How = Literal["built", "found", "activated"]


class Build:
    """One snapshot on its way; for one call of ``ensure``.

    Args:
        service: the vendor.
        clock: of the deadlines.
        name: names the content too, so one that exists is the same.
        dockerfile: takes nothing from a build context.
        news: called with each line of the build's log, bounded.
    """

    def __init__(
        self, service: DaytonaService, clock: Clock, name: str, dockerfile: str, news: Callable[[str], None]
    ) -> None:
        self._service = service
        self._clock = clock
        self._name = name
        self._dockerfile = dockerfile
        self._news = news
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._work: asyncio.Task[None] | None = None
        self._asked = False
        self._pending_since: float | None = None
        self._how: How = "found"

    async def ensure(self, *, again: bool = False) -> How:
        """Have it usable: found, activated or built. A call that is cancelled leaves the build to the next one.

        Args:
            again: delete one that is there first.

        Raises:
            RunnerError: ``sandbox_start_failed`` with the log's end, ``provider_at_capacity``; what is broken or stuck
                was deleted.
        """
        deadline = self._clock.monotonic() + BUILD_SECONDS
        if again:
            await self._tried(self._service.snapshots.delete(self._name))
        try:
            while self._clock.monotonic() < deadline:
                if await self._step(await self._look()):
                    return self._how
                await self._pause()
            raise self._failed(f"was not there after {BUILD_SECONDS:g} s")
        finally:
            if self._work is not None:
                self._work.cancel()
                await asyncio.gather(self._work, return_exceptions=True)

    async def _look(self) -> Snapshot | None:
        found = None
        try:
            found = await self._service.snapshots.get(self._name)
        except CallFailed as failed:
            if failed.failure.status != 404:
                self._minded(failed)
                return Snapshot(self._name, "unknown", "")
        now = self._clock.monotonic()
        pending = found is not None and found.state == "pending"
        self._pending_since = (self._pending_since if self._pending_since is not None else now) if pending else None
        return found

    async def _step(self, found: Snapshot | None) -> bool:
        """One step towards it; whether it is there."""
        since = self._pending_since
        pending = self._clock.monotonic() - since if since is not None else 0.0
        step = next_step(found.state if found else None, asked=self._asked, pending_seconds=pending)
        reason = (found.reason if found else "") or (found.state if found else "")
        match step:
            case "use":
                if self._work is not None:  # the end of its log is still to come
                    await asyncio.wait({self._work}, timeout=LOG_SECONDS)
                return True
            case "build":
                self._how, self._asked = "built", True
                snapshots = self._service.snapshots
                self._work = asyncio.create_task(snapshots.build(self._name, self._dockerfile, self._heard))
            case "activate":
                self._how = "activated" if self._how == "found" else self._how
                await self._tried(self._service.snapshots.activate(self._name))
            case "discard":
                self._news(f"{self._name} is what an earlier build left ({reason}): deleting it")
                await self._tried(self._service.snapshots.delete(self._name))
            case "fail" | "stuck":
                if self._work is not None and step == "fail":
                    await asyncio.wait({self._work}, timeout=LOG_SECONDS)
                await self._tried(self._service.snapshots.delete(self._name))
                raise self._failed("does not begin to be built" if step == "stuck" else f"could not be built: {reason}")
            case _:
                if found is None and self._work is not None and self._work.done():
                    self._begin_again(self._work)
        return False

    def _begin_again(self, work: asyncio.Task[None]) -> None:
        """The build ended and there is nothing: it was never begun, or somebody deleted it."""
        error = work.exception()
        if isinstance(error, CallFailed):
            self._minded(error)
        elif error is not None:
            raise error
        self._work, self._asked = None, False

    async def _pause(self) -> None:
        if self._work is not None and not self._work.done():
            await asyncio.wait({self._work}, timeout=LOOK_SECONDS)
        else:
            await asyncio.sleep(LOOK_SECONDS)

    async def _tried(self, call: Awaitable[None]) -> None:
        try:
            await call
        except CallFailed as failed:
            if failed.failure.status not in (400, 404):  # it is so already: the next look tells
                self._minded(failed)

    def _minded(self, failed: CallFailed) -> None:
        """Go on behind a failed call that means nothing for good."""
        verdict = judge(failed.call, failed.failure)
        if verdict.action not in ("retry", "look", "adopt"):
            raise RunnerError(verdict.code, f"Daytona refused the snapshot: {failed}")
        log.info("snapshot %s: %s failed: %s", self._name, failed.call, failed)

    def _heard(self, piece: str) -> None:
        for line in piece.splitlines():
            text = line.rstrip()
            if text:
                text = text if len(text) <= LINE_CHARACTERS else f"{text[:LINE_CHARACTERS]}… ({len(text)} characters)"
                self._tail.append(text)
                self._news(text)

    def _failed(self, what: str) -> RunnerError:
        end = "\n".join(f"  {line}" for line in self._tail)
        said = f" The end of its log:\n{end}" if end else ""
        return RunnerError("sandbox_start_failed", f"Snapshot {self._name} {what}.{said}")


async def report(service: DaytonaService, clock: Clock, snapshot: str, root: str, python: str) -> Mapping[str, Any]:
    """What ``sandboxes/inside/report.py`` says in a sandbox of a snapshot; the sandbox is deleted.

    Args:
        service: the vendor.
        clock: of the deadlines.
        snapshot: its name; empty is the account's own.
        root: where the agents lie in it.
        python: the interpreter in it.

    Raises:
        RunnerError: ``sandbox_start_failed``, ``provider_at_capacity``.
    """
    name = f"acp-runner-check-{secrets.token_hex(8)}"
    plan = Plan(name, {CHECK_LABEL: "snapshot"}, snapshot, CHECK_MINUTES, CHECK_MINUTES, CHECK_MINUTES)
    lifecycle = Lifecycle(service, clock, Counter(), Counter())
    try:
        found = await lifecycle.bring_up(plan, clock.monotonic() + UP_SECONDS, Way())
        return await _asked(service, found.id, root, python)
    except CallFailed as failed:
        raise RunnerError("sandbox_start_failed", f"A sandbox of {snapshot or 'the account'}: {failed}") from failed
    finally:
        gone = lifecycle.bring_down(name, "gone", clock.monotonic() + DOWN_SECONDS)
        if await shielded(gone, DOWN_SECONDS + 5) is None:
            log.warning("sandbox %s was not seen to go; the service deletes it by itself", name)


async def _asked(service: DaytonaService, identity: str, root: str, python: str) -> Mapping[str, Any]:
    place = f"{(await service.home(identity)).rstrip('/')}/acp-runner-check"
    await service.upload(identity, _programs(place), REPORT_SECONDS)
    command = shlex.join([python, "-I", f"{place}/report.py", root])
    code, said = await service.execute(identity, command, REPORT_SECONDS)
    try:
        told = json.loads(said.strip().splitlines()[-1])
    except (ValueError, IndexError):
        told = None
    if code != 0 or not isinstance(told, dict):
        raise RunnerError("sandbox_start_failed", f"The self-check inside failed: {said.strip()[-300:]}")
    return told


def _programs(place: str) -> dict[str, bytes]:
    return {
        f"{place}/report.py": resource_path("sandboxes", "inside", "report.py").read_bytes(),
        f"{place}/contents.py": Path(contents.__file__).read_bytes(),
    }
